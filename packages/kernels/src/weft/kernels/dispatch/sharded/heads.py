"""The check of layouts for tensors whose last dim is heads * D: a shard must hold complete heads."""

from __future__ import annotations

from weft.mesh import Layout, LayoutError


def check_heads(name: str, layout: Layout, shape: tuple[int, ...], head_dim: int) -> None:
    """Raises LayoutError where a shard of the last dim would hold a part of a head. name: the op, for the message."""
    axes = layout.shard_order.get(len(shape) - 1, ())
    heads = shape[-1] // head_dim
    num_shards = layout.parts(len(shape) - 1)
    if heads % num_shards:
        degrees = [degree for degree in range(1, heads + 1) if heads % degree == 0]
        raise LayoutError(
            f"{name}: {heads} heads of {head_dim} cannot be split evenly over {' x '.join(map(repr, axes))} of size "
            f"{num_shards}; sizes that work: {', '.join(map(str, degrees))}"
        )
