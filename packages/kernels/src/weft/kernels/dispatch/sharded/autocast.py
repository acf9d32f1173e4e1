"""`torch.autocast` for ops on plain tensors and DTensors: `CASTS` tells how; inside an op autocast is off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of
from weft.reshard.extension import in_graph, wrap

from ..backend import (
    CASTS,
    CastTo,
    autocast_dtype,
    autocast_off,
    is_autocasting,
    is_compiling,
    may_be_cast,
    operands_dtype,
)

# Names of keyword arguments never cast: the op writes into the caller's accumulate_into; rope's tables and attention's
# sinks stay in float32.
NEVER_CAST = ("accumulate_into", "cos", "sin", "sinks")
# Casts of parameters inside `sharing_casts`: by the parameter's id and the dtype, the parameter and its local cast.
_shared_casts: ContextVar[dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] | None]
_shared_casts = ContextVar("_shared_casts", default=None)
P = ParamSpec("P")
Result = TypeVar("Result")
Operand = TypeVar("Operand", bound=Tensor)


def autocasts(name: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorator for the public function of op `name`: casts its operands as `torch.autocast` would.

    The device of the first tensor decides which autocast applies. A parameter is cast in every call, and its gradient
    is cast back.
    """
    cast_to = CASTS[name]

    def decorator(op: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(op)
        def call_with_casts(*args: Any, **kwargs: Any) -> Result:
            if not is_autocasting():
                return op(*args, **kwargs)
            first: Any = args[0] if args else next((each for each in kwargs.values() if isinstance(each, Tensor)), None)
            dtype = autocast_dtype(first) if isinstance(first, Tensor) else None
            if dtype is None:
                return op(*args, **kwargs)
            operands = [each.dtype for each in (*args, *kwargs.values()) if may_be_cast(each)]
            wanted = operands_dtype(cast_to, dtype, operands)
            if wanted is not None:
                args = tuple([_cast(each, wanted) for each in args])
                kwargs = {name: each if name in NEVER_CAST else _cast(each, wanted) for name, each in kwargs.items()}
            elif cast_to is CastTo.LOWER_INSIDE and may_be_cast(args[0] if args else kwargs.get("input")):
                kwargs["compute_dtype"] = kwargs.get("compute_dtype") or dtype
            with autocast_off(first):
                return op(*args, **kwargs)

        return call_with_casts

    return decorator


def cast_for(name: str, operand: Operand) -> Operand:
    """Cast an operand as op `name` would, before the operand is resharded for the op.

    Called by `weft.models.parallel`. The collective then moves the operand, and in backward the operand's gradient,
    in the dtype of autocast.
    """
    dtype = autocast_dtype(operand)
    wanted = None if dtype is None else operands_dtype(CASTS[name], dtype, [operand.dtype])
    cast: Operand = operand if wanted is None else _cast(operand, wanted)
    return cast


@contextmanager
def sharing_casts() -> Iterator[None]:
    """Inside, in this thread, each parameter is cast once for all calls, and all graphs save the same cast.

    For several forward passes before their backward passes, such as a pipeline's microbatches. Without this context,
    each graph would save a cast of its own. Parameters must not change inside.
    """
    token = _shared_casts.set({})
    try:
        yield
    finally:
        _shared_casts.reset(token)


def _cast(operand: Any, dtype: torch.dtype) -> Any:
    """The operand in `dtype`, differentiably; the operand itself where `may_be_cast` is False."""
    if not may_be_cast(operand) or operand.dtype == dtype:
        return operand
    shared = None if is_compiling() else _shared_casts.get()
    if shared is not None and operand.is_leaf and operand.requires_grad:
        key = id(operand), dtype
        if key not in shared:
            local = operand.to_local() if isinstance(operand, DTensor) else operand
            shared[key] = operand, local.detach().to(dtype)
        return Cast.apply(operand, dtype, shared[key][1])  # type: ignore[no-untyped-call]
    if not isinstance(operand, DTensor):
        return operand.to(dtype)
    return _cast_in_graph(operand, dtype) if is_compiling() else Cast.apply(operand, dtype)  # type: ignore[no-untyped-call]


class Cast(torch.autograd.Function):
    """Cast a tensor to another dtype, a DTensor in the same layout. Backward casts the gradient back, in any layout.

    Applied by `_cast` to a DTensor, and inside `sharing_casts` to a parameter.
    cast: the local result, if already computed (`sharing_casts`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, cast: Tensor | None = None) -> Tensor:
        ctx.dtype = x.dtype
        local = x.to_local() if isinstance(x, DTensor) else x
        cast = local.to(dtype) if cast is None else cast.view_as(cast)
        return wrap(cast, layout_of(x), x.shape) if isinstance(x, DTensor) else cast

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Cast.apply(grad, ctx.dtype), None, None  # type: ignore[no-untyped-call]


@in_graph  # while Dynamo traces, a call is a single node of the graph
def _cast_in_graph(x: DTensor, dtype: torch.dtype) -> Any:
    """`Cast`, called while Dynamo traces."""
    return Cast.apply(x, dtype)  # type: ignore[no-untyped-call]
