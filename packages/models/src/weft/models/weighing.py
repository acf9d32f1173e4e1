"""Weights a criterion: the losses of microbatches and ranks then add up to the loss of the whole batch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.cross_entropy.merged import of_target
from weft.mesh import Layout, Partial
from weft.reshard import layout_of, reshard, to_global
from weft.reshard.running.dtensor import wrap
from weft.reshard.running.trees import tensors_of

from .parallel.pipeline.run import Microbatch, Pipeline
from .shares import Shares, find_shares, local_of, sharded_axes, sharded_in, summed

Criterion = Callable[..., Tensor]
IGNORED = -100  # torch's ignore_index

_signatures: weakref.WeakKeyDictionary[FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def weighing(
    criterion: Criterion, parts: Sequence[Microbatch], targets: Tensor, pipeline: Pipeline | None = None
) -> Criterion:
    """Weights the criterion, for the losses of microbatches to add up to the loss of the whole batch.

    targets: of the whole batch.
    A criterion with a parameter `denominator` gets the whole batch's. Ranks that have all targets count them before
    the step. Counting inside the criterion would make all ranks wait for each other between forward and backward.
    Communication: for sharded targets in several microbatches, the sum of a number or two.
    """
    parameters = _parameters(criterion)
    options = {name: each.default for name, each in parameters.items()} | getattr(criterion, "keywords", {})
    if "denominator" not in parameters:
        is_whole = len(parts) == 1 and not sharded_axes(parts[0].targets)
        return criterion if is_whole else ProbedCriterion(criterion, [each.targets for each in parts], pipeline)
    if options.get("reduction") == "sum" or options["denominator"] not in (None, inspect.Parameter.empty):
        return criterion
    weight = options.get("weight")
    has_all_targets = isinstance(parts[0].targets, DTensor) and not isinstance(targets, DTensor)
    if len(parts) == 1 and (weight is not None or not has_all_targets):
        return criterion
    index = options.get("ignore_index", IGNORED)
    if not isinstance(weight, Tensor):
        total = _total(targets, index, None)
        return lambda output, target: criterion(output, target, denominator=total)
    total = _total(targets, index, weight)
    if not options.get("z_loss"):
        return lambda output, target: criterion(output, target, denominator=total)
    # z-loss is unweighted and divided by the number of tokens. Weights scaled by tokens / total share this
    # denominator.
    tokens = _total(targets, index, None)
    scaled = _scaled_weight(weight, tokens / total)
    return lambda output, target: criterion(output, target, weight=scaled, denominator=tokens)


def _parameters(criterion: Criterion) -> Mapping[str, inspect.Parameter]:
    """The criterion's signature, cached for functions: reading a signature takes longer than counting the tokens."""
    if not isinstance(criterion, FunctionType):
        return inspect.signature(criterion).parameters
    if criterion not in _signatures:
        _signatures[criterion] = inspect.signature(criterion).parameters
    return _signatures[criterion]


def _total(targets: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """The number of tokens not ignored, or the sum of their classes' weights: a plain scalar."""
    classes = to_global(weight) if isinstance(weight, DTensor) else weight
    dtype = torch.float32 if weight is None else torch.float64
    return summed(of_target(classes, local_of(targets).flatten(), ignored, dtype).sum(), targets)


def _scaled_weight(weight: Tensor, factor: Tensor) -> Tensor:
    """Class weights times a factor, in float64."""
    if isinstance(weight, DTensor):
        return wrap(weight.to_local().double() * factor, layout_of(weight), weight.shape)
    return weight.double() * factor


class ProbedCriterion:
    """A criterion without a parameter `denominator`, weighted by its shares, see `shares`.

    targets: of each microbatch. Where tokens are sharded, the criterion gets plain tensors of the rank's own tokens,
    or DTensors where classes are sharded.
    """

    def __init__(self, criterion: Criterion, targets: Sequence[Tensor], pipeline: Pipeline | None) -> None:
        self._criterion, self._targets, self._pipeline = criterion, targets, pipeline
        self._shares: Shares | None = None
        self._why: str | None = None  # why the criterion is refused; `finish` tells the other stages

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        if self._shares is None:
            self._shares = find_shares(self._criterion, output, self._targets)
        shares, number = self._shares, next(i for i, each in enumerate(self._targets) if each is target)
        if shares.why is not None:
            loss = self._criterion(output, target) if len(self._targets) == 1 else None
            if loss is not None and not _is_averaged(loss):
                return loss
            if self._pipeline is None:
                raise self._refused(shares.why)
            self._why = shares.why
            # Zero lets the step run to the end; `finish` raises the error.
            zero_loss: Tensor = local_of(next(iter(tensors_of(output)))).flatten()[:1].sum() * 0
            return _partial_loss(zero_loss, target)
        if not isinstance(output, DTensor) or not isinstance(target, DTensor) or not sharded_axes(target):
            return self._weighted(output, target, shares.whole[number])
        if layout_of(output) != layout_of(target):  # classes are sharded
            loss = self._weighted(output, target, shares.whole[number])
            if not _is_averaged(loss):
                return loss
            output = reshard(output, placements=layout_of(target))
        return _partial_loss(self._weighted(output.to_local(), local_of(target), shares.own[number]), target)

    def finish(self) -> None:
        """Raises ValueError on every stage where the last stage found no weights.

        Communication: with stages, the sum of a number.
        """
        if self._pipeline is None:
            return
        found = torch.tensor(float(self._why is not None), device=self._targets[0].device)
        if self._pipeline.sum_over_stages(found).item():
            raise self._refused(self._why or "see the error of a rank of the last stage")

    def _weighted(self, output: Any, target: Tensor, share: float) -> Tensor:
        """The criterion's loss times `share`.

        With share 0, no token counts and the loss is NaN: returns 0 times the loss of labels that count.
        """
        if share:
            return self._criterion(output, target) * share
        assert self._shares is not None, "shares were found before"
        label = torch.full_like(local_of(target), self._shares.label)
        others = wrap(label, layout_of(target), target.shape) if isinstance(target, DTensor) else label
        zero_loss = self._criterion(output, others)
        return zero_loss * 0 if isinstance(zero_loss, DTensor) else zero_loss.nan_to_num(0, 0, 0) * 0

    def _refused(self, why: str) -> ValueError:
        name = getattr(self._criterion, "__name__", type(self._criterion).__name__)
        return ValueError(
            f"the criterion {name} cannot be weighed over {len(self._targets)} microbatches and the ranks' tokens: "
            f"{why}. Let it return a sum divided by a parameter `denominator`, which is given the number of tokens "
            f"of the whole batch whose target is not {IGNORED}; or take weft.kernels.cross_entropy with its options; "
            f"or one microbatch"
        )


def _partial_loss(addend: Tensor, target: Tensor) -> Tensor:
    """A rank's addend of the loss; as a Partial DTensor where the targets are a DTensor."""
    if not isinstance(target, DTensor):
        return addend
    added: Tensor = _PartialLoss.apply(addend, layout_of(target))  # type: ignore[no-untyped-call]
    return added


def _is_averaged(loss: Tensor) -> bool:
    """Whether torch averaged the ranks' losses, regardless of the number of tokens on each rank."""
    return isinstance(loss, DTensor) and any(each == Partial("avg") for each in layout_of(loss).placements)


class _PartialLoss(torch.autograd.Function):
    """Wraps a rank's addend of a loss as a DTensor, Partial over the axes sharding the tokens."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, tokens: Layout) -> DTensor:
        return wrap(addend.detach(), Layout(tokens.mesh, dict.fromkeys(sharded_in(tokens), Partial())), ())

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return grad.to_local(), None
