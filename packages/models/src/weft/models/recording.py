"""`record`: a training step of any model run on shapes, for what one rank of any mesh communicates in it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.mesh.process_mesh import as_mesh
from weft.reshard import GradientSync, distribute
from weft.reshard.running.gradients import BUCKET_BYTES
from weft.reshard.running.issued import Collective
from weft.reshard.running.recording import recording

from .communication import Communication, Phase
from .parallel import ParallelPlan, lay_out_batch, parallelize
from .parallel.parallelize import own_plan
from .parallel.styles import DATA_AXIS
from .train.step import find_gradients

Criterion = Callable[[Any, Tensor], Tensor]


def record(
    model: nn.Module,
    mesh: ProcessMesh | DeviceMesh,
    plan: ParallelPlan | None = None,
    *,
    batch: Sequence[int] | tuple[Tensor, Tensor],
    criterion: Criterion | None = None,
    rank: int = 0,
    inputs: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Communication:
    """What `rank` communicates in a training step of `model` on `mesh` under `plan`, without data or processes.

    A copy of the model is laid out by `parallelize` and run forward and backward on tensors without data, with the
    gradients' buckets; its collectives are recorded where they would start. So it holds for any module, plan and criterion
    that would run: what comes out is what the program itself asks for.
    model: not parallel yet, on any device; it is left as it is. plan: the model's own where None.
    batch: the global shape [B, T] of tokens and targets, int64, or the two tensors, of which shapes and dtypes are used; they
    are laid out by `lay_out_batch`, and others than [B, T] by rows over "dp".
    criterion: of the model's output and the targets, a scalar; the mean cross-entropy over all tokens where None.
    inputs: what else the model is called with, by name, as `dropout_key`. clip_norm: as of the step, which then asks for the norm.
    Cost: a step's host time on one rank. It does not grow with the ranks of the mesh. A rank outside communicates nothing.
    Communication: none, and no process group is needed or touched.
    Raises ValueError for a model that is parallel already, a rank below 0, a batch that is neither, and as `parallelize`; what the
    model raises where it reads values of its tensors.
    """
    mesh = as_mesh(mesh)
    if rank < 0:
        raise ValueError(f"rank is {rank}; give one of the ranks of {mesh}, from 0 on")
    tokens, targets = _shapes_alone(batch)
    compute = _mean_cross_entropy if criterion is None else criterion
    issued: dict[Phase, list[Collective]] = {}
    with recording(mesh, rank) as recorded, torch.device("meta"):
        plan = own_plan(model) if plan is None else plan
        parallel = parallelize(_without_data(model), mesh, plan)
        sync = GradientSync(parallel, bucket_bytes=bucket_bytes)
        laid, target, named = _laid_out(mesh, plan, tokens, targets)

        def ended(phase: Phase) -> None:
            issued[phase] = recorded.take_each()

        def loss() -> Tensor:
            return compute(parallel(laid, **named, **(inputs or {})), target)

        find_gradients(parallel, loss, sync, clip_norm=clip_norm, ended=ended)
        sync.close()
    return Communication.of(issued)


def _mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets, denominator=float(math.prod(targets.shape)))


def _laid_out(
    mesh: ProcessMesh, plan: ParallelPlan, tokens: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens and targets on the mesh, and what the model is given beside them: other than [B, T], rows over "dp" alone."""
    if tokens.ndim == 2 and tokens.shape == targets.shape:
        laid = lay_out_batch(mesh, plan, tokens, targets)
        assert laid.targets is not None, "they were given"
        return laid.tokens, laid.targets, {} if laid.positions is None else {"positions": laid.positions}
    if mesh.size == 1:
        return tokens, targets, {}
    rows = Layout(mesh, {DATA_AXIS: Shard(0)} if DATA_AXIS in mesh.axis_names else {})
    return distribute(tokens, rows), distribute(targets, rows), {}


def _shapes_alone(batch: Sequence[int] | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and targets, without data."""
    first, second = batch if len(batch) == 2 else (None, None)
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.to("meta"), second.to("meta")
    if not batch or not all(isinstance(size, int) and size > 0 for size in batch):
        raise ValueError(
            f"batch is {batch!r}; give the global shape of tokens and targets, as (8, 64), or the two tensors"
        )
    shape = tuple(int(size) for size in batch if not isinstance(size, Tensor))
    tokens, targets = (torch.empty(shape, dtype=torch.long, device="meta") for _ in range(2))
    return tokens, targets


def _without_data(model: nn.Module) -> nn.Module:
    """A copy whose tensors have no data: tied ones stay tied, and none is copied first."""
    without: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter {name} of {type(model).__name__} is a DTensor: the model is parallel already; record it before "
                f"parallelize, or a model of the same config built under torch.device('meta')"
            )
        without[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for module in model.modules():
        tensors = (
            *module.buffers(recurse=False),
            *(each for each in vars(module).values() if isinstance(each, Tensor)),
        )
        without |= {id(each): each.detach().to("meta") for each in tensors}
    return copy.deepcopy(model, without)
