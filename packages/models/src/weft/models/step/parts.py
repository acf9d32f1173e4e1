"""Numbers that a criterion may return beside the loss, to be summed with the loss: metrics, and the routers' parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..losses import sum_of_microbatches


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
