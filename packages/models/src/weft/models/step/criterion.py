"""Weights a criterion: the losses of microbatches and ranks then add up to the loss of the whole batch.

`weight_criterion` passes the whole batch's denominator to a criterion with a parameter `denominator`. `ProbedCriterion`
weights any other criterion. Each microbatch, and each rank's tokens, get a weight in the whole batch's mean.
`_find_shares` finds these weights by probing the criterion: calls on random numbers. The loss is assumed to be N / D,
where N and D are sums over tokens, and D depends only on targets. The probe appends a row R of tokens to the rows M of
a microbatch, and scales R's output; N(R) grows by some x. The loss of R alone grows by x / D(R), and the loss of M and
R together by x / (D(M) + D(R)). The ratio of both growths gives D(M) / D(R).
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.extension import has_data, weigh_targets
from weft.mesh import Layout, Partial, Shard
from weft.reshard import layout_of, reshard, to_global
from weft.reshard.extension import exact_axes, local_of, wrap

from ..losses import IGNORE_INDEX
from ..parallel.pipeline.step import Microbatch
from .loss_parts import RouterLosses

SCALE = 10.0  # of the added row's output: raises its cross-entropy by some tens, far above a mean's rounding error
CLASSES = 4  # how many classes, from 0, are tried for the added row; the criterion must not ignore all of them
ALLOWED = 2e-5  # relative rounding error of a mean in float32

Criterion = Callable[..., Any]  # (output, targets) -> a scalar, or a `LossWithParts`

_signatures: weakref.WeakKeyDictionary[FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def weight_criterion(criterion: Criterion, microbatches: Sequence[Microbatch], targets: Tensor) -> Criterion:
    """The criterion for a step's microbatches: the losses of microbatches and ranks add up to the whole batch's loss.

    Called once a step, before forward, by `forward_backward` and `on_shapes`. Not by `Trainer`, which knows the number
    of tokens, and takes `Outline.token_criterion`.
    targets: of the whole batch. The result is called with the output and the targets of each microbatch.
    - The criterion in a `RouterLosses` is weighted, and the routers' terms count 1 / microbatches.
    - A criterion without a parameter `denominator` becomes a `ProbedCriterion`, unless the criterion gets the whole
      batch at once: one microbatch whose targets are not sharded.
    - A criterion with an unset `denominator` and a reduction other than "sum" is passed the number of tokens (or the
      sum of the tokens' weights) in the whole batch. The tokens are counted before the step: inside the criterion, all
      ranks would wait for each other between forward and backward. With a single microbatch a criterion whose
      `denominator` has the default None counts by itself. Exception: `targets` is plain, the microbatch's targets are
      a DTensor, and no `weight` is given: each rank has all targets, and counts here without communication.
    - Any further criterion is returned unchanged.
    Communication: for sharded targets in several microbatches, the sum of a number or two.
    """
    if isinstance(criterion, RouterLosses):
        weighted = weight_criterion(criterion.criterion, microbatches, targets)
        return replace(criterion, criterion=weighted, microbatches=len(microbatches))
    parameters = _parameters(criterion)
    options = {name: each.default for name, each in parameters.items()} | getattr(criterion, "keywords", {})
    if "denominator" not in parameters:
        is_whole = len(microbatches) == 1 and not _axes_sharding_tensor(microbatches[0].targets)
        return criterion if is_whole else ProbedCriterion(criterion, [each.targets for each in microbatches])
    if options.get("reduction") == "sum" or options["denominator"] not in (None, inspect.Parameter.empty):
        return criterion
    weight = options.get("weight")
    has_all_targets = isinstance(microbatches[0].targets, DTensor) and not isinstance(targets, DTensor)
    counts_itself = options["denominator"] is None  # False for a parameter without a default
    if counts_itself and len(microbatches) == 1 and (weight is not None or not has_all_targets):
        return criterion
    index = options.get("ignore_index", IGNORE_INDEX)
    if not isinstance(weight, Tensor):
        total = _sum_of_weights(targets, index, None)
        return lambda output, target: criterion(output, target, denominator=total)
    total = _sum_of_weights(targets, index, weight)
    if not options.get("z_loss"):
        return lambda output, target: criterion(output, target, denominator=total)
    # The z-loss has no class weights: its denominator is the number of tokens. For the cross-entropy to use the same
    # denominator, the class weights are multiplied by tokens / total.
    tokens = _sum_of_weights(targets, index, None)
    scaled = _scaled_weight(weight, tokens / total)
    return lambda output, target: criterion(output, target, weight=scaled, denominator=tokens)


def _parameters(criterion: Criterion) -> Mapping[str, inspect.Parameter]:
    """The criterion's signature, cached for functions: reading a signature takes longer than counting the tokens."""
    if not isinstance(criterion, FunctionType):
        return inspect.signature(criterion).parameters
    if criterion not in _signatures:
        _signatures[criterion] = inspect.signature(criterion).parameters
    return _signatures[criterion]


def _sum_of_weights(targets: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """The number of tokens not ignored, or the sum of their classes' weights: a plain scalar."""
    class_weights = to_global(weight) if isinstance(weight, DTensor) else weight
    dtype = torch.float32 if weight is None else torch.float64
    return _sum_over_sharding_ranks(
        weigh_targets(class_weights, local_of(targets).flatten(), ignored, dtype).sum(), targets
    )


def _scaled_weight(weight: Tensor, factor: Tensor) -> Tensor:
    """Class weights times a factor, in float64."""
    if isinstance(weight, DTensor):
        return wrap(weight.to_local().double() * factor, layout_of(weight), weight.shape)
    return weight.double() * factor


class ProbedCriterion:
    """A criterion without a parameter `denominator`. Each loss is multiplied by the microbatch's weight in `Shares`.

    Made by `weight_criterion` for a step, and called by `find_gradients` after each microbatch's forward. The first
    call finds the shares of all microbatches, by `_find_shares`.
    If tokens are sharded, the criterion gets this rank's tokens as plain tensors. If classes are sharded too, the
    criterion gets the DTensors. Where torch then returns a plain mean of the ranks' losses, the classes are gathered,
    and the criterion is called again with this rank's tokens as plain tensors.
    targets: of each microbatch, in order. A call finds the microbatch's number by the identity of the targets.
    Raises ValueError at a call where the shares have a `reason`; with a single microbatch only where the loss is an
    average of the ranks' losses.
    """

    def __init__(self, criterion: Criterion, targets: Sequence[Tensor]) -> None:
        self._criterion: Callable[..., Tensor] = criterion
        self._targets = targets
        self._shares: Shares | None = None  # of all microbatches; None before the first call

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        if self._shares is None:
            self._shares = _find_shares(self._criterion, output, self._targets)
        shares, number = self._shares, next(i for i, each in enumerate(self._targets) if each is target)
        if shares.reason is not None:
            loss = self._criterion(output, target) if len(self._targets) == 1 else None
            if loss is not None and not _is_averaged(loss):
                return loss
            raise self._refusal(shares.reason)
        if not isinstance(output, DTensor) or not isinstance(target, DTensor) or not _axes_sharding_tensor(target):
            return self._weighted_loss(output, target, shares.whole[number])
        if layout_of(output) != layout_of(target):  # classes are sharded
            loss = self._weighted_loss(output, target, shares.whole[number])
            if not _is_averaged(loss):
                return loss
            output = reshard(output, placements=layout_of(target))
        return partial_loss(self._weighted_loss(output.to_local(), local_of(target), shares.own[number]), target)

    def _weighted_loss(self, output: Any, target: Tensor, share: float) -> Tensor:
        """The criterion's loss times `share`.

        Where the share is 0, every target is ignored, and the loss may be NaN. The result is then 0 times the loss with
        all targets set to `Shares.label`: backward runs on every rank.
        """
        if share:
            return self._criterion(output, target) * share
        assert self._shares is not None, "shares were found before"
        label = torch.full_like(local_of(target), self._shares.label)
        label_target = wrap(label, layout_of(target), target.shape) if isinstance(target, DTensor) else label
        zero_loss = self._criterion(output, label_target)
        return zero_loss * 0 if isinstance(zero_loss, DTensor) else zero_loss.nan_to_num(0, 0, 0) * 0

    def _refusal(self, reason: str) -> ValueError:
        name = getattr(self._criterion, "__name__", type(self._criterion).__name__)
        return ValueError(
            f"the criterion {name} cannot be weighed over {len(self._targets)} microbatches and the ranks' tokens: "
            f"{reason}. Let it return a sum divided by a parameter `denominator`, which is given the number of tokens "
            f"of the whole batch whose target is not {IGNORE_INDEX}; or take weft.kernels.cross_entropy with its "
            f"options; or one microbatch"
        )


def partial_loss(addend: Tensor, target: Tensor) -> Tensor:
    """A loss computed from this rank's tokens, as an addend of the batch's loss.

    Called by `ProbedCriterion`, and by the criteria of preferences. Differentiable.
    addend: a plain scalar. target: any tensor laid out as the tokens or rows which the loss was computed from. For a
    plain target, `addend` is returned; for a DTensor, a scalar DTensor, Partial over the axes that shard the tokens.
    Raises ValueError inside `exact_sums` for a DTensor: each coordinate of the named mesh would have to give an addend.
    """
    if not isinstance(target, DTensor):
        return addend
    if exact_axes() is not None:
        raise ValueError(
            "this criterion computes one loss from all tokens of a rank, which the plan's exact does not allow; take "
            "weft.kernels.cross_entropy, or leave out exact"
        )
    added: Tensor = _PartialLoss.apply(addend, layout_of(target))  # type: ignore[no-untyped-call]
    return added


def _is_averaged(loss: Tensor) -> bool:
    """Whether torch averaged the ranks' losses, regardless of the number of tokens on each rank."""
    return isinstance(loss, DTensor) and any(each == Partial("avg") for each in layout_of(loss).placements)


class _PartialLoss(torch.autograd.Function):
    """Wraps a rank's addend of a loss as a DTensor, Partial over the axes sharding the tokens. For `partial_loss`."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, tokens: Layout) -> DTensor:
        return wrap(addend.detach(), Layout(tokens.mesh, dict.fromkeys(sharding_axes(tokens), Partial())), ())

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return grad.to_local(), None


@dataclass(frozen=True, slots=True)
class Shares:
    """The factors by which losses of microbatches add up to the whole batch's loss; all 1 for a sum over tokens.

    Made by `_find_shares`, kept by `ProbedCriterion` for a step.
    """

    own: Sequence[float]  # by microbatch: the factor of a loss computed from this rank's tokens
    whole: Sequence[float]  # by microbatch: the factor of a loss computed from all ranks' tokens
    label: int = 0  # a class not ignored by the criterion: replaces targets where all targets are ignored
    reason: str | None = None  # why the criterion cannot be weighted; else None


def _find_shares(criterion: Criterion, output: Any, targets: Sequence[Tensor]) -> Shares:
    """The `Shares` of the microbatches, found by probing the criterion as the top of this file explains.

    output: the model's output for the first microbatch; only shape and dtype are used.
    targets: of each microbatch, plain or DTensors.
    The criterion is called with plain tensors of random numbers: for each microbatch three times in full size, and a
    few times with a single row; twice as often where tokens of a row are on several ranks.
    Communication: for sharded targets, the sum of a few numbers. The host waits for the device.
    """
    first = targets[0]
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[:1] != first.shape[:1]:
        return Shares((), (), reason="the model's output is not one tensor with a row for each row of targets")
    class_dim = next((i for i, (a, b) in enumerate(zip(output.shape, first.shape, strict=False)) if a != b), first.ndim)
    dims = {0, *_sharded_dims(first)} if isinstance(first, DTensor) else {0}
    results, reason, has_values = [], "", has_data(output) and not output.is_meta
    for target in map(local_of, targets) if has_values else ():
        sample = (*target.shape[:class_dim], *output.shape[class_dim:])
        try:
            of_dims = [_probe(criterion, sample, output, target, dim) for dim in sorted(dims)]
        except Exception as error:  # any error of the caller's criterion
            of_dims = [_ProbeResult(0.0, False, False)]
            reason = f"with plain tensors of random numbers it raises {type(error).__name__}: {error}"
        fits = all(each.is_mean for each in of_dims), all(each.is_sum for each in of_dims)
        results.append(_ProbeResult(of_dims[0].size, *fits, max(each.label for each in of_dims)))
    sizes = [each.size for each in results] or [1.0] * len(targets)
    failed = [float(sum(not each.is_mean for each in results)), float(sum(not each.is_sum for each in results))]
    numbers = _sum_over_sharding_ranks(
        torch.tensor([*sizes, *failed], dtype=torch.float64, device=output.device), first
    )
    if not has_values:
        return Shares([1 / len(targets)] * len(targets), [1 / len(targets)] * len(targets))
    *totals, no_means, no_sums = numbers.tolist()
    label = max(each.label for each in results)
    if no_sums == 0:
        return Shares([1.0] * len(targets), [1.0] * len(targets), label)
    if no_means:
        return Shares((), (), reason=reason or "its loss is neither a sum over tokens nor a mean with one denominator")
    total = sum(totals) or math.nan
    return Shares([each / total for each in sizes], [each / total for each in totals], label)


def sharding_axes(layout: Layout) -> tuple[str, ...]:
    """The mesh axes of at least two ranks that shard a tensor of this layout.

    Called with layouts of targets or tokens: here, and by the criteria of preferences.
    """
    mesh = layout.mesh
    return tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1 and isinstance(layout[a], Shard))


def _axes_sharding_tensor(tensor: Any) -> tuple[str, ...]:
    """The mesh axes of at least two ranks that shard a tensor; none for a plain tensor."""
    return sharding_axes(layout_of(tensor)) if isinstance(tensor, DTensor) else ()


def _sharded_dims(tensor: DTensor) -> set[int]:
    """The dims sharded over at least two ranks."""
    layout = layout_of(tensor)
    return {each.dim for axis in sharding_axes(layout) if isinstance(each := layout[axis], Shard)}


def _sum_over_sharding_ranks(numbers: Tensor, targets: Tensor) -> Tensor:
    """The sum of plain numbers over the mesh axes that shard the targets, by one all-reduce; plain, on every rank."""
    if not isinstance(targets, DTensor):
        return numbers
    layout = Layout(layout_of(targets).mesh, dict.fromkeys(_axes_sharding_tensor(targets), Partial()))
    return reshard(wrap(numbers, layout, numbers.shape)).to_local()


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """The result of probing a criterion on a microbatch's targets. N, D, R: as at the top of this file."""

    size: float  # D of the microbatch's targets on this rank, divided by D of a single token of class `label`
    is_mean: bool  # whether the losses fit N / D
    is_sum: bool  # whether the losses fit N alone
    label: int = 0  # the class of the added tokens R


@torch.no_grad()
def _probe(criterion: Criterion, shape: Sequence[int], output_like: Tensor, target: Tensor, dim: int) -> _ProbeResult:
    """Probes a criterion with plain targets and an output of `shape`, to which tokens are added along `dim`.

    The added tokens have the same class: the first class not ignored by the criterion.
    """
    if target.numel() == 0:
        return _ProbeResult(0.0, True, True)
    size, dtype = shape[dim], torch.promote_types(output_like.dtype, torch.float32)
    generator = torch.Generator(output_like.device).manual_seed(0)
    both = torch.randn(
        (*shape[:dim], size + 1, *shape[dim + 1 :]), dtype=dtype, device=output_like.device, generator=generator
    )
    rows, added = both.narrow(dim, 0, size), both.narrow(dim, size, 1)
    for label in range(min(CLASSES, *shape[target.ndim :])):
        added_target = torch.full_like(target.narrow(dim, 0, 1), label)
        before, after = (float(criterion((added * scale).contiguous(), added_target)) for scale in (1.0, SCALE))
        if math.isfinite(after - before) and abs(after - before) > 1e3 * ALLOWED * abs(after):
            break
    else:
        return _ProbeResult(0.0, False, False)
    all_targets = torch.cat([target, added_target], dim)
    alone, low = float(criterion(rows.contiguous(), target)), float(criterion(both, all_targets))
    added *= SCALE
    high = float(criterion(both, all_targets))
    is_sum = _are_equal(low, before + alone, before, alone) and _are_equal(high, after + alone, after, alone)
    if not math.isfinite(alone):  # 0 / 0: every token is ignored
        return _ProbeResult(0.0, _are_equal(low, before), False, label)
    ratio = (after - before) / (high - low) - 1 if high != low else math.nan
    is_mean = ratio > -ALLOWED and _are_equal(low, (before + ratio * alone) / (1 + ratio), before, alone)
    return _ProbeResult(max(ratio, 0.0) * added_target.numel(), is_mean, is_sum, label)


def _are_equal(loss: float, expected: float, *terms: float) -> bool:
    """Whether a loss equals `expected` up to rounding. terms: the losses it is computed from."""
    return abs(loss - expected) <= ALLOWED * (abs(loss) + sum(map(abs, terms)))
