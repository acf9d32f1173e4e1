"""`observing`: sees every call of the functions of Weft's ops, for tools which price or count a program's work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from .op import OPS, Op

OpPart = Literal["forward", "backward", "inference", "epilogue_backward", "recompute"]
OP_PARTS: tuple[OpPart, ...] = ("forward", "backward", "inference", "epilogue_backward", "recompute")
# A listener is called as listener(op, part, function, *arguments, **options). `function` is the field `part` of the op,
# and takes the arguments and options. The listener must call the function and return the result.
Listener = Callable[..., Any]


@contextmanager
def observing(listener: Listener) -> Iterator[None]:
    """Inside, in this process, the listener is called in place of each function of each op.

    Tensors are local: an op on DTensors unwraps before the call. Calls nest where an op's function calls another op.
    Contexts must not be nested, nor run in several threads. Ops which are declared inside are not observed.
    """
    functions: dict[Op, dict[OpPart, Any]] = {op: {part: getattr(op, part) for part in OP_PARTS} for op in OPS.values()}
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
