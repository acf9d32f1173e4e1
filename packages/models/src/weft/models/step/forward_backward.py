"""`forward_backward`: a training step's gradients under any plan, with the batch divided into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, derive_key
from weft.reshard import GradientSync, layout_of
from weft.reshard.extension import wrap

from ..parallel.batch import OrderedPositions, in_order, lay_out_batch, order_of
from ..parallel.packed.rows import RowOrders
from ..parallel.parallelize import laid_out_by, pipeline_of
from ..parallel.pipeline.run import Microbatch
from ..parallel.recompute import is_compiled
from ..parallel.styles import PIPELINE_AXIS
from ..rope import mark_parts
from .criterion import ProbedCriterion, weight_criterion
from .find_gradients import find_gradients

_SYNC = "_gradient_sync"  # attribute of a model: the GradientSync made by forward_backward


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
    """Runs forward, backward and gradient sync under the model's plan; returns the mean loss on every rank.

    Gradients are added to existing gradients.
    criterion: called with the model's output and the targets. The losses of all microbatches and ranks are weighted
        to add up to the criterion's loss of the whole batch. Three kinds of criteria are supported:
        - `weft.kernels.cross_entropy`, also with options by functools.partial: a mean over the tokens whose target is
          not ignore_index, weighted by `weight` if given. With reduction="sum" or a denominator, losses are added
          unweighted.
        - A function with a parameter `denominator`, by which it divides a sum. Weft passes the number of tokens in
          the whole batch whose target is not the function's `ignore_index` (default -100), or the sum of its `weight`
          at these targets.
        - Any other function, if its loss is a sum over tokens, or a mean with a denominator depending only on
          targets. Weft finds out which by calls on random numbers: for each microbatch, three calls of the
          microbatch's size, and the host waits for the device. This happens only with several microbatches, or with
          tokens sharded over ranks. On a mesh, the function gets plain tensors with each rank's tokens, unless
          classes are sharded.
    tokens, targets: [B, T], plain: the whole batch, the same on every rank, in every stage; or DTensors sharded by
        rows, as `lay_out_batch` makes them, whose local rows are divided into microbatches.
    microbatches: a divisor of the number of rows. 1 leaves the number to the plan's pipeline.
    sync: the model's GradientSync, if the program made one; None: made once and kept with the model.
    inputs: further arguments of the model. Tensors [B, T] are divided like the tokens. A `dropout_key` gives each
        microbatch a key of its own, so masks do not depend on the mesh. Further values go to every microbatch.
    Communication: the plan's; each gradient bucket once; activations and their gradients between stages; the loss;
        for a criterion of the third kind the sum of a few numbers.
    Raises ValueError for microbatches that do not divide the rows, and for a criterion of none of the three kinds.
    """
    pipeline = pipeline_of(model)
    count = pipeline.plan.microbatches if pipeline is not None and microbatches == 1 else microbatches
    parts = divide(model, tokens, targets, count, inputs)
    if sync is None:
        sync = vars(model).get(_SYNC)
        if sync is None:
            sync = GradientSync(model)
            object.__setattr__(model, _SYNC, sync)
    weighted = weight_criterion(criterion, parts, targets, pipeline)
    loss = find_gradients(model, weighted, parts, sync).loss
    if isinstance(weighted, ProbedCriterion):
        weighted.finish()
    return loss


def divide(
    model: nn.Module, tokens: Tensor, targets: Tensor, count: int, inputs: Mapping[str, Any]
) -> list[Microbatch]:
    """Divides a batch into microbatches, laid out for the model. Raises ValueError unless `count` divides the rows."""
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
        kwargs = {name: _part(value, number, count, tokens.shape) for name, value in inputs.items()}
        if kwargs.get("dropout_key") is not None:
            kwargs["dropout_key"] = microbatch_key(kwargs["dropout_key"], number, count)
        part_tokens, target = (_part(each, number, count, tokens.shape) for each in (tokens, targets))
        if isinstance(part_tokens, DTensor):
            kwargs = {name: _on_stage(value, laid_out) for name, value in kwargs.items()}
            part_tokens, target = _on_stage(part_tokens, laid_out), _on_stage(target, laid_out)
        elif laid_out is not None:
            mesh, plan = laid_out
            extras = {name: kwargs.pop(name, None) for name in ("positions", "documents")}
            batch = lay_out_batch(mesh, plan, part_tokens, target, compiled=is_compiled(model), **extras)
            part_tokens, target = batch.tokens, batch.targets
            kwargs |= {name: value for name in extras if (value := getattr(batch, name)) is not None}
        parts.append(Microbatch(args=(part_tokens,), kwargs=kwargs, targets=target))
    join(parts)
    return parts


def join(parts: Sequence[Microbatch]) -> None:
    """Links the positions of all microbatches: dynamic rope scaling then uses the longest row of the whole batch."""
    arguments = [each.kwargs.get("positions") for each in parts]
    values = [each.values if isinstance(each, OrderedPositions) else each for each in arguments]
    positions = [each for each in values if isinstance(each, Tensor)]
    if len(parts) > 1 and len(positions) == len(parts):
        mark_parts(positions)


def microbatch_key(key: int | Tensor, number: int, count: int) -> int | Tensor:
    """The dropout key of microbatch `number`. A batch of one microbatch keeps the step's key."""
    if count == 1:
        return key
    if isinstance(key, Tensor):  # uint64; values above the range of int64 are possible
        whole = int(key.view(torch.int64)) % 2**64
        return torch.tensor(derive_key(whole, "microbatch", number), dtype=torch.uint64, device=key.device)
    return derive_key(key, "microbatch", number)


def _part(value: Any, number: int, count: int, shape: torch.Size) -> Any:
    """The rows of microbatch `number` of a tensor as large as the tokens; of a DTensor, of each rank's local rows."""
    if isinstance(value, OrderedPositions):
        return replace(
            value, values=_part(value.values, number, count, shape), order=_rows_of(value.order, number, count)
        )
    if count == 1 or not isinstance(value, Tensor) or value.shape[:1] != shape[:1] or value.ndim < 2:
        return value
    if not isinstance(value, DTensor):
        return value.chunk(count)[number]
    local = value.to_local()
    part = wrap(local.chunk(count)[number].contiguous(), layout_of(value), (shape[0] // count, *value.shape[1:]))
    return in_order(part, _rows_of(order_of(value), number, count))


def _rows_of(order: Any, number: int, count: int) -> Any:
    """The order of the rows of microbatch `number`."""
    if not isinstance(order, RowOrders):
        return order
    rows = len(order.orders) // count
    return order.rows(number * rows, (number + 1) * rows)


def _on_stage(value: Any, laid_out: tuple[ProcessMesh, Any] | None) -> Any:
    """Converts a DTensor on the mesh of all stages to one on this rank's stage. No data moves."""
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
