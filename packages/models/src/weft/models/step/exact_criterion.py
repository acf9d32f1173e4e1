"""Criteria under a plan with `exact`: a criterion whose sums differ from the named mesh's is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from weft.mesh import LayoutError
from weft.reshard import layout_of
from weft.reshard.extension import stacked_shape, this_rank

from ..exact import in_words
from .criterion import Criterion, ProbedCriterion
from .parts import split_loss
from .router import RouterLosses


def exact_criterion(criterion: Criterion, weighted: Criterion, exact: Mapping[str, int]) -> Criterion:
    """The criterion of a step with `exact`: `weighted`, with a check in each call of a criterion that is not Weft's.

    criterion: the caller's criterion. weighted: the result of `weight_criterion` for this criterion.
    Raises ValueError for a `ProbedCriterion`, which weights the loss of each rank's tokens. A call raises ValueError
    where torch computed the loss for all coordinates of the named mesh at once.
    """
    if isinstance(criterion, RouterLosses) and isinstance(weighted, RouterLosses):
        return replace(weighted, criterion=exact_criterion(criterion.criterion, weighted.criterion, exact))
    function: Any = criterion
    while isinstance(function, partial):
        function = function.func
    if isinstance(weighted, ProbedCriterion):
        raise _refusal(function, exact)
    if str(getattr(function, "__module__", "")).startswith("weft."):
        return weighted
    return _checked(weighted, function, exact)


def _checked(criterion: Criterion, function: Callable[..., Any], exact: Mapping[str, int]) -> Criterion:
    """The criterion, with a check that each coordinate of the named mesh gave a loss. function: for the error."""

    def call(output: Any, targets: Any) -> Any:
        try:
            result = criterion(output, targets)
            loss = split_loss(result).loss
            if isinstance(loss, DTensor):
                expected = stacked_shape(layout_of(loss), loss.shape, this_rank())
                if tuple(loss.to_local().shape) != expected:
                    raise LayoutError(f"the loss is {tuple(loss.to_local().shape)} on this rank, and not {expected}")
        except LayoutError as error:
            raise _refusal(function, exact) from error
        return result

    return call


def _refusal(function: Callable[..., Any], exact: Mapping[str, int]) -> ValueError:
    name = getattr(function, "__name__", type(function).__name__)
    return ValueError(
        f"the criterion {name} cannot be kept to exact {in_words(exact)}: torch sums all tokens of a rank at once; "
        f"take weft.kernels.cross_entropy with its options, or leave out exact"
    )
