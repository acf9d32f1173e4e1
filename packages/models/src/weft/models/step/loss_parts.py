"""What a step sums beside a criterion's loss: numbers that the criterion returns, and the losses of routers.

`LossWithParts`: metrics which a criterion may return with the loss. `RouterLosses`: for models with mixtures of
experts. The balance loss (Fedus et al. 2021) and the z-loss (Zoph et al. 2022) are the global batch's on every mesh:
each rank adds the terms of the local tokens to the local loss, and all are summed with the loss. Correction biases,
which balance experts without a loss (DeepSeek-V3, arXiv:2412.19437), are updated from the same counts of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial
from weft.reshard import layout_of, reshard
from weft.reshard.extension import cotangent, named_size, wrap

from ..checks import check_coefficients, check_sizes
from ..experts import MixtureOfExperts
from ..initialization import local_slices
from ..losses import local_value, sum_of_microbatches
from ..parallel.parallelize import pipeline_of


class RouterParts(NamedTuple):
    """The routers' losses in a microbatch, or summed over microbatches by `add_results`; without autograd's graph."""

    # [1 + layers with experts]: this rank's addends of the balance loss, then of each layer's share of the z-loss.
    # Inside `exact_sums` stacked as the loss is.
    addends: Tensor
    load: Tensor  # [layers with experts, E]: the tokens of all ranks given to each expert


class LossWithParts(NamedTuple):
    """A loss with further numbers, which `find_gradients` sums over microbatches and ranks together with the loss.

    Returned by a criterion in place of a loss.
    """

    loss: Tensor
    # [n], without graph: this rank's addends of n numbers of the criterion, as metrics. Summed over the axes over which
    # the loss is Partial. Under a pipeline the criterion needs an attribute `num_sums`, which is n: only ranks of the
    # last stage call the criterion.
    sums: Tensor | None = None
    routers: RouterParts | None = None  # of `RouterLosses`, before the coefficients


def split_loss(result: Any) -> LossWithParts:
    """The result of a criterion, a loss or a `LossWithParts`, as a `LossWithParts`."""
    return result if isinstance(result, LossWithParts) else LossWithParts(result)


def num_sums_of(criterion: Any) -> int:
    """The length of `LossWithParts.sums` of a criterion, by the criterion's attribute; 0 without the attribute."""
    return int(getattr(criterion, "num_sums", 0))


class StepParts(NamedTuple):
    """The parts of a step's losses on this rank, summed over the microbatches; made by `add_results`."""

    sums: Tensor | None
    routers: RouterParts | None

    @property
    def addends(self) -> Tensor | None:
        """The numbers to sum over the ranks: the criterion's own, then the routers'; None without any."""
        each = [] if self.sums is None else [self.sums]
        each += [] if self.routers is None else [self.routers.addends]
        return torch.cat(each, -1) if each else None


