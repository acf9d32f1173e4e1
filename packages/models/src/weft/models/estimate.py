"""What a training step will communicate, told from the plan and the layouts before it runs."""

from __future__ import annotations

import math
from collections import Counter

from torch import nn
from weft.mesh import ProcessMesh
from weft.reshard.running.gradients import BUCKET_BYTES

from .layers import DotProductAttention
from .parallel.boundaries import column_siblings
from .parallel.context import has_context_axis
from .parallel.layouts import COPIES_AXIS, has_tensor_axis, parameter_layouts
from .parallel.plan import ParallelPlan
from .parallel.resolve import resolve
from .parallel.styles import TENSOR_AXIS, ColwiseParallel, RowwiseParallel, Style, VocabParallel

PHASES = ("forward", "backward", "gradients")
Collectives = dict[str, Counter[str]]


def collectives(model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan) -> Collectives:
    """Collectives of one step by phase and kind, on a model that is not yet parallel.

    forward: one reduction for each row- or vocab-parallel layer, one gather for each entrance under sequence
    parallelism, the loss's gathered statistics, and the loss summed over the data axes. backward: the duals. gradients:
    the buckets that backward has not sent on its way, and the gradient's norm.
    """
    counts: Collectives = {phase: Counter() for phase in PHASES}
    if mesh.size == 1:
        return counts
    styles = resolve(model, plan)
    if has_tensor_axis(mesh):
        entrances = len(column_siblings(styles))
        exits = sum(isinstance(style, RowwiseParallel | VocabParallel) for style in styles.values())
        reduction = "reduce-scatter" if plan.sequence else "all-reduce"
        counts["forward"][reduction] += exits
        counts["backward"][reduction] += entrances
        if plan.sequence:
            counts["forward"]["all-gather"] += entrances
            counts["backward"]["all-gather"] += exits
        counts["forward"]["all-gather"] += 1  # the logits where they are made whole, or the loss's statistics
    if plan.context is not None and has_context_axis(mesh):
        attentions = sum(isinstance(module, DotProductAttention) for module in model.modules())
        for phase, kind in (("forward", "all-gather"), ("backward", "reduce-scatter")):
            gathers = plan.context == "all_gather"
            counts[phase][kind if gathers else "all-to-all"] += attentions if gathers else 2 * attentions
    counts["forward"]["all-reduce"] += bool(_data_axes(mesh))
    early, late = _gradient_buckets(model, mesh, plan, styles)
    counts["backward"]["all-reduce"] += early
    counts["gradients"]["all-reduce"] = late + 1  # and the norm
    return counts


def _data_axes(mesh: ProcessMesh) -> list[str]:
    sizes = zip(mesh.axis_names, mesh.shape, strict=True)
    return [axis for axis, size in sizes if axis != TENSOR_AXIS and size > 1]


def _gradient_buckets(
    model: nn.Module, mesh: ProcessMesh, plan: ParallelPlan, styles: dict[str, Style]
) -> tuple[int, int]:
    """All-reduces of the gradients: those of full buckets, sent while backward runs, and those sent after it.

    Buckets are filled as backward makes the gradients: in the reverse of the model's order.
    """
    layouts = parameter_layouts(model, mesh, styles)
    filling: Counter[tuple[ProcessMesh, tuple[str, ...]]] = Counter()
    early = 0
    for name, parameter in reversed(list(model.named_parameters())):
        between = (
            plan.sequence
            and has_tensor_axis(mesh)
            and not isinstance(styles.get(name.rpartition(".")[0]), ColwiseParallel | RowwiseParallel | VocabParallel)
        )
        partial = [*_data_axes(mesh), *([TENSOR_AXIS] if between else [])]
        on = layouts[name].mesh
        axes = tuple(axis for axis in on.axis_names if axis in partial or axis == COPIES_AXIS)
        if axes:
            local = layouts[name].largest_local_shape(parameter.shape)
            filling[on, axes] += math.prod(local) * parameter.element_size()
            if filling[on, axes] >= BUCKET_BYTES:
                del filling[on, axes]
                early += 1
    return early, len(filling)
