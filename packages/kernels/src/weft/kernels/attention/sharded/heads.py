"""Layouts of tensors whose last dim is heads * D: a shard must hold complete heads."""

from __future__ import annotations

from collections.abc import Sequence

from weft.mesh import Layout, LayoutError, Replicate, Shard


def check_heads(name: str, layout: Layout, shape: tuple[int, ...], head_dim: int) -> None:
    """Raises LayoutError where a shard of the last dim would hold a part of a head. name: the op, for the message."""
    axes = layout.shard_order.get(len(shape) - 1, ())
    heads = shape[-1] // head_dim
    ways = layout.parts(len(shape) - 1)
    if heads % ways:
        degrees = [degree for degree in range(1, heads + 1) if heads % degree == 0]
        raise LayoutError(
            f"{name}: {heads} heads of {head_dim} cannot be split evenly over {' x '.join(map(repr, axes))} of size "
            f"{ways}; sizes that work: {', '.join(map(str, degrees))}"
        )


def keys_sharded_as_query(
    query: Layout | None,
    keys: Sequence[Layout | None],
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    head_dim: int,
) -> list[Layout | None]:
    """The layouts of keys and values, rewritten as sharded over every axis which shards the query's heads.

    keys: the layouts of key and value, or of the cache.

    With fewer key heads than ranks, the keys are sharded over the first of these axes, down to one head a rank, and
    replicated over the rest. Each rank then holds the one key head read by all its query heads.
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
