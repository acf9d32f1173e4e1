"""What stands in a parameter's `.grad` while its gradient is on its way."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Waiting(Tensor):
    """Says its shape, dtype and device; who computes with it is told to call `sync.wait()`. It holds no memory.

    With None there, an update by hand would pass over the parameter, torch's `clip_grad_norm_` would find a norm of 0, and a
    GradScaler nothing to unscale.
    """

    of: str
    like: tuple[object, ...]

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> Waiting:
        """name: of the parameter."""
        shape, dtype, device = like = _like(parameter)
        made: Waiting = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, storage_size=0)
        made.of, made.like = name, like
        return made

    def fits(self, parameter: Tensor) -> bool:
        """Whether it can still be the parameter's `.grad`, which may have another dtype by now."""
        return self.like == _like(parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Beside other tensors, at once: a DTensor would say that it takes none of another kind.
        if sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))) > 1:
            _refuse(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        _refuse(args, kwargs)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{attribute!r} of a gradient that is not there yet: {self._said()}")

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the parameter has no GradientSync, and no gradient."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{self._said()}>"

    def _said(self) -> str:
        return (
            f"the gradient of {self.of} is still on its way; call sync.wait() between loss.backward() and what reads it"
        )


def _like(parameter: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """What torch asks of a parameter's gradient."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # None: any will do
    return parameter.shape, dtype, parameter.device


def _refuse(args: Any, kwargs: Any) -> NoReturn:
    found = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Waiting))
    raise RuntimeError(found._said())
