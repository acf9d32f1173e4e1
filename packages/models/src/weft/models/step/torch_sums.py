"""Refuses, under `exact`, torch's own sums and products of DTensors: torch adds over a rank's whole local tensor.

The ops of `weft.kernels` compute each coordinate of the named mesh apart. Ops of torch do not: an op that computes each
element, or each row, apart has the same bits nevertheless; the sums and products in `_SUMS` have not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.reshard.extension import exact_axes

from ..exact import in_words

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
                    f"torch's {name} of a DTensor cannot be kept to exact {in_words(self._exact)}: torch computes a "
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
