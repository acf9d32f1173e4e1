"""The task of a search: the spec to start from, the spec to reach, and the axes to reduce on the way."""

from __future__ import annotations

from dataclasses import dataclass

from weft.mesh import Layout, Partial, Placement, Replicate, Shard

from .links import Links
from .pricing import Sizes, sizes_of
from .spec import Spec, appended, cutting, moving, spec_of
from .steps import MakePartial


@dataclass(frozen=True, slots=True)
class Task:
    """A change from one layout of a mesh to another, in specs and sizes. Made by `Task.between`."""

    src: Layout
    sizes: Sizes
    start: Spec  # of src
    end: Spec  # to be reached before the `last` steps
    reduced: tuple[str, ...]  # axes to reduce on the way
    op: str  # their reduction
    whole: tuple[str, ...]  # axes of two or more ranks on which src replicates
    last: tuple[MakePartial, ...]  # final steps, which make axes Partial

    @classmethod
    def between(cls, src: Layout, dst: Layout, shape: tuple[int, ...], topology: Links | None) -> Task:
        """The task of going from `src` to `dst`, layouts of the same mesh."""
        sizes, start, end = sizes_of(src.mesh, shape, topology), spec_of(src, len(shape)), spec_of(dst, len(shape))
        triples = list(zip(src.mesh.axis_names, src.placements, dst.placements, strict=True))
        end, last = _made_partial(start, end, [(a, p, q) for a, p, q in triples if q != p and isinstance(q, Partial)])
        reduced = tuple(a for a, p, q in triples if isinstance(p, Partial) and not isinstance(q, Partial))
        op = next((p.op for p in src.placements if isinstance(p, Partial)), "sum")
        whole = tuple(a for a, p, _ in triples if isinstance(p, Replicate) and sizes.axes[a] > 1)
        return cls(src, sizes, start, end, reduced, op, whole, last)

    def floor(self) -> int:
        """Elements received by the busiest rank at least, if all sizes divide evenly; see `bounds.py`."""
        need = self.sizes.local(self.end)
        if not self.reduced:
            return need - self.sizes.overlap(self.start, self.end)
        taking = {*moving(self.start, self.end), *self.reduced, *self.whole}
        ranks = self.sizes.parts(taking)
        copies = ranks // self.sizes.parts([axis for order in self.end for axis in order if axis in taking])
        return max(need, need * (self.sizes.parts(self.reduced) + copies - 2) // copies)

    def all_cut(self) -> bool:
        """Whether every axis taking part shards a dim at the end, and shards a dim or is reduced at the start.

        A ReduceExchange needs this.
        """
        start, end = cutting(self.start), cutting(self.end)
        taking = {*moving(self.start, self.end), *self.reduced}
        return taking <= end and taking <= start | set(self.reduced)


def _made_partial(
    start: Spec, end: Spec, made: list[tuple[str, Placement, Placement]]
) -> tuple[Spec, tuple[MakePartial, ...]]:
    """The steps that make axes Partial at the end, and the spec before these steps.

    made: (axis, source placement, Partial placement) of every such axis. A shard stays in place, as the minor axis of
        its dim. An average has no identity to put around a shard, so its axis replicates before.
    """
    steps: list[MakePartial] = []
    order = [axis for cut in start for axis in cut]
    for axis, before, after in sorted(made, key=lambda item: order.index(item[0]) if item[0] in order else -1):
        assert isinstance(after, Partial), "made lists only axes that become Partial"
        if isinstance(before, Shard) and after.op != "avg":
            end = appended(end, [(axis, before.dim)])
            steps.insert(0, MakePartial(axis, after.op, before.dim))
        else:
            steps.append(MakePartial(axis, after.op))
    return end, tuple(steps)
