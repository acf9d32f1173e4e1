"""Bytes that a rank holds under a plan, without data or processes: of parameters, gradients and optimizer state from layouts, of
activations from a step on shapes.
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
from weft.mesh.process_mesh import as_mesh
from weft.reshard.running.units import units_of
from weft.reshard.running.wholes import stretch_in

from .communication import Phase
from .parallel.layouts import parameter_layouts
from .parallel.parallelize import own_plan, pipeline_of
from .parallel.pipeline.cut import cut
from .parallel.pipeline.run import stage_mesh_of
from .parallel.plan import ParallelPlan, pipeline_plan
from .parallel.resolve import parts_of, styles_of
from .parallel.styles import PIPELINE_AXIS
from .parallel.zero import check_zero, plan_of, shard_layouts
from .recording import Criterion, on_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on a rank. parameters, gradients, states: between steps; gathered: of whole parameters above their shards, at most.

    gradients: as they add up over several passes before a step.
    activations: what is kept for backward at the most, of all microbatches that are under way; 0 where no batch was given.
    """

    parameters: int
    gathered: int
    gradients: int
    states: int
    activations: int = 0

    @property
    def nbytes(self) -> int:
        return self.parameters + self.gathered + self.gradients + self.states + self.activations


def predict_memory(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    rank: int = 0,
    states: int = 2,
    batch: Sequence[int] | tuple[Tensor, Tensor] | None = None,
    criterion: Criterion | None = None,
    inputs: Mapping[str, Any] | None = None,
    microbatches: int = 1,
) -> Memory:
    """What `rank` holds of `model` laid out on `mesh` by `plan`, without data or processes.

    model: not parallel yet, on any device. plan: the model's own where None. With stages, it is those of the rank.
    states: tensors that the optimizer keeps for an element that it changes: 2 of Adam, 1 of momentum.
    batch, criterion, inputs, microbatches: as of `record`; with a batch a step is run on shapes, for its activations.
    What is gathered is, up to zero=2, all that lies on shards: where a shard is a stretch of its whole's memory, what the others
    have of it. With zero=3 it is nothing between calls; with stages it is as much until all microbatches are back.
    Activations are what ops keep as they do on a CPU: attention its inputs, its output and a logsumexp a row. What is on its way is
    not counted: to another stage, or in buckets of gradients. A rank outside of a mesh with stages holds nothing.
    Communication: none. Raises ValueError as `parallelize`, and with a batch as `record`.
    """
    mesh = as_mesh(mesh)
    plan = own_plan(model) if plan is None else plan
    parts = parts_of(model, plan)
    for part in parts:
        check_zero(mesh, part.plan)
    cutting = pipeline_plan(plan) if PIPELINE_AXIS in mesh.axis_names else None
    own = {name for name, _ in model.named_parameters()}
    on = mesh
    if cutting is not None:
        at = mesh.coordinate(rank)
        if at is None:
            return Memory(parameters=0, gathered=0, gradients=0, states=0)
        schedule = cutting.make_schedule(mesh.axis_size(PIPELINE_AXIS))
        stages = set(schedule.stages[at[PIPELINE_AXIS]])
        own = {name for name, users in cut(model, cutting, schedule).parameters.items() if users & stages}
        on = stage_mesh_of(mesh, at[PIPELINE_AXIS])
    layouts = parameter_layouts(model, on, styles_of(model, parts))
    at_rest = shard_layouts(parts, layouts, model)
    counts = {"parameters": 0, "gathered": 0, "gradients": 0, "states": 0}
    for name, parameter in model.named_parameters():
        if name not in own:
            continue

        def held(layout: Layout, parameter: nn.Parameter = parameter) -> int:
            return math.prod(layout.local_shape(parameter.shape, rank)) * parameter.dtype.itemsize

        whole, shard, zero = held(layouts[name]), held(at_rest[name]), plan_of(parts, name).zero
        counts["parameters"] += shard
        if layouts[name] != at_rest[name] and (zero < 3 or cutting is not None):
            within = stretch_in(at_rest[name], layouts[name], tuple(parameter.shape), rank) is not None
            counts["gathered"] += whole - shard if within else whole
        if parameter.requires_grad:
            counts["gradients"] += shard if zero > 1 else whole
            counts["states"] += states * shard
    if batch is None:
        return Memory(**counts)
    kept = _Kept()
    with on_shapes(
        model, mesh, plan, batch=batch, criterion=criterion, rank=rank, inputs=inputs, microbatches=microbatches
    ) as ready:
        assert ready is not None, "a rank outside of the stages has left"
        pipeline = pipeline_of(ready.model)
        split = pipeline is not None and pipeline.schedule.splits_backward

        def ended(phase: Phase) -> None:
            if pipeline is not None:
                pipeline.finish_sends()
            kept.ended(phase == "forward" or split, ready.model)

        ready.run(lambda phase: None)  # what stays from step to step is made
        with kept:
            ready.run(ended)
    return Memory(**counts, activations=kept.most)


class _Kept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what ops make and is kept for backward. most: of all microbatches, at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}  # since a microbatch's forward or backward was over last
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each._cdata for each in _storages((args, kwargs))}
        for storage in _storages(made):
            if storage._cdata not in given:
                self._new[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        return made

    def ended(self, counts: bool, model: nn.Module) -> None:
        """The forward or the backward of a microbatch is over.

        counts: whether what it made is kept for backward, as after a forward, or where gradients of weights wait for their turn.
        """
        if counts:
            self._held |= self._new
        self._new.clear()
        leaves = [*model.parameters(), *(whole.leaf for unit in units_of(model) for whole in unit.wholes().values())]
        gradients = {each._cdata for each in _storages([leaf.grad for leaf in leaves])}
        kept = {key: each for key, each in self._held.items() if key not in gradients}
        self._held = {key: each for key, each in kept.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))


def _storages(tree: Any) -> list[Any]:
    tensors = (each for each in tree_iter(tree) if isinstance(each, Tensor))
    return [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]
