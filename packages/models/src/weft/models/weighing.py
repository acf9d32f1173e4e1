"""What makes the losses of microbatches add up to a criterion's loss of the whole batch."""

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

_known: weakref.WeakKeyDictionary[FunctionType, Mapping[str, inspect.Parameter]] = weakref.WeakKeyDictionary()


def weighing(
    criterion: Criterion, parts: Sequence[Microbatch], targets: Tensor, pipeline: Pipeline | None = None
) -> Criterion:
    """The criterion for microbatches whose losses are added up. targets: of the whole batch.

    A criterion with a parameter `denominator` is given that of the whole batch. Where each rank has all targets, each rank counts
    them itself: asked for in the criterion, their number would keep each rank from its backward until all are forward.
    Communication: of targets that are sharded, in several microbatches, the sum of one or two numbers.
    """
    known = _parameters(criterion)
    options = {name: each.default for name, each in known.items()} | getattr(criterion, "keywords", {})
    if "denominator" not in known:
        is_whole = len(parts) == 1 and not sharded_axes(parts[0].targets)
        return criterion if is_whole else Asked(criterion, [each.targets for each in parts], pipeline)
    if options.get("reduction") == "sum" or options["denominator"] not in (None, inspect.Parameter.empty):
        return criterion
    weight = options.get("weight")
    has_all = isinstance(parts[0].targets, DTensor) and not isinstance(targets, DTensor)
    if len(parts) == 1 and (weight is not None or not has_all):
        return criterion
    index = options.get("ignore_index", IGNORED)
    if not isinstance(weight, Tensor):
        total = _total(targets, index, None)
        return lambda output, target: criterion(output, target, denominator=total)
    total = _total(targets, index, weight)
    if not options.get("z_loss"):
        return lambda output, target: criterion(output, target, denominator=total)
    # z-loss has no weights, and is divided by the number of tokens. Weights times tokens / their sum let both have that number.
    tokens = _total(targets, index, None)
    scaled = _times(weight, tokens / total)
    return lambda output, target: criterion(output, target, weight=scaled, denominator=tokens)


def _parameters(criterion: Criterion) -> Mapping[str, inspect.Parameter]:
    """To read those of a function takes the host longer than to count the tokens."""
    if not isinstance(criterion, FunctionType):
        return inspect.signature(criterion).parameters
    if criterion not in _known:
        _known[criterion] = inspect.signature(criterion).parameters
    return _known[criterion]


def _total(targets: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """The tokens that count, or the sum of their classes' weights: a plain scalar."""
    classes = to_global(weight) if isinstance(weight, DTensor) else weight
    dtype = torch.float32 if weight is None else torch.float64
    return summed(of_target(classes, local_of(targets).flatten(), ignored, dtype).sum(), targets)


def _times(weight: Tensor, factor: Tensor) -> Tensor:
    """The weights of classes, in float64, times a number."""
    if isinstance(weight, DTensor):
        return wrap(weight.to_local().double() * factor, layout_of(weight), weight.shape)
    return weight.double() * factor


class Asked:
    """A criterion that names no denominator, weighed by its shares: see `shares`.

    targets: of each microbatch. On a mesh that shards tokens the criterion is called with the plain tensors of a rank's own tokens,
    and with DTensors where classes are sharded.
    """

    def __init__(self, criterion: Criterion, targets: Sequence[Tensor], pipeline: Pipeline | None) -> None:
        self._criterion, self._targets, self._pipeline = criterion, targets, pipeline
        self._shares: Shares | None = None
        self._why: str | None = None  # it is refused, which other stages learn of when the step is over

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
            nothing: Tensor = (
                local_of(next(iter(tensors_of(output)))).flatten()[:1].sum() * 0
            )  # the step goes on to its end
            return _added(nothing, target)
        if not isinstance(output, DTensor) or not isinstance(target, DTensor) or not sharded_axes(target):
            return self._weighed(output, target, shares.whole[number])
        if layout_of(output) != layout_of(target):  # classes are sharded
            loss = self._weighed(output, target, shares.whole[number])
            if not _is_averaged(loss):
                return loss
            output = reshard(output, placements=layout_of(target))
        return _added(self._weighed(output.to_local(), local_of(target), shares.own[number]), target)

    def finish(self) -> None:
        """Raises ValueError on every stage where the last one found no shares. Communication: with stages, the sum of a number."""
        if self._pipeline is None:
            return
        found = torch.tensor(float(self._why is not None), device=self._targets[0].device)
        if self._pipeline.sum_over_stages(found).item():
            raise self._refused(self._why or "see the error of a rank of the last stage")

    def _weighed(self, output: Any, target: Tensor, share: float) -> Tensor:
        """The criterion's loss times its share. Where no token counts, a loss of others takes its place, times 0: its own is NaN."""
        if share:
            return self._criterion(output, target) * share
        assert self._shares is not None, "of which this is one"
        label = torch.full_like(local_of(target), self._shares.label)
        others = wrap(label, layout_of(target), target.shape) if isinstance(target, DTensor) else label
        nothing = self._criterion(output, others)
        return nothing * 0 if isinstance(nothing, DTensor) else nothing.nan_to_num(0, 0, 0) * 0

    def _refused(self, why: str) -> ValueError:
        name = getattr(self._criterion, "__name__", type(self._criterion).__name__)
        return ValueError(
            f"the criterion {name} cannot be weighed over {len(self._targets)} microbatches and the ranks' tokens: {why}. Let it "
            f"return a sum divided by a parameter `denominator`, which is given the number of tokens of the whole batch whose "
            f"target is not {IGNORED}; or take weft.kernels.cross_entropy with its options; or one microbatch"
        )


def _added(addend: Tensor, target: Tensor) -> Tensor:
    """A rank's addend of a loss, as the loss lies where the targets lie so."""
    if not isinstance(target, DTensor):
        return addend
    added: Tensor = _Added.apply(addend, layout_of(target))  # type: ignore[no-untyped-call]
    return added


def _is_averaged(loss: Tensor) -> bool:
    """Whether torch took the mean of the losses of ranks, whatever number of tokens counts on each."""
    return isinstance(loss, DTensor) and any(each == Partial("avg") for each in layout_of(loss).placements)


class _Added(torch.autograd.Function):
    """A rank's addend of a loss, as a DTensor that is Partial over the axes that shard the tokens."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, tokens: Layout) -> DTensor:
        return wrap(addend.detach(), Layout(tokens.mesh, dict.fromkeys(sharded_in(tokens), Partial())), ())

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return grad.to_local(), None
