"""Ints, shapes and names as callers write them, made plain: numpy's ints, torch's sizes, members of enums."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def as_int(what: str, value: Any) -> int:
    """`value` as an int of Python's own. ValueError for what is no whole number; True and False are none either."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return int(operator.index(value))
    except TypeError:
        raise ValueError(f"{what} is {value!r}, which is no int") from None


def as_shape(shape: Iterable[Any]) -> tuple[int, ...]:
    """The sizes of a tensor's dims. ValueError for one that is no int >= 0."""
    try:
        sizes = tuple(shape)
    except TypeError:
        raise ValueError(f"shape {shape!r} is no sequence of sizes; give a tuple, (6,) for one dim") from None
    if not all(type(size) is int for size in sizes):
        sizes = tuple(as_int(f"a size in shape {sizes}", size) for size in sizes)
    if sizes and min(sizes) < 0:
        raise ValueError(f"shape {sizes} has a size below 0; a size is an int >= 0")
    return sizes


def as_name(name: Any) -> str:
    """The name of an axis. ValueError for what is no identifier."""
    if not isinstance(name, str) or not name.isidentifier() or name == "first_rank":
        raise ValueError(
            f"axis name {name!r} is not an identifier, or is an argument of ProcessMesh.grid; name axes like 'dp' or 'tp'"
        )
    return str.__str__(name)  # a member of an enum prints otherwise
