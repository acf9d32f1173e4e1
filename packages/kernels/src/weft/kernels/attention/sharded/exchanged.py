"""Attention to a rank's own keys and to received keys, on DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh.extension import terms
from weft.reshard.extension import between_graphs

from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, autocasts, infer_gradient_layouts
from ...dispatch.sharded.rules import Layouts, check_heads
from ...dropout.sharded import check_probability, checked_key
from .. import exchanged
from .layout_rule import keys_sharded_as_query
from .op import check_scores

OPERANDS = ("the query", "the key", "the value", "the sinks")


@between_graphs("keys are on their way by the documents of the batch; compile without fullgraph")
@autocasts("attention")
def attention_to_received(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    received: exchanged.ReceivedKeys,
    *,
    head_dim: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: int | Tensor | None = None,
    dropout_name: str | None = None,
) -> Tensor:
    """Causal attention of a rank's tokens to the rank's own keys and to keys on their way from other ranks.

    query [B, T, heads * D], key and value [B, T, kv_heads * D]: DTensors, sharded on the tokens and otherwise as for
    `attention`.
    received: the exchange that the caller started, with the ranges of own and of received keys.
    scale, softcap, sinks, dropout, dropout_key, dropout_name: as for `attention`.
    Communication: forward waits for `received`; backward sends the gradients of received keys and values back.
    Raises LayoutError as `attention`.
    """
    check_scores(query, head_dim, scale, softcap, sinks)
    check_probability("attention", "dropout", dropout)
    options: dict[str, Any] = {"head_dim": head_dim, "scale": head_dim**-0.5 if scale is None else scale}
    options["softcap"] = softcap
    operand, number = checked_key("attention", "dropout_key", dropout_key) if dropout else (None, 0)
    options |= {"dropout": float(dropout), "number": number, "name": dropout_name}
    return apply(TO_RECEIVED, query, key, value, operand, sinks, received=received, **options)


def rule(layouts: Layouts, shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `TO_RECEIVED`. Query, key and value are sharded alike, by rows, tokens and complete heads.

    layouts: of query, key, value, the dropout key (None: a plain number), and sinks, which are sharded by heads.
    """
    query, sinks, shape, key_shape, head_dim = layouts[0], layouts[4], shapes[0], shapes[1], options["head_dim"]
    assert query is not None and shape is not None and key_shape is not None, "there is a query and a key"
    for layout, its in zip(layouts[:2], shapes[:2], strict=True):
        assert layout is not None and its is not None, "there is a query and a key"
        check_heads("attention", layout, its, head_dim)
    inputs: Any = [query, *keys_sharded_as_query(query, layouts[1:3], shape, key_shape, head_dim)]
    indices = (*[ascii_lowercase[: len(shape) - 2] + "th"] * 3, "h")
    if sinks is None:
        indices = indices[:3]
    else:
        inputs.append(sinks)
    operation = terms.Operation("attention", indices, indices[0], terms.never, operands=OPERANDS[: len(indices)])
    output = terms.infer(operation, inputs)

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        rows, _, width = query.local_slices(shape, rank)
        return {
            "first_row": rows.start,
            "first_head": width.start // head_dim,
            "heads": shape[-1] // head_dim,
            "tokens": shape[-2],
        }

    return Sharding(output, shape, infer_gradient_layouts(output, layouts), local)


TO_RECEIVED = Op("attention_to_received", exchanged.forward, exchanged.backward, rule, varying=("number", "received"))
