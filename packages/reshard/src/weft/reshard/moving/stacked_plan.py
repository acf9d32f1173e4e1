"""Plans inside `exact_sums`: `prepare_exact` makes a plan ready to run, with the bits of the named mesh's sums.

Inside `exact_sums`, collectives add over the coordinates of the named mesh by a binary tree (tree.py). The tree is the
same on every mesh, so most plans run unchanged. `_differs` says whether a plan cannot; a `StackedPlan` then runs in the
plan's place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, Partial, Replicate, Shard

from ..planning.layouts import identity, partial_axes, reduced_axes
from ..planning.plan import Plan
from ..planning.plan import plan as make_plan
from ..planning.steps import AllReduce, MakePartial, ReduceExchange, ReduceScatter, axes_of, layout_after
from ..world.exact import exact_axes, fold_of, named_size
from ..world.groups import this_rank
from .collectives import Pending, Running
from .executor import PreparedPlan, prepare, run_or_replay
from .tree import NO_ADDENDS, Addends, addends_of, tree_order


def prepare_exact(plan: Plan, target: Layout, mesh: DeviceMesh) -> PreparedPlan | StackedPlan:
    """The plan ready to run on this rank: unchanged, or inside `exact_sums` as a StackedPlan if `_differs`.

    Called by `plan_change`, for each new LayoutChange. mesh: the DeviceMesh of the tensor before the plan.
    target: the layout given to `reshard`. Where the target's mesh is the source's with the axes in a different order,
    `plan.dst` has the axes in the source's order; leading dims of stacked addends follow the order of `target`.
    Communication: none.
    """
    if exact_axes() is None or not _differs(plan):
        return prepare(plan, mesh)
    return StackedPlan(plan, target, mesh)


def _differs(plan: Plan) -> bool:
    """Whether the plan, run unchanged, could give different bits than the same layout change on the named mesh.

    True in each of these cases: a rank holds stacked addends (tree.py) before or after the plan; the plan sums out of
    the tree's order; the source is Partial("avg") on an axis; the plan makes each shard an addend of a Partial value,
    where the named mesh's plan might not.
    """
    if addends_of(plan.src).axes or addends_of(plan.dst).axes:
        return True
    if not _sums_in_tree_order(plan) or any(placement == Partial("avg") for placement in plan.src.placements):
        return True
    new_partial = [
        axis for axis in partial_axes(plan.dst) if plan.src.mesh != plan.dst.mesh or axis in _new_partial_axes(plan)
    ]
    return (
        bool(new_partial) and _region_axis(plan) is None and any(_makes_partial_of_shards(step) for step in plan.steps)
    )


def _makes_partial_of_shards(step: object) -> bool:
    """Whether the step makes each shard, with the op's identity around the shard, an addend of a Partial value."""
    return isinstance(step, MakePartial) and step.dim is not None


def _sums_in_tree_order(plan: Plan) -> bool:
    """Whether the plan's collectives add the axes in the order of the tree."""
    last = -1
    for step, layout in zip(plan.steps, plan.layouts, strict=True):
        if not isinstance(step, AllReduce | ReduceScatter | ReduceExchange):
            continue
        if isinstance(step, ReduceExchange):
            if step.target.mesh != layout.mesh or partial_axes(step.target):
                return False  # an addend may change its coordinate on an axis that stays Partial
            phases: list[tuple[str, ...]] = [reduced_axes(layout, step.target)]
        else:
            apart = step.apart if isinstance(step, ReduceScatter) else ()
            phases = [(axis,) for axis in apart] or [axes_of(step)]
        order = tree_order(layout.mesh.axis_names)
        for axes in phases:
            places = [order.index(axis) for axis in axes]
            if min(places) < last:
                return False
            last = max(places)
    return True


def _new_partial_axes(plan: Plan) -> list[str]:
    """The axes that are Partial after the plan and not before; after a change of mesh, all Partial axes."""
    if plan.src.mesh != plan.dst.mesh:
        return partial_axes(plan.dst)
    return [axis for axis in partial_axes(plan.dst) if not isinstance(plan.src[axis], Partial)]