def add_results(results: Sequence[LossWithParts]) -> StepParts:
    """The sum of the microbatches' parts."""
    sums = [each.sums for each in results if each.sums is not None]
    routers = [each.routers for each in results if each.routers is not None]
    return StepParts(
        sum_of_microbatches(sums) if sums else None,
        RouterParts(
            sum_of_microbatches([each.addends for each in routers]),
            sum_of_microbatches([each.load for each in routers]),
        )
        if routers
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """The routers' parts of a step, the same on every rank. `forward_backward` gives them to `RouterLosses.report`."""

    balance: Tensor  #: scalar: the balance loss without its coefficient, a mean over microbatches
    z: Tensor  #: [layers with experts]: each layer's share of the z-loss without its coefficient, the sum of the shares
    load: Tensor  #: [layers with experts, E]: the tokens of the batch given to each expert


@dataclass(frozen=True, slots=True)
class RouterLosses:
    """A criterion for `model(tokens, router=True)`: a criterion of the logits, plus the routers' losses.

        loss = criterion(logits, targets) + balance * E * sum_e(f_e * P_e) + z * mean(logsumexp(router logits)**2)

    f_e: choices of expert e in all layers on all ranks, divided by tokens times layers, a constant for autograd. P_e:
    the mean softmax probability of expert e. The balance loss equals transformers' `load_balancing_loss_func`.
    For a model with `MixtureConfig.seq_aux`, f_e and P_e are those of one sequence and layer, and the balance loss is
    the mean over all sequences and layers: the same for any number of microbatches.
    A call returns a `LossWithParts`. In a training loop of your own, call `.loss.backward()`.
    Communication: the sum of the choices [layers, E] over the axes that shard tokens. Where the logits' loss is not
    Partial over such an axis, as over "tp" with sequence parallelism, also the sum of all statistics over this axis.
    Raises ValueError for a negative coefficient, for microbatches below 1, for an output without statistics, and for no
    tokens.
    """

    #: of logits and targets, as for `forward_backward`. The sums of a `LossWithParts` are kept.
    criterion: Callable[..., Any]
    balance: float = 0.001  #: coefficient of the balance loss, 0 or more
    z: float = 0.0  #: coefficient of the z-loss, 0 or more
    #: microbatches of the batch; each counts 1 / microbatches. `forward_backward` sets this number.
    microbatches: int = 1
    #: called by `forward_backward` at the end of a step with the `RouterReport`, on every rank; None: not called
    report: Callable[[RouterReport], object] | None = None

    def __post_init__(self) -> None:
        check_coefficients("RouterLosses", self, "balance", "z")
        check_sizes(self, "microbatches")

    @property
    def num_sums(self) -> int:
        """The length of the inner criterion's `LossWithParts.sums`, for pipeline stages that call no criterion."""
        return num_sums_of(self.criterion)

    def __call__(self, output: Any, targets: Any) -> LossWithParts:
        if not isinstance(output, tuple) or len(output) != 2 or not isinstance(output[1], Tensor):
            raise ValueError(
                "RouterLosses takes the pair (logits, statistics): call the model with router=True, as "
                "model(tokens, router=True) or forward_backward(model, criterion, tokens, targets, router=True), and "
                "give it layers with experts"
            )
        if not targets.numel():
            raise ValueError(f"RouterLosses got targets {tuple(targets.shape)}, no token; give one at least")
        logits, statistics = output
        loss, own_sums, _ = split_loss(self.criterion(logits, targets))
        statistics = _in_layout_of_loss(statistics, loss)
        layers, E = statistics.shape[0], (statistics.shape[1] - 1) // 2
        by_sequence = statistics.shape[1] > 2 * E + 1
        balanced = slice(2 * E + 1, 2 * E + 2) if by_sequence else slice(E, 2 * E)  # columns of the balance loss
        count = float(targets.numel() * layers * self.microbatches)
        with torch.no_grad():
            load = _sum_load(statistics, E)  # [layers, E]
            f = load.sum(0) / float(targets.numel() * layers)
            slopes = torch.zeros(2, statistics.shape[1], dtype=load.dtype, device=load.device)
            slopes[0, balanced], slopes[1, 2 * E] = E / count if by_sequence else f * (E / count), 1 / count
            slope = self.balance * slopes[0] + self.z * slopes[1]
            sums = local_value(statistics)  # inside `exact_sums` with a stack of each coordinate's statistics
            of_coordinates = [
                self._add_up(each[:, balanced], each[:, 2 * E], slopes[0, balanced], count)
                for each in sums.reshape(-1, *sums.shape[-2:])
            ]
            addends = torch.stack([each for each, _ in of_coordinates]).view(*sums.shape[:-2], 1 + layers)
            value = torch.stack([each for _, each in of_coordinates]).view(sums.shape[:-2])
        total: Tensor = _AddRouterLoss.apply(loss, statistics, value, slope)  # type: ignore[no-untyped-call]
        return LossWithParts(total, own_sums, RouterParts(addends, load))

    def _add_up(self, sums: Tensor, squares: Tensor, slope: Tensor, count: float) -> tuple[Tensor, Tensor]:
        """The addends of `RouterParts`, and their weighted sum, which is added to the loss.

        sums, squares: a coordinate's statistics, the columns of the balance loss [layers, n] and of the z-loss
        [layers]. slope: [n], the factors of the sums in the balance loss. count: tokens times layers times
        microbatches.
        """
        balance = sums.sum(0) @ slope
        addends = torch.cat([balance[None], squares / count])
        value = self.balance * addends[0]
        if self.z:  # the squares of huge logits overflow, which a coefficient of 0 leaves out
            value = value + self.z * addends[1:].sum()
        return addends, value


class _AddRouterLoss(torch.autograd.Function):
    """A loss plus a linear function of router statistics.

    value: the function's, already computed. slope: the gradient of the function for a layer's row of statistics.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, statistics: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.slope, ctx.shape = slope, tuple(statistics.shape)
        ctx.layout = layout_of(statistics) if isinstance(statistics, DTensor) else None
        if not isinstance(loss, DTensor):
            return loss.detach() + value.to(loss.dtype)
        return wrap(local_value(loss) + value.to(loss.dtype), layout_of(loss), ())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        with torch.no_grad():
            rows = (local_value(grad) * ctx.slope).to(ctx.slope.dtype).expand(ctx.shape).contiguous()
            return grad, rows if ctx.layout is None else wrap(rows, cotangent(ctx.layout), ctx.shape), None, None


def _in_layout_of_loss(statistics: Tensor, loss: Tensor) -> Tensor:
    """The statistics, summed over the axes over which the loss is not Partial, so as to be added to the loss.

    Raises LayoutError for a loss that is Partial over an axis over which the statistics are not.
    """
    if not isinstance(statistics, DTensor):
        return statistics
    own = layout_of(statistics)
    of_loss = layout_of(loss) if isinstance(loss, DTensor) else Layout(own.mesh)
    if own.mesh != of_loss.mesh or any(
        named_size(own.mesh, axis) > 1 and of_loss[axis] == Partial() and own[axis] != Partial()
        for axis in own.mesh.axis_names
    ):
        raise LayoutError(
            f"the loss is ({of_loss}) and the routers' statistics are ({own}): the criterion must be Partial over "
            f"axes that shard the tokens alone"
        )
    summed = [axis for axis in own.mesh.axis_names if own[axis] == Partial() and of_loss[axis] != Partial()]
    return reshard(statistics, placements=own.replace(**dict.fromkeys(summed, "R"))) if summed else statistics


def _sum_load(statistics: Tensor, E: int) -> Tensor:
    """The choices of each layer's experts [layers, E] over all ranks, as a plain tensor."""
    load = local_value(statistics)[..., :E].contiguous()
    if not isinstance(statistics, DTensor):
        return load
    return reshard(wrap(load, layout_of(statistics), load.shape[-2:])).to_local()


@torch.no_grad()
def update_correction_biases(model: nn.Module, load: Tensor, rate: float) -> None:
    """Raise the correction bias of experts with less than the mean load by `rate`, and lower the busier experts' bias.

    Call it after the optimizer's step, on every rank, for a model with `QwenMoeConfig.router_bias_rate` above 0; biases
    are not trained by gradients (DeepSeek-V3, arXiv:2412.19437).
    load: [layers with experts, E], `RouterReport.load` of the step.
    rate: by which a bias changes, as `QwenMoeConfig.router_bias_rate`.
    Communication: none. Raises ValueError for a model without correction biases, and for a load of another shape.
    """
    mixtures = [each for each in model.modules() if isinstance(each, MixtureOfExperts)]
    if pipeline_of(model) is None and not any(each.options.correction_bias for each in mixtures):
        raise ValueError("the model has no correction biases; give QwenMoeConfig a router_bias_rate above 0")
    for mixture in mixtures:
        bias, shape = mixture.correction_bias, (mixture.layers, mixture.options.num_experts)
        if tuple(load.shape) != shape:
            raise ValueError(f"load has the shape {tuple(load.shape)}; give RouterReport.load of a step, {shape}")
        if bias is not None:  # None in layers of another stage
            signs = torch.sign(load[mixture.layer].mean() - load[mixture.layer]).to(bias.dtype)
            local_value(bias).add_(signs[local_slices(bias)], alpha=rate)
