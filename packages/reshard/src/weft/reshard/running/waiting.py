"""`Waiting`: the placeholder in a parameter's `.grad` while the gradient is being synchronized."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Waiting(Tensor):
    """A placeholder with the gradient's shape, dtype and device, but no memory. Any op on it raises RuntimeError.

    The error tells to call `sync.wait()`. With None in `.grad`, an update by hand would skip the parameter, torch's
    `clip_grad_norm_` would find a norm of 0, and a GradScaler would find nothing to unscale.
    """

    parameter_name: str
    like: tuple[object, ...]

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> Waiting:
        """name: of the parameter, for the error."""
        shape, dtype, device = like = _like(parameter)
        made: Waiting = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, storage_size=0)
        made.parameter_name, made.like = name, like
        return made

    def fits(self, parameter: Tensor) -> bool:
        """Whether this can still be the parameter's `.grad`: the parameter may have another dtype by now."""
        return self.like == _like(parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # With other tensors: raised before a DTensor among them raises its own error about tensors of another class.
        if sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))) > 1:
            _refuse(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(args, kwargs)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{attribute!r} of a gradient that is not there yet: {self._message()}")

    def __deepcopy__(self, memo: object) -> None:
        """None: a copy of the parameter has no GradientSync, and no gradient to wait for."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self._message()}>"

    def _message(self) -> str:
        return (
            f"the gradient of {self.parameter_name} is still on its way; call sync.wait() between loss.backward() and "
            f"the code that reads it"
        )


def _like(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The shape, dtype and device that torch requires of a parameter's gradient."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # grad_dtype None takes any dtype
    return parameter.shape, dtype, parameter.device


def _refuse(args: Any, kwargs: Any) -> NoReturn:
    found = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Waiting))
    raise RuntimeError(found._message())