def _region_axis(plan: Plan) -> str | None:
    """The axis along which each shard of the named mesh becomes an addend of a newly Partial value; or None.

    The addend has the shard's values in the shard's place, and the op's identity elsewhere.
    Four conditions: the plan stays on a single mesh; the plan changes this axis alone, from Shard to a Partial other
    than Partial("avg"); no further axis with a named size above 1 shards the dim; and the named mesh's shards are even.
    Without an axis, the addend of coordinate 0 is the whole value, and all further addends are the op's identity; for
    Partial("avg") every addend is the whole value. The answer is the same on every mesh.
    """
    src, dst = plan.src, plan.dst
    if src.mesh != dst.mesh:
        return None
    changed = [axis for axis in src.mesh.axis_names if src[axis] != dst[axis]]
    if len(changed) != 1 or not isinstance(dst[changed[0]], Partial) or dst[changed[0]] == Partial("avg"):
        return None
    placement = src[changed[0]]
    if not isinstance(placement, Shard):
        return None
    named_sizes = {axis: named_size(src.mesh, axis) for axis in src.shard_order[placement.dim]}
    is_alone = all(size == 1 for axis, size in named_sizes.items() if axis != changed[0])
    return changed[0] if is_alone and plan.shape[placement.dim] % named_sizes[changed[0]] == 0 else None


@dataclass(frozen=True, slots=True)
class _Stage:
    """A part of a StackedPlan: adds the rank's own addends along some axes, then runs a plan on each addend left."""

    addends: Addends  # the stacked addends before the stage
    collapsed: tuple[str, ...]  # the axes along which the rank adds own addends before the plan
    prepared: PreparedPlan  # runs once for each addend that remains after `collapsed`


