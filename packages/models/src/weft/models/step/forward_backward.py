"""`forward_backward`: a training step's gradients under any plan, with the batch divided into microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Replicate, derive_key
from weft.mesh.extension import as_int
from weft.reshard import GradientSync, exact_sums, layout_of
from weft.reshard.extension import exact_axes, wrap

from ..exact import check_laid_out, refuse_compiled
from ..parallel.batch import OrderedPositions, check_batch_order, check_one_batch, in_order, lay_out_batch, order_of
from ..parallel.context import has_context_axis
from ..parallel.packed.exchange import RowOrders
from ..parallel.parallelize import exact_of_model, mesh_and_plan_of, pipeline_of
from ..parallel.pipeline.step import Microbatch
from ..parallel.recompute import is_compiled
from ..parallel.styles import PIPELINE_AXIS
from ..rope import link_positions_of_batch
from .criterion import weight_criterion
from .exact_refusals import exact_criterion
from .find_gradients import find_gradients
from .loss_parts import RouterLosses

_SYNC = "_gradient_sync"  # attribute of a model: the GradientSync made by forward_backward


def forward_backward(
    model: nn.Module,
    criterion: Callable[..., Any],
    tokens: Tensor,
    targets: Tensor,
    *,
    microbatches: int = 1,
    sync: GradientSync | None = None,
    **inputs: Any,
) -> Tensor:
    """Runs forward, backward and gradient sync under the model's plan; returns the batch's loss on every rank.

    Call it once a step, before `optimizer.step()`. Gradients are added to existing gradients.
    criterion: called with the model's output and the targets. The losses of all microbatches and ranks are weighted
        to add up to the criterion's loss of the whole batch. A `RouterLosses` around a criterion adds the losses of
        routers, and takes a model called with router=True. Three kinds of criteria are supported:
        - `weft.kernels.cross_entropy`, also with options by functools.partial: a mean over the tokens whose target is
          not ignore_index, weighted by `weight` if given. With reduction="sum" or a denominator, losses are added
          unweighted.
        - A function with a parameter `denominator`, by which it divides a sum. Weft passes the number of tokens in
          the whole batch whose target is not the function's `ignore_index` (default -100). If the function has a
          parameter `weight`, Weft passes the sum of the weights of these targets.
        - Any further function whose loss is a sum over tokens, or a mean with a denominator that depends only on the
          targets. With several microbatches, or tokens sharded over ranks, Weft must know whether the loss is a sum or
          a mean, and calls the function on random numbers to find out: three calls for each microbatch, of the
          microbatch's size; the host waits for the device. On a mesh, the function gets plain tensors with each rank's
          tokens, or DTensors if the logits are sharded over the vocabulary (`ParallelPlan.loss_parallel`).
    tokens, targets: [B, T], plain: the whole batch, the same on every rank, in every stage; or DTensors sharded by
        rows, as `lay_out_batch` makes them, whose local rows are divided into microbatches.
    microbatches: a divisor of the number of rows. With 1, a plan with a pipeline uses its own number.
    sync: the model's GradientSync, if the program made one; None: made once and kept with the model.
    inputs: further arguments of the model. Tensors [B, ...] of two dims or more are divided by rows. A `dropout_key`
        gives each microbatch its own key, independent of the mesh. Further values go to every microbatch.
    Communication: the plan's; each gradient bucket once; activations and their gradients between stages; the loss;
        for a criterion of the third kind the sum of a few numbers.
    Raises ValueError for microbatches that do not divide the rows, for a criterion of none of the three kinds, and
    under a plan with `exact` for a compiled model, and where torch computes a sum in the model or the criterion.
    """
    pipeline = pipeline_of(model)
    count = pipeline.plan.microbatches if pipeline is not None and microbatches == 1 else microbatches
    exact = exact_of_model(model)
    if exact is not None and is_compiled(model):
        refuse_compiled(exact)
    with exact_sums(exact):
        batch = divide_batch(model, tokens, targets, count, inputs)
    if sync is None:
        sync = _own_sync(model)
    weighted = weight_criterion(criterion, batch, targets)
    if exact is not None:
        weighted = exact_criterion(criterion, weighted, exact)
    result = find_gradients(model, weighted, batch, sync)
    if isinstance(criterion, RouterLosses) and criterion.report is not None and result.parts is not None:
        criterion.report(result.parts)
    return result.loss


def _own_sync(model: nn.Module) -> GradientSync:
    """The GradientSync kept with the model; made at the first step, and anew after parameters were replaced."""
    sync: GradientSync | None = vars(model).get(_SYNC)
    if sync is not None and not sync.has_parameters_of(model):
        sync.close()
        sync = None
    if sync is None:
        _check_parts(model)
        sync = GradientSync(model)
        object.__setattr__(model, _SYNC, sync)
    return sync


def _check_parts(model: nn.Module) -> None:
    """Raise ValueError for a plain model around a laid-out submodule, if a step would be wrong.

    A wrapper without trained parameters of its own, around a model which is not cut into stages, computes as that model
    does.
    """
    if mesh_and_plan_of(model) is not None:
        return
    for name, inner in model.named_modules():
        found = mesh_and_plan_of(inner)
        if found is None:
            continue
        plain = {n: each for n, each in model.named_parameters() if not isinstance(each, DTensor)}
        own = [n for n, each in plain.items() if each.requires_grad and not n.startswith(f"{name}.")]
        remedy = f"parallelize(model, mesh, ParallelPlan.merge({{{name!r}: {type(inner).__name__}'s plan}}))"
        if pipeline_of(inner) is not None:
            raise ValueError(
                f"{name!r} of this {type(model).__name__} is a {type(inner).__name__} cut into pipeline stages, which "
                f"cannot be called as a part of a model; call forward_backward with the {type(inner).__name__} itself, "
                f"or lay a new {type(model).__name__} out whole: {remedy}"
            )
        if own and found[0].size > 1:
            raise ValueError(
                f"{name!r} of this {type(model).__name__} is laid out on {found[0]}, and {own[0]} beside it is not: "
                f"gradients would be summed over the ranks for {name!r} alone; lay a new {type(model).__name__} out "
                f"whole: {remedy}"
            )


def divide_batch(
    model: nn.Module, tokens: Tensor, targets: Tensor, count: int, inputs: Mapping[str, Any]
) -> list[Microbatch]:
    """Divides a batch into `count` microbatches by rows, laid out on the model's mesh by its plan.

    Called by `forward_backward`; by `on_shapes`, for a step recorded on shapes; and by `Feed.whole_batch`, for the loss
    of step 1 in a single process, which `weft train` compares with the loss on the mesh.
    tokens, targets, inputs: as for `forward_backward`.
    Raises ValueError, on every rank, unless `count` divides the rows of each rank, for rows that differ between stages,
    for tokens sharded over "cp" without their order, for targets laid out in another order than the tokens. Inside
    `exact_sums` also the errors of `lay_out_batch`, and ValueError for DTensors in more than one microbatch.
    """
    mesh_and_plan = mesh_and_plan_of(model)
    count = as_int("microbatches", count)
    rows = tokens.shape[0]
    if isinstance(tokens, DTensor):
        of_ranks = _rows_of_ranks(layout_of(tokens), tuple(tokens.shape))
        rows = next((each for each in of_ranks if count > 0 and each % count), of_ranks[0])
    if count < 1 or rows % count:
        of_all = f" on a rank, of {tokens.shape[0]}" if isinstance(tokens, DTensor) else ""
        raise ValueError(
            f"{count} microbatches do not divide the batch of {rows} rows{of_all}; numbers that do: "
            f"{', '.join(str(n) for n in range(1, rows + 1) if rows % n == 0)}"
        )
    if mesh_and_plan is not None and has_context_axis(mesh_and_plan[0]):
        check_batch_order(tokens, inputs.get("positions"), mesh_and_plan[1])
    check_one_batch(order_of(tokens), order_of(targets), "targets")
    exact = exact_axes()
    if exact is not None and isinstance(tokens, DTensor):
        check_laid_out(exact, tokens.shape[0], tokens.shape[1], count)
    microbatches = []
    for number in range(count):
        kwargs = {name: _rows_of_microbatch(value, number, count, tokens.shape) for name, value in inputs.items()}
        if kwargs.get("dropout_key") is not None:
            kwargs["dropout_key"] = microbatch_key(kwargs["dropout_key"], number, count)
        own_tokens, own_targets = (_rows_of_microbatch(each, number, count, tokens.shape) for each in (tokens, targets))
        if isinstance(own_tokens, DTensor):
            kwargs = {name: _to_stage_mesh(value, mesh_and_plan) for name, value in kwargs.items()}
            own_tokens, own_targets = (
                _to_stage_mesh(own_tokens, mesh_and_plan),
                _to_stage_mesh(own_targets, mesh_and_plan),
            )
        elif mesh_and_plan is not None:
            mesh, plan = mesh_and_plan
            extras = {name: kwargs.pop(name, None) for name in ("positions", "documents")}
            # targets as an input of the model: their losses are then its output
            batch = lay_out_batch(*(mesh, plan, own_tokens, own_targets), numbers=kwargs.pop("targets", None), **extras)
            own_tokens, own_targets = batch.tokens, batch.targets
            kwargs |= {} if batch.numbers is None else {"targets": batch.numbers}
            kwargs |= {name: value for name in extras if (value := getattr(batch, name)) is not None}
        microbatches.append(Microbatch(args=(own_tokens,), kwargs=kwargs, targets=own_targets))
    link_positions(microbatches)
    return microbatches


def link_positions(microbatches: Sequence[Microbatch]) -> None:
    """Attaches the positions of the whole batch to the positions of each microbatch, in place.

    Called by `divide_batch` and `Feed.training`. Dynamic rope scaling reads the positions of the whole batch, because
    the angles depend on the batch's longest row.
    """
    arguments = [each.kwargs.get("positions") for each in microbatches]
    values = [each.values if isinstance(each, OrderedPositions) else each for each in arguments]
    positions = [each for each in values if isinstance(each, Tensor)]
    if len(microbatches) > 1 and len(positions) == len(microbatches):
        link_positions_of_batch(positions)


def microbatch_key(key: int | Tensor, number: int, count: int) -> int | Tensor:
    """The dropout key of microbatch `number` of `count`, from the step's `key`. With a `count` of 1: `key` unchanged.

    key: an int, or a uint64 scalar; the result is of the same type.
    Called by `divide_batch`, and for `weft train` by `Outline.dropout_key`.
    """
    if count == 1:
        return key
    if isinstance(key, Tensor):  # uint64; values above the range of int64 are possible
        number_of_key = int(key.view(torch.int64)) % 2**64
        return torch.tensor(derive_key(number_of_key, "microbatch", number), dtype=torch.uint64, device=key.device)
    return derive_key(key, "microbatch", number)


@lru_cache(maxsize=64)
def _rows_of_ranks(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The numbers of rows that ranks have, each once: the same on every rank.

    Raises ValueError for rows that differ between the stages of a pipeline.
    """
    if PIPELINE_AXIS in layout.mesh.axis_names and layout[PIPELINE_AXIS] != Replicate():
        raise ValueError(
            f"the tokens are ({layout}): all stages of a pipeline read the same rows; replicate the batch over "
            f"{PIPELINE_AXIS!r}, as lay_out_batch does"
        )
    return tuple(dict.fromkeys(layout.local_shape(shape, rank)[0] for rank in layout.mesh))


