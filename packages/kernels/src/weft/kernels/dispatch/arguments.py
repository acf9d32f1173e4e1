"""Kinds of an op's arguments: ints, numbers and tensors, also as numpy and torch.compile have them."""

from __future__ import annotations

from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor


def is_int(x: object) -> TypeGuard[int]:
    """Whether x is an int. False for a bool, and for a tensor, which may be on a device."""
    return type(x) is int or (isinstance(x, Integral | torch.SymInt) and not isinstance(x, bool))


def is_number(x: object) -> TypeGuard[float]:
    """Whether x is an int or a float. False for a bool, and for a tensor, which would get no gradient."""
    return type(x) in (float, int) or (isinstance(x, Real | torch.SymInt | torch.SymFloat) and not isinstance(x, bool))


def holds_ints(x: Tensor) -> bool:
    """Whether x holds ints. False for a tensor of bools, which is a mask."""
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_tensors(op: str, **operands: object) -> None:
    """Raise ValueError for an operand that is no tensor. op: the op's name. operands: by their names."""
    for name, each in operands.items():
        if not isinstance(each, Tensor):
            raise ValueError(f"{op} takes {name} as a tensor, got {described(each)}; give torch.tensor({name})")


def described(x: object) -> str:
    """An argument for a message, in a line. A tensor is not read, since it may be on a device."""
    return f"a {type(x).__name__}" if isinstance(x, Tensor) else repr(x).partition("\n")[0][:200]
