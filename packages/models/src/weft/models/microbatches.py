"""`forward_backward`: a batch in parts through a model under any plan, and each part's weight in the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, derive_key
from weft.reshard import GradientSync, layout_of
from weft.reshard.running.dtensor import wrap

from .parallel.batch import OrderedPositions, in_order, lay_out_batch, order_of
from .parallel.parallelize import laid_out_by, pipeline_of
from .parallel.pipeline.run import Microbatch
from .parallel.styles import PIPELINE_AXIS
from .rope import mark_parts
from .train.step import find_gradients
from .weighing import Asked, weighing

_SYNC = "_gradient_sync"  # of a model that forward_backward was called with


def forward_backward(
    model: nn.Module,
    criterion: Callable[..., Tensor],
    tokens: Tensor,
    targets: Tensor,
    *,
    microbatches: int = 1,
    sync: GradientSync | None = None,
    **inputs: Any,
) -> Tensor:
    """Forward, backward and gradient sync under whatever plan the model has; the mean loss, a number on every rank.

    criterion: of the model's output and targets. The losses of microbatches add up to its loss of the whole batch.
        `weft.kernels.cross_entropy`, or that with options by functools.partial: a mean over the tokens whose target is not its
        ignore_index, by its weights where it has some. With reduction="sum", or a denominator, losses are added up as they are.
        One of your own with a parameter `denominator` gets what its sum is divided by: the number of tokens of the whole batch
        whose target is not its `ignore_index` (-100 without one), or the sum of its `weight` at their targets.
        Another one of your own is a sum, or a mean by one denominator that depends on targets alone. Which one is found out:
        where a batch is in microbatches or its tokens on several ranks, the criterion is also called on random numbers, three
        times as large as each microbatch, and the host waits for the device. On the mesh it is called with plain tensors, of the
        tokens of each rank, unless classes are sharded.
    tokens, targets: [B, T], plain: the whole batch, the same on every rank, in stages too; or DTensors of rows that each rank
        has, as `lay_out_batch` lays them out, of which each rank's rows are divided.
    microbatches: parts of the batch, one after another; 1 leaves it to the plan's pipeline. They divide the rows.
    sync: the model's GradientSync, where the program has one; else one is made, and kept with the model.
    inputs: what else the model is called with: tensors [B, T] are divided as the tokens are, and a `dropout_key` gives each
        microbatch a key of its own, so that masks do not depend on the mesh. The rest goes to all.
    Gradients add up to those that are there. Communication: that of the plan; the gradients' buckets once; activations and their
    gradients from stage to stage; the loss; for a criterion of your own without `denominator` the sum of a few numbers. Raises
    ValueError for microbatches that do not divide the rows, and for such a criterion that is no sum and no such mean.
    """
    pipeline = pipeline_of(model)
    count = pipeline.plan.microbatches if pipeline is not None and microbatches == 1 else microbatches
    parts = divide(model, tokens, targets, count, inputs)
    if sync is None:
        sync = vars(model).get(_SYNC)
        if sync is None:
            sync = GradientSync(model)
            object.__setattr__(model, _SYNC, sync)
    weighed = weighing(criterion, parts, targets, pipeline)
    loss = find_gradients(model, weighed, parts, sync).loss
    if isinstance(weighed, Asked):
        weighed.finish()
    return loss


def divide(
    model: nn.Module, tokens: Tensor, targets: Tensor, count: int, inputs: Mapping[str, Any]
) -> list[Microbatch]:
    """The microbatches of a batch, laid out as the model wants them. Raises ValueError where they do not divide its rows."""
    laid_out = laid_out_by(model)
    rows = tokens.to_local().shape[0] if isinstance(tokens, DTensor) else tokens.shape[0]
    if count < 1 or rows % count:
        whose = f" on a rank, of {tokens.shape[0]}" if isinstance(tokens, DTensor) else ""
        raise ValueError(
            f"{count} microbatches do not divide the batch of {rows} rows{whose}; numbers that do: "
            f"{', '.join(str(n) for n in range(1, rows + 1) if rows % n == 0)}"
        )
    parts = []
    for number in range(count):
        own = {name: _part(value, number, count, tokens.shape) for name, value in inputs.items()}
        if own.get("dropout_key") is not None:
            own["dropout_key"] = microbatch_key(own["dropout_key"], number, count)
        mine, target = (_part(each, number, count, tokens.shape) for each in (tokens, targets))
        if isinstance(mine, DTensor):
            own = {name: _on_stage(value, laid_out) for name, value in own.items()}
            mine, target = _on_stage(mine, laid_out), _on_stage(target, laid_out)
        elif laid_out is not None:
            mesh, plan = laid_out
            given = {name: own.pop(name, None) for name in ("positions", "documents")}
            batch = lay_out_batch(mesh, plan, mine, target, **given)
            mine, target = batch.tokens, batch.targets
            own |= {name: value for name in given if (value := getattr(batch, name)) is not None}
        parts.append(Microbatch(args=(mine,), kwargs=own, targets=target))
    join(parts)
    return parts


def join(parts: Sequence[Microbatch]) -> None:
    """Lets rotary angles that grow with the longest row of a batch be alike in all its microbatches."""
    given = [each.kwargs.get("positions") for each in parts]
    values = [each.values if isinstance(each, OrderedPositions) else each for each in given]
    positions = [each for each in values if isinstance(each, Tensor)]
    if len(parts) > 1 and len(positions) == len(parts):
        mark_parts(positions)


def microbatch_key(key: int | Tensor, number: int, count: int) -> int | Tensor:
    """The dropout key of one of `count` microbatches: of one alone, that of the step."""
    if count == 1:
        return key
    if isinstance(key, Tensor):  # as a number it may be above what an int64 holds
        whole = int(key.view(torch.int64)) % 2**64
        return torch.tensor(derive_key(whole, "microbatch", number), dtype=torch.uint64, device=key.device)
    return derive_key(key, "microbatch", number)


def _part(value: Any, number: int, count: int, shape: torch.Size) -> Any:
    """The rows of a microbatch, of what is as large as the tokens; of a DTensor those of each rank."""
    if isinstance(value, OrderedPositions):
        return replace(value, values=_part(value.values, number, count, shape))
    if count == 1 or not isinstance(value, Tensor) or value.shape[:1] != shape[:1] or value.ndim < 2:
        return value
    if not isinstance(value, DTensor):
        return value.chunk(count)[number]
    local = value.to_local()
    part = wrap(local.chunk(count)[number].contiguous(), layout_of(value), (shape[0] // count, *value.shape[1:]))
    return in_order(part, order_of(value))


def _on_stage(value: Any, laid_out: tuple[ProcessMesh, Any] | None) -> Any:
    """A DTensor that every stage has, as one of this rank's stage. Nothing moves."""
    if isinstance(value, OrderedPositions):
        return replace(value, values=_on_stage(value.values, laid_out))
    if not isinstance(value, DTensor) or laid_out is None or layout_of(value).mesh == laid_out[0]:
        return value
    layout, mesh = layout_of(value), laid_out[0]
    if PIPELINE_AXIS not in layout.mesh.axis_names:
        return value
    if mesh.size == 1:
        return value.to_local()
    placed = Layout(mesh, {axis: layout[axis] for axis in mesh.axis_names})
    return in_order(wrap(value.to_local(), placed, value.shape), order_of(value))
