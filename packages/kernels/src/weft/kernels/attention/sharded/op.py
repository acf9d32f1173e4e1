"""`attention` on plain tensors and DTensors, and its companions.

`document_bounds`: the bounds of the keys' documents. `attention_to_received`: attention to a rank's own keys and to
received keys, on DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, infer
from weft.mesh.extension import terms
from weft.reshard.extension import between_graphs, exact_axes

from ...dispatch.arguments import check_flag, check_tensors, described, holds_ints, is_int, is_number
from ...dispatch.backend import WIDE, is_compiling, runs_natively
from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands, infer_gradient_layouts
from ...dispatch.sharded.rules import Layouts, check_heads
from ...dispatch.token_order import checked_order
from ...dropout.sharded import check_key_kind, check_name, check_probability, checked_key
from .. import exchanged, function, plain, ranges
from ..plain import is_kernel_faster
from .cache import KeyValueCache
from .layout_rule import cache_rule, keys_sharded_as_query, rule

OPERANDS = ("query", "key", "value", "documents", "sinks")  # in messages
MOST_HEAD_DIM = 256  # the kernels hold a tile of whole heads
MOST_WINDOW = 2**31 - 1  # places are 32-bit numbers, and no query sees more keys: a longer window is cut to this one
LEAST, MOST = 1e-18, 1e18  # of scale and softcap: the kernels divide scale by softcap in float32
GIVE = f"give a number from {LEAST} to {MOST}, or None"


@autocasts("attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    head_dim: int,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    order: Sequence[tuple[int, int]] | None = None,
    dropout: float = 0.0,
    dropout_key: int | Tensor | None = None,
    dropout_name: str | None = None,
    cache: KeyValueCache | None = None,
) -> Tensor:
    """Scaled dot-product attention (Vaswani et al., 2017), with grouped queries where there are fewer key heads.

    query: [..., T, heads * D]. The T queries belong to the last T of the keys' tokens.
    key, value: [..., S, kv_heads * D], where kv_heads divides heads.
    head_dim: D, 256 at most.
    Returns a tensor of the shape of `query`.
    scale: the factor of query @ key.T; None means 1 / sqrt(D).
    causal: whether a query sees only the keys up to its own token's.
    window: with causal, a query sees at most the last `window` of these keys (Child et al., 2019). None: all of these.
    softcap: each score x becomes softcap * tanh(x / softcap), before the mask (Gemma 2, 2024). None: scores stay.
    sinks: [heads], a further logit in each row's softmax, without a value: the sink takes a share of the weights
    (gpt-oss, 2025). None: no sinks.
    documents: ids [..., S], the document of each key's token, where each document is a contiguous stretch; or the
    bounds that `document_bounds` makes of ids, once for all layers. A query sees the keys of its own document only.
    None: a row is one document.
    order: for tokens which are not in memory in the order of the sequence, as in context parallelism: the runs
    [start, stop) of the sequence, in the order of memory. Causal, window and dropout then follow the sequence, and the
    bounds in `documents` are positions in the sequence. None: memory has the sequence's order.
    dropout: the share of attention weights set to zero, 0 to 1; the rest are divided by 1 - dropout.
    dropout_key, dropout_name: as `key` and `name` of `weft.kernels.dropout`, for attention weights [..., heads, T, S];
    dropout_key may be None without dropout. The dropout mask is the same in every layout, and in every repetition of
    the call.
    cache: holds the keys and values of earlier tokens; this call adds `key` and `value`. query, key and value then have
    the new tokens only, documents is [..., capacity] or [..., capacity, 2], and no gradient is recorded. None: key and
    value have all tokens.

    A query without keys has output 0 and gradient 0. Saved for backward: the operands, the output, and a logsumexp for
    each query and head. Nothing of T x S is in memory. Second derivatives are refused.
    torch.compile(fullgraph=True) sees one op forward and one op backward.

    Layouts: query, key and value share a layout, sharded on the leading dims or by complete heads; the query may also
    be sharded on the tokens. documents are sharded on the leading dims as the query is, and sinks as the query's heads.
    The output has the query's layout.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for mismatched shapes, dtypes, devices or options, and for a
    document which ends and comes back, and for bounds that `document_bounds` cannot have made, where the host can read
    these; RuntimeError for a cache where gradients are recorded.
    """
    check_operands("attention", OPERANDS, 3, query, key, value, documents, sinks)
    if cache is not None and not isinstance(cache, KeyValueCache):
        raise ValueError(f"attention: cache is {described(cache)}; give a KeyValueCache")
    check_flag("attention", "causal", causal)
    check_name("attention", "dropout_name", dropout_name)
    # Compiled code may have an int as the key only without dropout, and then does not read the key.
    if dropout_key is not None and not dropout and not is_compiling():
        check_key_kind("attention", "dropout_key", dropout_key)
    _check(query, key, value, head_dim, causal and cache is None)
    if query.dtype not in WIDE or key.dtype != query.dtype or value.dtype != query.dtype:
        raise ValueError(
            f"attention: query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; cast them with .to(), "
            f"to one of {', '.join(map(str, WIDE))}"
        )
    S = key.shape[-2] if cache is None else cache.capacity
    _check_seen(query, S, causal, window, documents)
    check_scores(query, head_dim, scale, softcap, sinks)
    check_probability("attention", "dropout", dropout)
    window = None if window is None else min(window, MOST_WINDOW)
    options: dict[str, Any] = {
        "head_dim": head_dim, "causal": causal, "scale": scale, "window": window, "softcap": softcap
    }  # fmt: skip
    if cache is not None:
        _check_with_cache(query, key, value, causal, dropout)
        if order is not None:
            raise ValueError("attention: a cache stores tokens in the order of the sequence; leave order out")
        tensors = (query, key, value, *cache.room_for(key), documents, sinks)
        output = apply(WITH_CACHE, *tensors, length=cache.length, **options)
        cache.length += key.shape[-2]
        return output
    further_options = (documents, order, sinks, softcap, dropout or None)
    if plain.is_plain(query, key, causal, window, *further_options):
        if runs_natively(query, key, value):  # a small call spends most of its time on the host
            return plain.forward(query, key, value, head_dim=head_dim, causal=causal, scale=scale)
        if _torch_is_faster(query, key, head_dim, causal):
            return apply(PLAIN, query, key, value, None, None, None, head_dim=head_dim, causal=causal, scale=scale)
    operand = None
    if dropout:
        operand, number = checked_key("attention", "dropout_key", dropout_key)
        options |= {"dropout": float(dropout), "number": number, "name": dropout_name}
    if order is not None:
        if query.shape[-2] != S:
            raise ValueError(
                f"attention: order describes all tokens, but there are {query.shape[-2]} queries and {S} keys"
            )
        options["order"] = checked_order("attention", order, S)
    return apply(ATTENTION, query, key, value, documents, operand, sinks, **options)


def _torch_is_faster(query: Tensor, key: Tensor, head_dim: int, causal: bool) -> bool:
    """Whether a plain call runs torch's function: on a GPU, where torch's is fused and was not measured as slower.

    The measurements of `is_kernel_faster` are of causal calls with as many queries as keys. False inside `exact_sums`,
    and for a query sharded on the tokens: a causal call is then not plain on each rank.
    """
    if not query.is_cuda or exact_axes() is not None:  # `exact_sums` needs an op with a backward of Weft
        return False
    if not plain.is_fused_on_gpu(query.dtype, head_dim):
        return False
    if isinstance(query, DTensor) and any(each.is_shard(query.ndim - 2) for each in query.placements):
        return False
    tokens = query.shape[-2]
    is_measured = causal and tokens == key.shape[-2]
    return not (is_measured and is_kernel_faster(query.device, query.dtype, head_dim, tokens))


def _check(query: Tensor, key: Tensor, value: Tensor, head_dim: int, causal: bool) -> None:
    """Raises ValueError for mismatched shapes of query, key and value."""
    of_query, of_key = query.shape, key.shape
    if not (is_int(head_dim) and 1 <= head_dim <= MOST_HEAD_DIM):
        raise ValueError(f"attention: head_dim is {described(head_dim)}; give the size of a head, 1 to {MOST_HEAD_DIM}")
    fits = len(of_query) > 1 and of_key == value.shape and of_key[:-2] == of_query[:-2] and of_key[-1] > 0
    if not fits or of_query[-1] % head_dim or of_key[-1] % head_dim or of_query[-1] % of_key[-1]:
        raise ValueError(
            f"attention takes query [..., T, heads * {head_dim}] and key and value [..., S, kv_heads * {head_dim}], "
            f"where kv_heads divides heads; got {tuple(of_query)}, {tuple(of_key)} and {tuple(value.shape)}; reshape "
            f"them, or give another head_dim"
        )
    if causal and of_query[-2] > of_key[-2]:
        raise ValueError(
            f"attention: causal needs at least as many keys as queries, got {of_key[-2]} and {of_query[-2]}; give the "
            f"missing keys"
        )


def _check_seen(query: Tensor, S: int, causal: bool, window: int | None, documents: Tensor | None) -> None:
    """Raises ValueError for a window or documents which do not fit the query and the S keys."""
    T = query.shape[-2]
    if window is not None and not (is_int(window) and window >= 1):
        raise ValueError(f"attention: window is {described(window)}; give how many keys a query sees, 1 or more")
    if window is not None and not causal:
        raise ValueError(f"attention: a window of {window} needs causal=True; leave window out")
    if documents is None:
        return
    ids = (*query.shape[:-2], S)
    if not (documents.shape == ids or documents.shape == (*ids, 2)) or not holds_ints(documents):
        raise ValueError(
            f"attention takes documents [..., {S}] of ints, one for each key, or their bounds [..., {S}, 2], got "
            f"{tuple(documents.shape)} of {documents.dtype} beside a query of {tuple(query.shape)}"
        )
    if T > S:
        raise ValueError(f"attention: {T} queries have no documents among {S} keys; give at least as many keys")


def check_scores(
    query: Tensor, head_dim: int, scale: float | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Raises ValueError for a scale or softcap out of range, and for sinks which do not fit the query."""
    if scale is not None and not (is_number(scale) and LEAST <= scale <= MOST):
        # A scale below 0 is refused because torch's fused attention adds the mask before the scale, which would turn
        # -inf into inf.
        raise ValueError(f"attention: scale is {described(scale)}; {GIVE}; a query may be negated instead")
    if softcap is not None and not (is_number(softcap) and LEAST <= softcap <= MOST):
        raise ValueError(f"attention: softcap is {described(softcap)}; {GIVE}")
    heads = query.shape[-1] // head_dim
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype not in WIDE):
        raise ValueError(
            f"attention takes sinks [{heads}], one for each head, of a floating dtype; got {tuple(sinks.shape)} of "
            f"{sinks.dtype}"
        )


