"""Checks of an op's arguments by kind: ints, numbers, flags, choices and tensors, also of numpy and torch.compile.

An op checks its arguments in each call, so a right argument passes by a comparison of types.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_or_true
from torch.nn import Parameter

MOST = sys.float_info.max  # the largest finite number
PLAIN = frozenset((Tensor, Parameter))  # types without a subclass's own behaviour


def is_int(x: object) -> TypeGuard[int]:
    """Whether x is an int. False for a bool, and for a tensor, which may be on a device."""
    return type(x) is int or (isinstance(x, Integral | torch.SymInt) and not isinstance(x, bool))


def is_number(x: object) -> TypeGuard[float]:
    """Whether x is an int or a float. False for a bool, and for a tensor, which would get no gradient."""
    return type(x) in (float, int) or (isinstance(x, Real | torch.SymInt | torch.SymFloat) and not isinstance(x, bool))


def is_flag(x: object) -> TypeGuard[bool]:
    """Whether x is a bool, also of numpy. False for whatever else Python takes as true or false, as "no"."""
    return x is True or x is False or (type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_"))


def is_choice(x: object, choices: Sequence[str]) -> TypeGuard[str]:
    """Whether x is one of the names."""
    return isinstance(x, str) and x in choices


def holds_ints(x: Tensor) -> bool:
    """Whether x holds ints. False for a tensor of bools, which is a mask."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_tensors(op: str, names: tuple[str, ...], *operands: object, optional: int = 0) -> None:
    """Raise ValueError for an operand that is no tensor. op: the op's name. names: of the operands, for the message.

    optional: how many of the last operands may be None.
    """
    for at, each in enumerate(operands):
        if type(each) in PLAIN or (each is None and at >= len(operands) - optional) or isinstance(each, Tensor):
            continue
        raise no_tensor(op, names[at], each)


def no_tensor(op: str, name: str, x: object) -> ValueError:
    """The error for an operand `name` which is no tensor."""
    return ValueError(f"{op} takes {name} as a tensor, got {described(x)}; give torch.tensor({name})")


def check_number(op: str, name: str, x: object, least: float = -MOST, most: float = MOST) -> None:
    """Raise ValueError unless the option `name` is a finite number, from `least` to `most`."""
    # `is True`, because Dynamo must not guard on a symbol whose value is not known while tracing.
    if type(x) is float and (x >= least) is True and (x <= most) is True:
        return
    if not (_is_number_of_graph(x, least, most) if is_dynamo_compiling() else is_number(x) and least <= x <= most):
        wanted = f"a number from {least} to {most}"
        if most == MOST:
            wanted = "a finite number" if least == -MOST else f"a finite number, {least} or more"
        raise ValueError(f"{op}: {name} is {described(x)}; give {wanted}")


def _is_number_of_graph(x: object, least: float, most: float) -> bool:
    """While Dynamo traces: whether x is a number in the range, or one whose value is not known yet.

    Dynamo has numpy's scalars as arrays.
    """
    if type(x).__module__ == "numpy":
        return True
    return is_number(x) and guard_or_true(x >= least) and guard_or_true(x <= most)


def check_flag(op: str, name: str, x: object) -> None:
    """Raise ValueError unless the option `name` is True or False."""
    if x is not True and x is not False and not is_flag(x):
        raise ValueError(f"{op}: {name} is {described(x)}; give True or False")


def check_choice(op: str, name: str, x: object, choices: Sequence[str], or_none: bool = False) -> None:
    """Raise ValueError unless the option `name` is one of the choices. or_none: whether None is taken, too."""
    if not ((type(x) is str and x in choices) or is_choice(x, choices) or (or_none and x is None)):
        listed = ", ".join(map(repr, choices)) + (", or None" if or_none else "")
        raise ValueError(f"{op}: {name} is {described(x)}; give one of {listed}")


def described(x: object) -> str:
    """An argument for a message, in a line. A tensor is not read, since it may be on a device."""
    return f"a {type(x).__name__}" if isinstance(x, Tensor) else repr(x).partition("\n")[0][:200]
