"""Plans from a layout on a mesh to a layout on a second mesh: reduce, exchange, gather.

A Partial source is first reduced to shards on its own mesh. Each shard is then sent once, to a single rank of the
target mesh. Last, the ranks of the target mesh gather the elements needed by several of them. Where the meshes share
ranks, sending every rank all its missing elements may take fewer bytes, because ranks keep the elements they hold.
"""

from __future__ import annotations

from weft.mesh import Layout, Partial, Replicate, Shard

from .exchange import messages_of
from .layouts import replicate_partials
from .links import Links
from .search import Fits, cheapest
from .steps import Exchange, MakePartial, Relabel, Step

Shape = tuple[int, ...]


def cheapest_across(
    src: Layout, dst: Layout, shape: Shape, *, itemsize: int, topology: Links | None, fits: Fits | None
) -> tuple[Step, ...] | None:
    """Steps from `src` to `dst` on a second mesh; None where `fits` accepts none of the plans found. `plan` calls it.

    Two plans are tried: the exchange sends each element to a single rank of the target mesh, which then gathers; or to
    all ranks that need the element. Between disjoint meshes the first plan is tried first: each byte crosses once.
    Between meshes that share ranks, the plan whose busiest rank receives fewer elements is tried first.

    itemsize, topology: price the steps on each mesh, as in `cheapest`.
    fits: whether a plan's steps are acceptable, such as within a memory limit; None accepts all.
    """
    target = replicate_partials(dst)
    partials = tuple(
        MakePartial(axis, placement.op)
        for axis, placement in zip(dst.mesh.axis_names, dst.placements, strict=True)
        if isinstance(placement, Partial)
    )
    reduced = _scatter_partials(src, target, shape)
    sharded = _shard_replicated(target, shape)
    ways = (
        [sharded]
        if _are_disjoint(src, dst)
        else sorted((target, sharded), key=lambda way: _received(reduced, way, target, shape))
    )
    for middle in dict.fromkeys((*ways, target, sharded)):
        before = cheapest(src, reduced, shape, itemsize=itemsize, topology=topology)
        after = cheapest(middle, target, shape, itemsize=itemsize, topology=topology)
        assert before is not None and after is not None, "without `fits` there is always a way"
        communicates = any(messages_of(reduced, middle, shape, rank).receives for rank in middle.mesh.ranks)
        crossing: Step = Exchange(middle) if communicates else Relabel(middle)
        steps = (*before, crossing, *after, *partials)
        if fits is None or fits(steps):
            return steps
    return None


def _are_disjoint(src: Layout, dst: Layout) -> bool:
    return not any(rank in src.mesh for rank in dst.mesh.ranks)


def _received(reduced: Layout, middle: Layout, target: Layout, shape: Shape) -> tuple[int, int, int]:
    """Elements received in an exchange from `reduced` to `middle`, and a gather from `middle` to `target`.

    Returns the elements of the busiest rank, of all ranks, and of all ranks in the exchange alone.
    """
    ranks = middle.mesh.ranks
    exchanged = [messages_of(reduced, middle, shape, rank).received_elements for rank in ranks]
    gathered = [messages_of(middle, target, shape, rank).received_elements for rank in ranks]
    totals = [a + b for a, b in zip(exchanged, gathered, strict=True)]
    return max(totals), sum(totals), sum(exchanged)


def _scatter_partials(src: Layout, target: Layout, shape: Shape) -> Layout:
    """`src` with Shard in place of Partial, on a dim sharded by the target where possible; a scalar is replicated."""
    for axis, placement in zip(src.mesh.axis_names, src.placements, strict=True):
        if isinstance(placement, Partial):
            dim = _dim_to_cut(src, axis, shape, prefer=[*target.shard_order])
            src = src.replace(**{axis: Replicate() if dim is None else Shard(dim)})
    return src


def _shard_replicated(target: Layout, shape: Shape) -> Layout:
    """`target` with Shard in place of Replicate, so each element is on a single rank. A scalar stays replicated."""
    for axis, placement in zip(target.mesh.axis_names, target.placements, strict=True):
        if isinstance(placement, Replicate) and target.mesh.axis_size(axis) > 1:
            dim = _dim_to_cut(target, axis, shape, prefer=[])
            if dim is not None:
                target = target.replace(**{axis: Shard(dim)})
    return target


def _dim_to_cut(layout: Layout, axis: str, shape: Shape, prefer: list[int]) -> int | None:
    """The dim to shard over `axis`; None for a scalar.

    Evenly divisible dims come first, then dims in `prefer`, then larger dims.
    """
    local = layout.largest_local_shape(shape)
    dims = sorted(
        range(len(shape)),
        key=lambda dim: (local[dim] % layout.mesh.axis_size(axis) != 0, dim not in prefer, -local[dim]),
    )
    return next(iter(dims), None)
