"""`observing`: sees every call of the functions of Weft's ops, as tools do that price or count a program's work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from .op import OPS, Op

Part = Literal["forward", "backward", "inference", "epilogue_backward", "recompute"]
PARTS: tuple[Part, ...] = ("forward", "backward", "inference", "epilogue_backward", "recompute")
# Called as listener(op, part, function, *arguments, **options), the arguments as documented at the fields of `Op`.
# Calls the function and returns its result.
Listener = Callable[..., Any]


@contextmanager
def observing(listener: Listener) -> Iterator[None]:
    """Inside, in this process, the listener is called in place of each function of each op.

    Tensors are local: an op on DTensors has unwrapped them. Calls nest where an op's function calls another op.
    Contexts must not be nested, nor run in several threads. Ops that are declared inside are not observed.
    """
    functions: dict[Op, dict[Part, Any]] = {op: {part: getattr(op, part) for part in PARTS} for op in OPS.values()}
    try:
        for op, parts in functions.items():
            for part, function in parts.items():
                if function is not None:
                    object.__setattr__(op, part, partial(listener, op, part, function))
        yield
    finally:
        for op, parts in functions.items():
            for part, function in parts.items():
                object.__setattr__(op, part, function)
