"""What a criterion may return beside its loss: numbers of its own, and the routers' parts, summed with the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..losses import sum_of_microbatches


class RouterParts(NamedTuple):
    """The routers' part of a loss, without graph; of one microbatch, or summed by `add_results`."""

    # [1 + layers with experts]: the balance loss, then each layer's share of the z-loss; this rank's addends. Inside
    # `exact_sums` stacked as the loss is.
    addends: Tensor
    load: Tensor  # [layers with experts, E]: how many of all ranks' tokens each expert was given


class LossWithParts(NamedTuple):
    """A loss with further numbers, which `find_gradients` sums over microbatches and ranks together with the loss.

    Returned by a criterion in place of a loss.
    """

    loss: Tensor
    # [n], without graph: this rank's addends of the criterion's own numbers, as metrics. Summed over the axes over
    # which the loss is Partial. Under a pipeline the criterion also has an attribute `num_sums`, n: ranks of other
    # stages than the last never call the criterion.
    sums: Tensor | None = None
    routers: RouterParts | None = None  # of `RouterLosses`, before the coefficients


def split_loss(result: Any) -> LossWithParts:
    """What a criterion returned, a loss or a `LossWithParts`, as a `LossWithParts`."""
    return result if isinstance(result, LossWithParts) else LossWithParts(result)


def num_sums_of(criterion: Any) -> int:
    """The number of a criterion's own sums."""
    return int(getattr(criterion, "num_sums", 0))


class StepParts(NamedTuple):
    """The parts of a step's losses on this rank, summed over the microbatches."""

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
