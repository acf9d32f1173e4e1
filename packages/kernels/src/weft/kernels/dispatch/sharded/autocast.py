"""`torch.autocast` for ops on plain tensors and DTensors: operands are cast by `RUNS`; inside an op autocast is off."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of
from weft.reshard.extension import in_graph, wrap

from ..autocast import RUNS, Runs, autocast_dtype, autocast_off, is_autocasting, may_be_cast, operands_dtype
from ..backend import is_compiling

# Arguments never cast: the op writes into the caller's accumulate_into; rope's tables and attention's sinks stay in
# float32.
NEVER_CAST = ("accumulate_into", "cos", "sin", "sinks")
P = ParamSpec("P")
Result = TypeVar("Result")
Operand = TypeVar("Operand", bound=Tensor)


def autocasts(name: str) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorator for the public function of op `name`: casts its operands as `torch.autocast` would.

    The device of the first tensor decides which autocast applies. A parameter is cast in every call, and its gradient
    is cast back.
    """
    runs = RUNS[name]

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
            wanted = operands_dtype(runs, dtype, operands)
            if wanted is not None:
                args = tuple([_cast(each, wanted) for each in args])
                kwargs = {name: each if name in NEVER_CAST else _cast(each, wanted) for name, each in kwargs.items()}
            elif runs is Runs.LOWER_INSIDE and may_be_cast(args[0] if args else kwargs.get("input")):
                kwargs["compute_dtype"] = kwargs.get("compute_dtype") or dtype
            with autocast_off(first):
                return op(*args, **kwargs)

        return call_with_casts

    return decorator


def cast_for(name: str, operand: Operand) -> Operand:
    """Cast an operand as op `name` would, before the operand is resharded for the op.

    The collective then moves the operand, and in backward its gradient, in the dtype of autocast.
    """
    dtype = autocast_dtype(operand)
    wanted = None if dtype is None else operands_dtype(RUNS[name], dtype, [operand.dtype])
    cast: Operand = operand if wanted is None else _cast(operand, wanted)
    return cast


def _cast(operand: Any, dtype: torch.dtype) -> Any:
    if not may_be_cast(operand) or operand.dtype == dtype:
        return operand
    if not isinstance(operand, DTensor):
        return operand.to(dtype)
    return _cast_in_graph(operand, dtype) if is_compiling() else Cast.apply(operand, dtype)  # type: ignore[no-untyped-call]


class Cast(torch.autograd.Function):
    """Cast a DTensor to another dtype, in the same layout. The dual casts the gradient back, in any layout."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, dtype: torch.dtype) -> DTensor:
        ctx.dtype = x.dtype
        return wrap(x.to_local().to(dtype), layout_of(x), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None]:
        return Cast.apply(grad, ctx.dtype), None  # type: ignore[no-untyped-call]


@in_graph  # while Dynamo traces, a call is a single node of the graph
def _cast_in_graph(x: DTensor, dtype: torch.dtype) -> Any:
    """`Cast`, called while Dynamo traces."""
    return Cast.apply(x, dtype)  # type: ignore[no-untyped-call]
