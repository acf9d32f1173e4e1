"""Heads lie side by side in the last dim, and a shard holds whole ones."""

from __future__ import annotations

from collections.abc import Sequence

from weft.mesh import Layout, LayoutError, Replicate, Shard


def check_heads(name: str, layout: Layout, shape: tuple[int, ...], head_dim: int) -> None:
    """Raises LayoutError where the last dim of `shape` is sharded so that a head is cut."""
    axes = layout.shard_order.get(len(shape) - 1, ())
    heads = shape[-1] // head_dim
    ways = layout.parts(len(shape) - 1)
    if heads % ways:
        degrees = [degree for degree in range(1, heads + 1) if heads % degree == 0]
        raise LayoutError(
            f"{name}: {heads} heads of {head_dim} cannot be split evenly over {' x '.join(map(repr, axes))} of size "
            f"{ways}; sizes that work: {', '.join(map(str, degrees))}"
        )


def heads_as_cut(
    query: Layout | None,
    keys: Sequence[Layout | None],
    shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    head_dim: int,
) -> list[Layout | None]:
    """The layouts of keys and values as if they were cut wherever the query's heads are.

    A rank that has one key head has the one that all its query heads read, if the heads of the queries are cut by the axes
    of the keys first. On the axes after those the keys may be replicated: their heads are fewer than the ranks.
    """
    assert query is not None, "it is given"
    last = len(shape) - 1
    found = list(keys)
    for number, key in enumerate(keys):
        if key is None or key_shape[-1] // head_dim != key.parts(last):
            continue
        whole = [axis for axis in query.shard_order.get(last, ()) if key[axis] == Replicate()]
        found[number] = key.replace(**dict.fromkeys(whole, Shard(last)))
    return found