class StackedPlan:
    """A plan with the named mesh's sums, ready to run on this rank. Made by `prepare_exact`.

    Callers use a StackedPlan as a PreparedPlan, by `start` and `does_nothing`.

    A run goes through the `_stages`, which reduce the axes in the tree's order, innermost first. In a stage, a rank
    adds the addends of the rank's own coordinates, then a plan adds the ranks' sums. The plan runs once for each addend
    still stacked, on axes reduced later or staying Partial: more bytes move than by the ordinary plan. After the last
    stage, new Partial axes get addends without communication, as `_region_axis` says; with Partial("avg"), every
    addend is the value.
    """

    does_nothing = False  # callers always run a StackedPlan, also where the run returns the local tensor itself

    def __init__(self, plan: Plan, target: Layout, mesh: DeviceMesh) -> None:
        self._plan, self._target, self._mesh, self._rank = plan, target, mesh, this_rank()
        src, dst = plan.src, plan.dst
        self._new_partial = _new_partial_axes(plan)
        self._region = _region_axis(plan)
        staying = [axis for axis in partial_axes(dst) if axis not in self._new_partial]
        reduced = [axis for axis in tree_order(partial_axes(src)) if axis not in staying]
        self._op = next((p.op for p in src.placements if isinstance(p, Partial)), "sum")
        self._divisor = 1  # the named mesh's coordinates along the reduced axes, for Partial("avg")
        if self._op == "avg":  # divided once, at the end
            self._divisor = math.prod(named_size(src.mesh, axis) for axis in reduced)
            src, dst = (_with_sums(layout) for layout in (src, dst))
        replaced = {axis: src[axis] if axis == self._region else Replicate() for axis in self._new_partial}
        # The layout after the last stage, before `_make_partial`: no new Partial axis.
        self._reduced_target = dst.replace(**replaced) if replaced else dst
        self._stages = [*self._make_stages(src, reduced)]
        self._communicates = any(stage.prepared.communicates for stage in self._stages)

    def start(self, local: Tensor) -> Pending:
        """Starts the first collective on this rank's local tensor; `wait()` runs the rest. Called by `reshard`.

        Inside `replay_received` nothing is sent: the result is the tensor received in forward.
        """
        return run_or_replay(self._run, local) if self._communicates else Pending(self._run(local))

    def _run(self, local: Tensor) -> Running:
        """The stages as a generator of collectives. Called by `start`, unless `replay_received` gives the result."""
        op = "sum" if self._op == "avg" else self._op
        for stage in self._stages:
            addends = stage.addends
            if self._rank in self._plan.src.mesh:
                local = addends.collapse(local, stage.collapsed, op)
            left = addends.without(stage.collapsed) if self._rank in self._plan.src.mesh else NO_ADDENDS
            local = yield from _run_each(stage.prepared, local, left)
        if self._rank not in self._plan.dst.mesh:
            return local
        if self._divisor > 1:
            local = local / self._divisor
        return self._make_partial(local) if self._new_partial else self._in_order(local, self._stacked_at_end)

    def _make_stages(self, layout: Layout, reduced: Sequence[str]) -> list[_Stage]:
        """The stages from `layout`, the source, to `_reduced_target`: the target before axes are made Partial.

        reduced: the axes to reduce, in the tree's order. Also sets `_stacked_at_end`, the axes stacked after
        the last stage.
        """
        mesh, addends = layout.mesh, addends_of(layout)
        stages: list[_Stage] = []
        collapsed: list[str] = []
        spanning: list[str] = []
        for axis in reduced:
            if axis in addends.axes:
                if spanning:
                    early = self._reduction(layout, spanning)
                    stages.append(_Stage(addends, tuple(collapsed), prepare(early, self._mesh)))
                    layout, addends = early.dst, addends.without(collapsed)
                    collapsed, spanning = [], []
                collapsed.append(axis)
            if mesh.axis_size(axis) > 1:
                spanning.append(axis)
            else:
                layout = layout.replace(**{axis: Replicate()})
        final = self._plan_between(layout)
        if spanning and not _sums_in_tree_order(final):
            early = self._reduction(layout, spanning)
            stages.append(_Stage(addends, tuple(collapsed), prepare(early, self._mesh)))
            layout, addends, collapsed = early.dst, addends.without(collapsed), []
            final = self._plan_between(layout)
        stages.append(_Stage(addends, tuple(collapsed), prepare(final, self._mesh)))
        self._stacked_at_end = addends.without(collapsed).axes
        return stages

    def _plan_between(self, layout: Layout) -> Plan:
        """The ordinary plan from `layout` to `_reduced_target`."""
        shape, dtype = self._plan.shape, self._plan.dtype
        return make_plan(layout, self._reduced_target, shape, dtype, topology=self._plan.topology)

    def _reduction(self, layout: Layout, axes: Sequence[str]) -> Plan:
        """A plan of a single collective over `axes`: a reduce-scatter where the parts are even, else an all-reduce.

        After a reduce-scatter, axes sharded in the target have the target's shards; the remaining axes shard any dim,
        for a gather in a later stage. Reduce-scatter and gather together move as few bytes as the ordinary plan. If
        possible, the remaining axes avoid dims that the target shards over axes reduced later: otherwise the later
        stage needs an exchange instead of the gather.
        """
        shape, op = self._plan.shape, "sum" if self._op == "avg" else self._op
        step: ReduceScatter | AllReduce = AllReduce(tuple(axes) if len(axes) > 1 else axes[0], op)
        target = self._reduced_target if self._reduced_target.mesh == layout.mesh else None
        sharded = [axis for axis in axes if target is not None and isinstance(target[axis], Shard)]
        later = [] if target is None else [target[axis] for axis in partial_axes(layout) if axis not in axes]
        free_dims = sorted(range(len(shape)), key=lambda dim: Shard(dim) in later)
        after, dims = layout, []
        for axis in (ordered := [*sharded, *(axis for axis in axes if axis not in sharded)]):
            target_placement = target[axis] if target is not None else None
            size, local = layout.mesh.axis_size(axis), after.largest_local_shape(shape)
            candidates = [target_placement.dim] if isinstance(target_placement, Shard) else free_dims
            dim = next((dim for dim in candidates if shape[dim] % (after.parts(dim) * size) == 0 and local[dim]), None)
            if dim is None:
                break
            dims.append(dim)
            after = after.replace(**{axis: Shard(dim)})
        if len(dims) == len(axes):
            several = len(axes) > 1
            step = ReduceScatter(tuple(ordered) if several else ordered[0], tuple(dims) if several else dims[0], op)
        reduced = layout_after(step, layout)
        return Plan(layout, reduced, shape, self._plan.dtype, (step,), self._plan.topology)

    def _make_partial(self, local: Tensor) -> Tensor:
        """This rank's addends of a value made Partial over `_new_partial`, stacked.

        local: [*addends of axes still Partial, *shape]. Returns leading dims in the order of the target mesh's axes.
        """
        dst = self._plan.dst
        sizes = [fold_of(dst.mesh, axis) for axis in self._new_partial]
        stacked = tuple(axis for axis, size in zip(self._new_partial, sizes, strict=True) if size > 1)
        op, leading = self._op_of_new_partial(), [size for size in sizes if size > 1]
        coordinate = dst.mesh.coordinate(self._rank)
        assert coordinate is not None, "only ranks of the target mesh make addends"
        if op == "avg":
            result = local.expand(*leading, *local.shape).contiguous() if leading else local
        elif self._region is not None:
            result = self._shards_as_addends(local, self._region, coordinate[self._region], op)
        else:
            result = local.new_full((*leading, *local.shape), identity(op, local.dtype))
            if not any(coordinate[axis] for axis in self._new_partial):
                result[(0,) * len(leading)] = local
        return self._in_order(result, (*stacked, *self._stacked_at_end))

    def _op_of_new_partial(self) -> str:
        """The reduction of the axes made Partial: "sum", "avg", "min", ... A layout has a single reduction."""
        placement = self._plan.dst[self._new_partial[0]]
        assert isinstance(placement, Partial), "new Partial axes are Partial in the target"
        return placement.op

    def _shards_as_addends(self, local: Tensor, axis: str, index: int, op: str) -> Tensor:
        """This rank's addends along `_region_axis`: a named shard at the shard's position, and else `op`'s identity.

        local: [*addends of axes still Partial, *shape of the rank's shard]. index: of the rank along `axis`.
        Returns [fold, *addends of axes still Partial, *shape]; no leading dim for a fold of 1.
        """
        mesh, placement = self._plan.src.mesh, self._plan.src[axis]
        assert isinstance(placement, Shard), "the region's axis shards the source"
        fold, dim = fold_of(mesh, axis), placement.dim - len(self._plan.shape)
        shape, rows = [*local.shape], local.shape[dim] // fold
        shape[dim] *= mesh.axis_size(axis)
        result = local.new_full((fold, *shape), identity(op, local.dtype))
        for i in range(fold):
            result[i].narrow(dim, (index * fold + i) * rows, rows).copy_(local.narrow(dim, i * rows, rows))
        return result if fold > 1 else result[0]

    def _in_order(self, local: Tensor, stacked: tuple[str, ...]) -> Tensor:
        """`local` with its leading dims, of the axes `stacked`, in the order of the target mesh's axes."""
        ordered = [stacked.index(axis) for axis in self._target.mesh.axis_names if axis in stacked]
        if ordered == [*range(len(ordered))]:
            return local
        return local.permute(*ordered, *range(len(ordered), local.ndim)).contiguous()


def _with_sums(layout: Layout) -> Layout:
    """The layout with Partial("sum") in place of each Partial."""
    sums = {axis: Partial() for axis in partial_axes(layout)}
    return layout.replace(**sums) if sums else layout


def _run_each(prepared: PreparedPlan, local: Tensor, addends: Addends) -> Running:
    """Runs the plan on each stacked addend in turn, and stacks the results. local: [*addends.sizes, *shape]."""
    if not addends.axes or prepared.does_nothing:
        return (yield from prepared.run(local))
    results = []
    for addend in local.flatten(0, len(addends.axes) - 1):
        results.append((yield from prepared.run(addend)))
    return torch.stack(results).view(*addends.sizes, *results[0].shape)