def _check_with_cache(query: Tensor, key: Tensor, value: Tensor, causal: bool, dropout: float) -> None:
    """Raises ValueError or RuntimeError for arguments which do not fit a call with a cache."""
    if not causal or query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"attention: a call with a cache needs causal=True, and query, key and value of the new tokens only; got "
            f"causal={causal}, {query.shape[-2]} queries and {key.shape[-2]} keys"
        )
    if dropout:
        raise ValueError(f"attention: a cache is not for training, but dropout={dropout}; call model.eval() first")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise RuntimeError("attention: a cache has no gradient; call the model in torch.no_grad()")


# `number` and `length` differ in each call: the cache of `CallPlan`s ignores both. PLAIN has no backward, because torch
# differentiates its forward; WITH_CACHE has none, because no gradient is recorded.
PLAIN = Op("plain_attention", plain.forward, None, rule)
ATTENTION = Op("attention", function.forward, function.backward, rule, varying=("number",))
WITH_CACHE = Op("attention_with_cache", function.forward_with_cache, None, cache_rule, varying=("length",))


def document_bounds(documents: Tensor) -> Tensor:
    """The start and stop of each token's document, for `attention(documents=...)`: made once, used by all layers.

    documents: ids [..., S] of ints. Each contiguous stretch of equal ids is a document.
    Returns int32 [..., S, 2].

    Layouts: sharded on the leading dims; the bounds are sharded as the ids.
    Communication: none.
    Raises LayoutError for other layouts; ValueError for ids which are no ints, and for a document which ends and
    comes back, where the host can read the ids.
    """
    check_tensors("document_bounds", ("documents",), documents)
    if not documents.ndim or not holds_ints(documents):
        raise ValueError(
            f"document_bounds takes ids [..., S] of ints, got {tuple(documents.shape)} of {documents.dtype}; give each "
            f"token the number of its document"
        )
    return apply(BOUNDS, documents)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    (documents,), (shape,) = layouts, shapes
    assert documents is not None and shape is not None, "there is one operand"
    infer.whole("document_bounds", "the documents", documents, len(shape) - 1)
    return Sharding(documents, (*shape, 2), infer_gradient_layouts(documents, layouts))


BOUNDS = Op("document_bounds", ranges.document_bounds, None, _rule, dtype=lambda dtype, options: torch.int32)


RECEIVED_OPERANDS = ("the query", "the key", "the value", "the sinks")


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


def _received_rule(layouts: Layouts, shapes: Shapes, options: dict[str, Any]) -> Sharding:
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
    operation = terms.Operation(
        "attention", indices, indices[0], terms.never, operands=RECEIVED_OPERANDS[: len(indices)]
    )
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


TO_RECEIVED = Op(
    "attention_to_received", exchanged.forward, exchanged.backward, _received_rule, varying=("number", "received")
)
