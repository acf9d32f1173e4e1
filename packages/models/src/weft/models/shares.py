"""Weights of microbatches, and of each rank's rows, in the mean of a criterion without a parameter `denominator`.

The criterion is probed by calls on random numbers. The loss is assumed to be N / D, where N and D are sums over
tokens, and D depends only on targets. The probe appends a row R of tokens to the rows M of a microbatch, and scales
R's output; N(R) grows by some x. The loss of R alone grows by x / D(R), and the loss of M and R together by x / (D(M)
+ D(R)). The ratio of both growths gives D(M) / D(R).
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
SCALE = 10.0  # of the added row's output: raises its cross-entropy by some tens, far above a mean's rounding error
CLASSES = 4  # candidates for the added row's class; not all may be ignored
ALLOWED = 2e-5  # relative rounding error of a mean in float32


@dataclass(frozen=True, slots=True)
class Shares:
    """The weights of microbatches in the loss of the whole batch, or the reason why no weights exist."""

    own: Sequence[float]  # by microbatch: of this rank's tokens
    whole: Sequence[float]  # by microbatch: of all tokens
    label: int = 0  # a class not ignored by the criterion
    why: str | None = None  # why the criterion cannot be weighted; else None


def find_shares(criterion: Criterion, output: Any, targets: Sequence[Tensor]) -> Shares:
    """Finds the weights of microbatches in a criterion's loss of the whole batch.

    output: the model's output for the first microbatch; only shape and dtype are used.
    targets: of each microbatch, plain or DTensors.
    The criterion is called with plain tensors of random numbers: for each microbatch three times in full size, and a
    few times with a single row; twice as often where tokens of a row are on several ranks.
    Communication: for sharded targets, the sum of a few numbers. The host waits for the device.
    """
    first = targets[0]
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[:1] != first.shape[:1]:
        return Shares((), (), why="the model's output is not one tensor with a row for each row of targets")
    class_dim = next((i for i, (a, b) in enumerate(zip(output.shape, first.shape, strict=False)) if a != b), first.ndim)
    dims = {0, *_dims(first)} if isinstance(first, DTensor) else {0}
    results, why, has_values = [], "", has_data(output) and not output.is_meta
    for target in map(local_of, targets) if has_values else ():
        sample = (*target.shape[:class_dim], *output.shape[class_dim:])
        try:
            of_dims = [_probe(criterion, sample, output, target, dim) for dim in sorted(dims)]
        except Exception as error:  # any error of the caller's criterion
            of_dims = [_ProbeResult(0.0, False, False)]
            why = f"with plain tensors of random numbers it raises {type(error).__name__}: {error}"
        fits = all(each.is_mean for each in of_dims), all(each.is_sum for each in of_dims)
        results.append(_ProbeResult(of_dims[0].size, *fits, max(each.label for each in of_dims)))
    sizes = [each.size for each in results] or [1.0] * len(targets)
    failed = [float(sum(not each.is_mean for each in results)), float(sum(not each.is_sum for each in results))]
    numbers = summed(torch.tensor([*sizes, *failed], dtype=torch.float64, device=output.device), first)
    if not has_values:
        return Shares([1 / len(targets)] * len(targets), [1 / len(targets)] * len(targets))
    *totals, no_means, no_sums = numbers.tolist()
    label = max(each.label for each in results)
    if no_sums == 0:
        return Shares([1.0] * len(targets), [1.0] * len(targets), label)
    if no_means:
        return Shares(
            (), (), why=why or "its loss of all tokens is not the mean of its losses of some, by one denominator"
        )
    total = sum(totals) or math.nan
    return Shares([each / total for each in sizes], [each / total for each in totals], label)


def local_of(tensor: Tensor) -> Tensor:
    """A plain tensor as it is; a DTensor's local tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_in(layout: Layout) -> tuple[str, ...]:
    """The mesh axes of at least two ranks that shard a tensor of this layout."""
    mesh = layout.mesh
    return tuple(a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1 and isinstance(layout[a], Shard))


def sharded_axes(tensor: Any) -> tuple[str, ...]:
    """The mesh axes of at least two ranks that shard a tensor; none for a plain tensor."""
    return sharded_in(layout_of(tensor)) if isinstance(tensor, DTensor) else ()


def _dims(tensor: DTensor) -> set[int]:
    """The dims sharded over at least two ranks."""
    layout = layout_of(tensor)
    return {each.dim for axis in sharded_in(layout) if isinstance(each := layout[axis], Shard)}


def summed(numbers: Tensor, targets: Tensor) -> Tensor:
    """Sums plain numbers over the mesh axes that shard the targets, by one all-reduce; a plain tensor."""
    if not isinstance(targets, DTensor):
        return numbers
    layout = Layout(layout_of(targets).mesh, dict.fromkeys(sharded_axes(targets), Partial()))
    return reshard(wrap(numbers, layout, numbers.shape)).to_local()


@dataclass(frozen=True, slots=True)
class _ProbeResult:
    """The result of probing a criterion on one microbatch's targets."""

    size: float  # D of the targets, relative to D of a token of class `label`
    is_mean: bool  # losses fit N / D
    is_sum: bool  # losses fit N
    label: int = 0  # class of the added tokens


@torch.no_grad()
def _probe(criterion: Criterion, shape: Sequence[int], like: Tensor, target: Tensor, dim: int) -> _ProbeResult:
    """Probes a criterion with plain targets and an output of `shape`, to which tokens are added along `dim`.

    The added tokens have the same class: the first class not ignored by the criterion.
    """
    if target.numel() == 0:
        return _ProbeResult(0.0, True, True)
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
        return _ProbeResult(0.0, False, False)
    classes = torch.cat([target, one], dim)
    alone, low = float(criterion(mine.contiguous(), target)), float(criterion(both, classes))
    added *= SCALE
    high = float(criterion(both, classes))
    is_sum = _are_equal(low, before + alone, before, alone) and _are_equal(high, after + alone, after, alone)
    if not math.isfinite(alone):  # 0 / 0: every token is ignored
        return _ProbeResult(0.0, _are_equal(low, before), False, label)
    ratio = (after - before) / (high - low) - 1 if high != low else math.nan
    is_mean = ratio > -ALLOWED and _are_equal(low, (before + ratio * alone) / (1 + ratio), before, alone)
    return _ProbeResult(max(ratio, 0.0) * one.numel(), is_mean, is_sum, label)


def _are_equal(loss: float, expected: float, *parts: float) -> bool:
    """Whether a loss equals `expected` up to rounding. parts: the losses it is computed from."""
    return abs(loss - expected) <= ALLOWED * (abs(loss) + sum(map(abs, parts)))
