"""What a step under `exact` refuses, because torch would add in another order than on the named mesh.

`exact_criterion` refuses a criterion whose sums differ from the named mesh's. `refusing_torch_sums` refuses torch's own
sums and products of DTensors, since torch adds over a rank's whole local tensor. The ops of `weft.kernels` compute each
coordinate of the named mesh apart. Ops of torch do not: an op that computes each element, or each row, apart has the
same bits nevertheless; the sums and products in `_SUMS` have not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.mesh import LayoutError
from weft.reshard import layout_of
from weft.reshard.extension import exact_axes, stacked_shape, this_rank

from ..exact import in_words
from .criterion import Criterion, ProbedCriterion
from .loss_parts import RouterLosses, split_loss


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
        f"the criterion {name} cannot run with exact {in_words(exact)}: torch sums all tokens of a rank at once; "
        f"take weft.kernels.cross_entropy with its options, or leave out exact"
    )


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_CHECKED = "_torch_sums_checked"  # attribute of a model: whether a step ran under `_Refusal`
# fmt: off
_SUMS = frozenset((
    "sum", "mean", "var", "std", "var_mean", "std_mean", "prod", "norm", "linalg_vector_norm", "logsumexp",
    "nansum", "cumsum", "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv", "addmv",
    "convolution", "convolution_backward", "native_layer_norm_backward", "native_batch_norm",
    "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy", "mse_loss", "embedding_dense_backward",
    "index_add", "index_put", "scatter_add", "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
))
# fmt: on


class _Refusal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode in which an op of `_SUMS` with a DTensor raises ValueError. exact: for the error."""

    def __init__(self, exact: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exact = exact

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            name = func.name().removeprefix("aten::").partition(".")[0].rstrip("_")
            if name in _SUMS:
                raise ValueError(
                    f"torch's {name} of a DTensor cannot run with exact {in_words(self._exact)}: torch computes a "
                    f"rank's whole part at once; take an op of weft.kernels, a layer of weft.models, or leave out exact"
                )
        return func(*args, **(kwargs or {}))


def refusing_torch_sums(
    function: Callable[Concatenate[nn.Module, Arguments], Result],
) -> Callable[Concatenate[nn.Module, Arguments], Result]:
    """Decorator for a function that runs a step of a model: inside `exact_sums`, ops of `_SUMS` raise ValueError.

    Only a model's first step under the same named mesh is watched: later steps call the same ops.
    """

    @wraps(function)
    def call(model: nn.Module, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        exact = exact_axes()
        if exact is None or vars(model).get(_CHECKED) == dict(exact):
            return function(model, *args, **kwargs)
        with _Refusal(exact):
            result = function(model, *args, **kwargs)
        object.__setattr__(model, _CHECKED, dict(exact))
        return result

    return call
