"""Embedding on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, Shard, infer

from ..dispatch.arguments import check_tensors, described, is_int
from ..dispatch.backend import TOKEN_DTYPES, check_floats, runs_natively
from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from . import function


def embedding(tokens: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` at the indices `tokens`.

    tokens: [...] of int32 or int64.
    weight: the table, [V, H].
    Returns [..., H].
    padding_idx: a row whose gradient is 0, as in torch.nn.functional.embedding; negative numbers count from the end.
    None: every row has a gradient.

    Layouts: those of a one-hot matrix times the table. A table sharded on V gives a Partial(sum) output; a table
    sharded on H shards the output's last dim. Sharded tokens shard the output, and need the table replicated on the
    same axis.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for other dtypes and for tensors on two devices. A token
    outside 0 to V - 1 raises ValueError on a CPU and gives NaN on a GPU.
    """
    if padding_idx is not None:
        padding_idx = _row(padding_idx, weight)
    if (
        runs_natively(weight)
        and type(tokens) is Tensor
        and tokens.is_cpu
        and weight.dim() == 2
        and tokens.dtype in TOKEN_DTYPES
    ):
        return function.look_up(tokens, weight, padding_idx)
    return _look_up(tokens, weight, padding_idx)


@autocasts("embedding")
def _look_up(tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """`embedding` by the op `EMBEDDING`. padding_idx: not negative."""
    check_operands("embedding", ("tokens", "weight"), 2, tokens, weight)
    _check_table(weight)
    if tokens.dtype not in TOKEN_DTYPES:
        raise ValueError(f"embedding takes int tokens, got {tokens.dtype}; cast them with .to(torch.int64)")
    check_floats("embedding", ("the weight",), weight)
    return apply(EMBEDDING, tokens, weight, padding_idx=padding_idx)


def _row(padding_idx: int, weight: Tensor) -> int:
    """padding_idx counted from the first row. Raises ValueError for what is no row of the table."""
    check_tensors("embedding", ("weight",), weight)
    _check_table(weight)
    rows = weight.shape[0]
    if not (is_int(padding_idx) and -rows <= padding_idx < rows):
        raise ValueError(
            f"embedding: padding_idx is {described(padding_idx)}, outside the table of {rows} rows; give one of "
            f"{-rows} to {rows - 1}"
        )
    return padding_idx % rows


def _check_table(weight: Tensor) -> None:
    if weight.ndim != 2:
        raise ValueError(
            f"embedding takes a weight of shape [V, H], got {tuple(weight.shape)}; give a row for each token of the "
            f"vocabulary"
        )


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    tokens, weight = layouts
    tokens_shape, weight_shape = shapes
    assert tokens is not None and weight is not None and tokens_shape is not None and weight_shape, "both are given"
    output = infer.embedding(tokens, weight, len(tokens_shape))
    leading = ascii_lowercase[: len(tokens_shape)]
    one_hot = tokens.replace(**dict.fromkeys(weight.shard_order.get(0, ()), Shard(len(tokens_shape))))

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        return None, infer.einsum(f"{leading}y,{leading}z->yz", one_hot, grad)

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"vocab_start": weight.local_slices(weight_shape, rank)[0].start, "vocab_size": weight_shape[0]}

    return Sharding(output, (*tokens_shape, weight_shape[1]), gradient_layouts, local_options)


EMBEDDING = Op("embedding", function.forward, function.backward, _rule)
