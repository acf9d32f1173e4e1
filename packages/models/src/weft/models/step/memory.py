"""Predicts the bytes that a rank holds under a plan, without data or processes.

Parameters, gradients and optimizer state follow from layouts; activations from a step on shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from weft.mesh import Layout, ProcessMesh
from weft.mesh.extension import as_mesh
from weft.reshard.extension import contiguous_shard_slices, gathering_units

from ..parallel.experts.placement import expert_meshes
from ..parallel.parallelize import own_plan, pipeline_of
from ..parallel.parameter_layouts import parameter_layouts
from ..parallel.pipeline.cut import cut
from ..parallel.pipeline.run import stage_mesh_of
from ..parallel.plan import ParallelPlan, pipeline_plan
from ..parallel.resolve import module_plans_of, styles_of
from ..parallel.styles import PIPELINE_AXIS
from ..parallel.zero import check_zero, plan_of, shard_layouts
from .communication import Phase
from .criterion import Criterion
from .record import StepShape, on_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on a rank, as predicted by `predict_memory`."""

    parameters: int  # between steps
    gathered: int  # full copies of sharded parameters, beyond their shards, at most
    gradients: int  # between steps, when gradients accumulate over several backward passes
    states: int  # the optimizer's, between steps
    activations: int = 0  # tensors saved for backward, at most, over all microbatches in flight; 0 without a batch

    @property
    def nbytes(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.states + self.activations


def predict_memory(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    rank: int = 0,
    states: int | Mapping[str, int] = 2,
    batch: Sequence[int] | tuple[Tensor, Tensor] | None = None,
    criterion: Criterion | None = None,
    inputs: Mapping[str, Any] | None = None,
    microbatches: int = 1,
) -> Memory:
    """Predicts the bytes that `rank` holds of `model` laid out on `mesh` by `plan`, without data or processes.

    model: not parallel yet, on any device. plan: None for the model's own. With pipeline stages, the rank's stages
        count.
    states: tensors of optimizer state for each trained element: 2 for Adam, 1 for momentum. A mapping has the number
        for each parameter, by name.
    batch, criterion, inputs, microbatches: as for `record`. Given a batch, a step is run on shapes to find
        activations.
    gathered: up to zero=2, full copies of all sharded parameters. A shard that is a contiguous range of its full copy
        shares memory with the copy, so only the rest counts. With zero=3, nothing between calls; with stages, as with
        zero=2, until all microbatches are done.
    activations: what ops save on a CPU; attention saves inputs, output and a logsumexp a row.
    Messages between stages and gradient buckets are not counted. A rank outside a mesh with stages holds nothing.
    Communication: none. Raises ValueError as `parallelize`; with a batch also as `record`.
    """
    mesh = as_mesh(mesh)
    plan = own_plan(model) if plan is None else plan
    module_plans = module_plans_of(model, plan)
    for module_plan in module_plans:
        check_zero(mesh, module_plan.plan)
    cut_plan = pipeline_plan(plan) if PIPELINE_AXIS in mesh.axis_names else None
    own_names = {name for name, _ in model.named_parameters()}
    stage_mesh = mesh
    if cut_plan is not None:
        coordinate = mesh.coordinate(rank)
        if coordinate is None:
            return Memory(parameters=0, gathered=0, gradients=0, states=0)
        schedule = cut_plan.make_schedule(mesh.axis_size(PIPELINE_AXIS))
        stages = set(schedule.stages[coordinate[PIPELINE_AXIS]])
        own_names = {name for name, users in cut(model, cut_plan, schedule).parameters.items() if users & stages}
        stage_mesh = stage_mesh_of(mesh, coordinate[PIPELINE_AXIS])
    meshes = expert_meshes(stage_mesh, module_plans)
    layouts = parameter_layouts(model, stage_mesh, styles_of(model, module_plans), meshes)
    stored_layouts = shard_layouts(module_plans, layouts, model)
    counts = {"parameters": 0, "gathered": 0, "gradients": 0, "states": 0}
    for name, parameter in model.named_parameters():
        if name not in own_names:
            continue

        def local_bytes(layout: Layout, parameter: nn.Parameter = parameter) -> int:
            return math.prod(layout.local_shape(parameter.shape, rank)) * parameter.dtype.itemsize

        full_bytes, shard_bytes = local_bytes(layouts[name]), local_bytes(stored_layouts[name])
        zero = plan_of(module_plans, name).zero
        counts["parameters"] += shard_bytes
        if layouts[name] != stored_layouts[name] and (zero < 3 or cut_plan is not None):
            full_shape = tuple(parameter.shape)
            shares_memory = contiguous_shard_slices(stored_layouts[name], layouts[name], full_shape, rank) is not None
            counts["gathered"] += full_bytes - shard_bytes if shares_memory else full_bytes
        if parameter.requires_grad:
            counts["gradients"] += shard_bytes if zero > 1 else full_bytes
            counts["states"] += (states if isinstance(states, int) else states[name]) * shard_bytes
    if batch is None:
        return Memory(**counts)
    saved = _SavedBytes()
    shape = StepShape(batch=batch, criterion=criterion, rank=rank, inputs=inputs or {}, microbatches=microbatches)
    with on_shapes(model, mesh, plan, shape) as ready:
        assert ready is not None, "a rank outside the stages has returned above"
        pipeline = pipeline_of(ready.model)
        split = pipeline is not None and pipeline.schedule.splits_backward

        def after_phase(phase: Phase) -> None:
            if pipeline is not None:
                pipeline.finish_sends()
            saved.end_phase(phase == "forward" or split, ready.model)

        ready.run(lambda phase: None)  # not counted: allocates buffers kept from step to step
        with saved:
            ready.run(after_phase)
    return Memory(**counts, activations=saved.most)


class _SavedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new tensors kept alive for backward. most: the peak over a step."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Storages made since the last end of a microbatch's forward or backward: storage -> (weak reference, bytes).
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}  # storages saved for backward
        self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        input_storages = {each._cdata for each in _storages((args, kwargs))}
        for storage in _storages(output):
            if storage._cdata not in input_storages:
                self._new[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return output

    def end_phase(self, counts: bool, model: nn.Module) -> None:
        """Called when the forward or the backward of a microbatch is over.

        counts: whether storages made since the last call are saved for backward: after a forward, and after a
            backward that defers the weights' gradients.
        """
        if counts:
            self._held |= self._new
        self._new.clear()
        leaves = [
            *model.parameters(),
            *(full.leaf for unit in gathering_units(model) for full in unit.full_parameters().values()),
        ]
        gradients = {each._cdata for each in _storages([leaf.grad for leaf in leaves])}
        live = {key: each for key, each in self._held.items() if key not in gradients}
        self._held = {key: each for key, each in live.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))


def _storages(tree: Any) -> list[Any]:
    tensors = (each for each in tree_iter(tree) if isinstance(each, Tensor))
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]