def _rows_of_microbatch(value: Any, number: int, count: int, shape: torch.Size) -> Any:
    """The rows of microbatch `number`, if `value` is a tensor with the rows of the tokens; else `value`.

    A DTensor's local rows are divided on each rank. shape: of the tokens.
    """
    if isinstance(value, OrderedPositions):
        values, order = _rows_of_microbatch(value.values, number, count, shape), _rows_of(value.order, number, count)
        return replace(value, values=values, order=order)
    if count == 1 or not isinstance(value, Tensor) or value.shape[:1] != shape[:1] or value.ndim < 2:
        return value
    if not isinstance(value, DTensor):
        return value.chunk(count)[number]
    local = value.to_local()
    rows = wrap(local.chunk(count)[number].contiguous(), layout_of(value), (shape[0] // count, *value.shape[1:]))
    return in_order(rows, _rows_of(order_of(value), number, count))


def _rows_of(order: Any, number: int, count: int) -> Any:
    """The tokens' order in memory (`order_of`) for the rows of microbatch `number`, from the order of all rows."""
    if not isinstance(order, RowOrders):
        return order
    rows = len(order.orders) // count
    return order.rows(number * rows, (number + 1) * rows)


def _to_stage_mesh(value: Any, mesh_and_plan: tuple[ProcessMesh, Any] | None) -> Any:
    """A DTensor on the mesh of all stages as a DTensor on this rank's stage; all else unchanged. Moves no data."""
    if isinstance(value, OrderedPositions):
        return replace(value, values=_to_stage_mesh(value.values, mesh_and_plan))
    if not isinstance(value, DTensor) or mesh_and_plan is None or layout_of(value).mesh == mesh_and_plan[0]:
        return value
    layout, mesh = layout_of(value), mesh_and_plan[0]
    if PIPELINE_AXIS not in layout.mesh.axis_names:
        return value
    if mesh.size == 1 and exact_axes() is None:
        return value.to_local()
    stage_layout = Layout(mesh, {axis: layout[axis] for axis in mesh.axis_names})
    return in_order(wrap(value.to_local(), stage_layout, value.shape), order_of(value))
