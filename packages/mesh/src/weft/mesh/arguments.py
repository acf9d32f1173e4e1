"""Ints, numbers, shapes and axis names as callers pass them, checked and converted to plain Python values.

Callers may pass numpy ints, a `torch.Size` or members of enums.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeGuard


def as_int(name: str, value: Any) -> int:
    """`value` as a plain Python int.

    name: what the error calls the value, as "a rank".
    Raises ValueError for anything but a whole number, bools included.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(operator.index(value))
    except TypeError:
        raise ValueError(f"{name} is {value!r}, which is not an int") from None


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float, also of numpy. False for a bool, and for a tensor."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """The sizes of a tensor's dims as plain ints.

    Raises ValueError for anything but a sequence of ints >= 0.
    """
    try:
        sizes = tuple(shape)
    except TypeError:
        raise ValueError(f"shape {shape!r} is not a sequence of sizes; give a tuple, (6,) for one dim") from None
    if not all(type(size) is int for size in sizes):
        sizes = tuple(as_int(f"a size in shape {sizes}", size) for size in sizes)
    if sizes and min(sizes) < 0:
        raise ValueError(f"shape {sizes} has a size below 0; a size is an int >= 0")
    return sizes


def as_name(name: Any) -> str:
    """An axis name as a plain str.

    Raises ValueError for anything but an identifier, and for `first_rank`, which is an argument of `ProcessMesh.grid`.
    """
    if not isinstance(name, str) or not name.isidentifier() or name == "first_rank":
        raise ValueError(
            f"axis name {name!r} is not an identifier, or is an argument of ProcessMesh.grid; "
            f"name axes like 'dp' or 'tp'"
        )
    return str.__str__(name)  # the plain str behind a member of a str enum
