"""The layout rules of attention, and which attention weights each rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, Replicate, Shard
from weft.mesh.extension import terms

from ...dispatch.sharded import Shapes, Sharding, infer_gradient_layouts
from ...dispatch.sharded.rules import Layouts, check_heads
from ...dispatch.token_order import runs_within
from ...random.philox import Part

CACHED = ("the cached keys", "the cached values")
BOUNDS = "z"  # the index of start and stop in documents given as bounds


def rule(layouts: Layouts, shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `ATTENTION` and `PLAIN`. Queries may be sharded on the tokens, keys and values may not.

    layouts: of query, key, value, documents, the dropout key (None: a plain number), and sinks.
    """
    *inputs, _, sinks = layouts
    inputs.append(sinks)
    shape, key_shape, *_ = shapes
    assert shape is not None and key_shape is not None, "attention always has a query and keys"
    lead = ascii_lowercase[: len(shape) - 2]
    indices = (lead + "th", lead + "sh", lead + "sh", _of_documents(lead + "s", shapes[3]), "h")
    _check_heads(layouts[:2], shapes[:2], options["head_dim"])
    inputs[1:3] = keys_sharded_as_query(inputs[0], inputs[1:3], shape, key_shape, options["head_dim"])
    operands = ("the query", "the key", "the value", "the documents", "the sinks")
    output = _inferred(indices, inputs, operands, "s" + BOUNDS)
    query, head_dim, T, S = layouts[0], options["head_dim"], shape[-2], key_shape[-2]
    order = options.get("order")
    assert query is not None, "attention always has a query"

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        *rows, tokens, width = query.local_slices(shape, rank)
        found: dict[str, Any] = {"first": S - T + tokens.start}
        if order is not None:
            found = {"queries": runs_within(order, tokens.start, tokens.stop)}
        if options.get("dropout"):
            heads = slice(width.start // head_dim, width.stop // head_dim)
            weights = (*shape[:-2], shape[-1] // head_dim, T, S)
            found["part"] = Part.of(weights, (*rows, heads, tokens if order is None else slice(0, T), slice(0, S)))
        return found

    return Sharding(output, shape, infer_gradient_layouts(output, layouts), local)


def cache_rule(layouts: Layouts, shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `WITH_CACHE`, attention with a cache: no tensor may be sharded on the tokens.

    layouts: of query, key, value, the cached keys, the cached values, documents and sinks.
    """
    shape = shapes[0]
    assert shape is not None, "attention always has a query"
    lead = ascii_lowercase[: len(shape) - 2]
    indices = (*[lead + "th"] * 3, *[lead + "ch"] * 2, _of_documents(lead + "c", shapes[5]), "h")
    operands = ("the query", "the key", "the value", *CACHED, "the documents", "the sinks")
    key_shape, head_dim = shapes[1], options["head_dim"]
    assert key_shape is not None, "attention always has keys"
    _check_heads(layouts[:2], shapes[:2], head_dim)
    inputs = [layouts[0], *keys_sharded_as_query(layouts[0], layouts[1:5], shape, key_shape, head_dim), *layouts[5:]]
    output = _inferred(indices, inputs, operands, "tc" + BOUNDS)
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def _of_documents(ids: str, shape: tuple[int, ...] | None) -> str:
    """The einsum indices of documents of this shape. ids: the indices of ids [..., S]; bounds have one dim more."""
    return ids + BOUNDS if shape is not None and len(shape) > len(ids) else ids


def keys_sharded_as_query(
    query: Layout | None,
    keys: Sequence[Layout | None],
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    head_dim: int,
) -> list[Layout | None]:
    """The layouts of keys and values, rewritten as sharded over every axis which shards the query's heads.

    With fewer key heads than ranks, keys are sharded over the first of these axes, down to a single head on a rank, and
    replicated over the rest. Each rank then holds the key head which all of the rank's query heads read. The returned
    layouts say Shard where these keys have Replicate.
    keys: the layouts of key and value, or of all keys and values of a call with a cache.
    """
    assert query is not None, "attention always has a query"
    last = len(shape) - 1
    result = list(keys)
    for number, key in enumerate(keys):
        if key is None or key_shape[-1] // head_dim != key.parts(last):
            continue
        replicated = [axis for axis in query.shard_order.get(last, ()) if key[axis] == Replicate()]
        result[number] = key.replace(**dict.fromkeys(replicated, Shard(last)))
    return result


def _inferred(indices: tuple[str, ...], layouts: Any, operands: tuple[str, ...], whole: str) -> Layout:
    """The output's layout. indices, layouts, operands: of each operand the einsum indices, the layout and the name.

    whole: the indices which may not be sharded. An operand without a layout takes no part.
    """
    given = [i for i, layout in enumerate(layouts) if layout is not None]
    operation = terms.Operation(
        "attention", tuple(indices[i] for i in given), indices[0], terms.never,
        operands=tuple(operands[i] for i in given), whole=whole, why_whole="attention needs the keys of all tokens",
    )  # fmt: skip
    return terms.infer(operation, [layouts[i] for i in given])


def _check_heads(layouts: Layouts, shapes: Shapes, head_dim: int) -> None:
    """Raise LayoutError if a layout cuts a head."""
    for layout, shape in zip(layouts, shapes, strict=True):
        assert layout is not None and shape is not None, "attention always has a query and keys"
        check_heads("attention", layout, shape, head_dim)
