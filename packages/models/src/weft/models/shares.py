"""How much each microbatch, and each rank's rows of it, weigh in the mean of a criterion that names no denominator.

Such a criterion is asked. Its loss is taken to be N / D, where N and D are sums over tokens and D depends on targets alone. A row R
of tokens is put below the rows M of a microbatch, and the output of R is scaled. N(R) grows by some number x: the loss of R by
x / D(R), and the loss of R and M together by x / (D(R) + D(M)). The two growths tell D(M) / D(R).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels.backend import has_data
from weft.mesh import Layout, Partial, Shard
from weft.reshard import layout_of, reshard
from weft.reshard.running.dtensor import wrap

Criterion = Callable[..., Tensor]
SCALE = 10.0  # of the added row's output: its cross-entropy grows by some tens, far more than a mean is rounded by
CLASSES = 4  # of which one, at least, is taken not to be ignored
ALLOWED = 2e-5  # rounding of a mean in float32, of its size


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the loss of the whole batch, one for each microbatch. own: of this rank's tokens of it. whole: of all of it.

    label: a class that counts. why: what is wrong where no shares would give the criterion's loss of the whole batch, else None.
    """

    own: Sequence[float]
    whole: Sequence[float]
    label: int = 0
    why: str | None = None


def find_shares(criterion: Criterion, output: Any, targets: Sequence[Tensor]) -> Shares:
    """The shares of microbatches with those targets in a criterion's loss of them all.

    output: the model's of the first, of which the shape and dtype count. targets: of each microbatch, plain or DTensors.
    The criterion is called with plain tensors of random numbers: for each microbatch three times with as many tokens, and a few
    times with a row; as often again where tokens of a row are on several ranks.
    Communication: of targets that are sharded, the sum of a few numbers. The host waits for the device.
    """
    first = targets[0]
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[:1] != first.shape[:1]:
        return Shares((), (), why="the model's output is not one tensor with a row for each row of targets")
    alike = next((i for i, (a, b) in enumerate(zip(output.shape, first.shape, strict=False)) if a != b), first.ndim)
    dims = {0, *_dims(first)} if isinstance(first, DTensor) else {0}
    answers, why, has_values = [], "", has_data(output) and not output.is_meta
    for target in map(local_of, targets) if has_values else ():
        sample = (*target.shape[:alike], *output.shape[alike:])
        try:
            of_dims = [_ask(criterion, sample, output, target, dim) for dim in sorted(dims)]
        except Exception as error:  # the criterion is the caller's
            of_dims = [_Answer(0.0, False, False)]
            why = f"with plain tensors of random numbers it raises {type(error).__name__}: {error}"
        fits = all(each.is_mean for each in of_dims), all(each.is_sum for each in of_dims)
        answers.append(_Answer(of_dims[0].size, *fits, max(each.label for each in of_dims)))
    sizes = [each.size for each in answers] or [1.0] * len(targets)
    failed = [float(sum(not each.is_mean for each in answers)), float(sum(not each.is_sum for each in answers))]
    numbers = summed(torch.tensor([*sizes, *failed], dtype=torch.float64, device=output.device), first)
    if not has_values:
        return Shares([1 / len(targets)] * len(targets), [1 / len(targets)] * len(targets))
    *totals, no_means, no_sums = numbers.tolist()
    label = max(each.label for each in answers)
    if no_sums == 0:
        return Shares([1.0] * len(targets), [1.0] * len(targets), label)
    if no_means:
        return Shares(
            (), (), why=why or "its loss of all tokens is not the mean of its losses of some, by one denominator"
        )
    every = sum(totals) or math.nan
    return Shares([each / every for each in sizes], [each / every for each in totals], label)


def local_of(tensor: Tensor) -> Tensor:
    """A tensor, or the local one of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_in(layout: Layout) -> tuple[str, ...]:
    """The axes of more than one rank that shard a tensor with that layout."""
    mesh = layout.mesh
    return tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1 and isinstance(layout[a], Shard))


def sharded_axes(tensor: Any) -> tuple[str, ...]:
    """The axes of more than one rank that shard a tensor; none of a plain one."""
    return sharded_in(layout_of(tensor)) if isinstance(tensor, DTensor) else ()


def _dims(tensor: DTensor) -> set[int]:
    """The dims that are sharded over more than one rank."""
    layout = layout_of(tensor)
    return {each.dim for axis in sharded_in(layout) if isinstance(each := layout[axis], Shard)}


def summed(numbers: Tensor, targets: Tensor) -> Tensor:
    """The sum of each rank's numbers over the axes that shard the targets; a plain tensor."""
    if not isinstance(targets, DTensor):
        return numbers
    layout = Layout(layout_of(targets).mesh, dict.fromkeys(sharded_axes(targets), Partial()))
    return reshard(wrap(numbers, layout, numbers.shape)).to_local()


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a criterion says of some tokens. size: D of them, by that of a token of class `label`.

    is_mean, is_sum: whether the losses are those of N / D, or of N.
    """

    size: float
    is_mean: bool
    is_sum: bool
    label: int = 0


@torch.no_grad()
def _ask(criterion: Criterion, shape: Sequence[int], like: Tensor, target: Tensor, dim: int) -> _Answer:
    """What a criterion says of the plain targets of an output of that shape. The tokens are added along `dim`.

    The added tokens have one class: the first that the criterion does not ignore.
    """
    if target.numel() == 0:
        return _Answer(0.0, True, True)
    size, dtype = shape[dim], torch.promote_types(like.dtype, torch.float32)
    generator = torch.Generator(like.device).manual_seed(0)
    both = torch.randn(
        (*shape[:dim], size + 1, *shape[dim + 1 :]), dtype=dtype, device=like.device, generator=generator
    )
    mine, added = both.narrow(dim, 0, size), both.narrow(dim, size, 1)
    for label in range(min(CLASSES, *shape[target.ndim :])):
        one = torch.full_like(target.narrow(dim, 0, 1), label)
        before, after = (float(criterion((added * scale).contiguous(), one)) for scale in (1.0, SCALE))
        if math.isfinite(after - before) and abs(after - before) > 1e3 * ALLOWED * abs(after):
            break
    else:
        return _Answer(0.0, False, False)
    classes = torch.cat([target, one], dim)
    alone, low = float(criterion(mine.contiguous(), target)), float(criterion(both, classes))
    added *= SCALE
    high = float(criterion(both, classes))
    is_sum = _are_equal(low, before + alone, before, alone) and _are_equal(high, after + alone, after, alone)
    if not math.isfinite(alone):  # 0 / 0: no token counts
        return _Answer(0.0, _are_equal(low, before), False, label)
    ratio = (after - before) / (high - low) - 1 if high != low else math.nan
    is_mean = ratio > -ALLOWED and _are_equal(low, (before + ratio * alone) / (1 + ratio), before, alone)
    return _Answer(max(ratio, 0.0) * one.numel(), is_mean, is_sum, label)


def _are_equal(loss: float, expected: float, *parts: float) -> bool:
    """Whether a loss is what it should be, but for rounding. parts: losses that it is made of."""
    return abs(loss - expected) <= ALLOWED * (abs(loss) + sum(map(abs, parts)))
