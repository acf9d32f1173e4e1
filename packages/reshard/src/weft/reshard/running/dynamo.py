"""Functions that Dynamo takes as one node. Dynamo, and Triton with it, is imported when DTensors are first used, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext

Function = TypeVar("Function", bound=Callable[..., Any])

# Since torch 2.13 `torch.compiler.is_compiling` is True for all of a call of torch.compile; before it is where Dynamo itself traces.
_TOLD_OF_ALL = hasattr(torch.compiler, "_compile_session_context")

_waiting: list[Callable[..., Any]] = []


def is_compiling() -> bool:
    """Whether what runs is traced, by Dynamo or by what traces its graph."""
    return torch.compiler.is_compiling() or not (_TOLD_OF_ALL or TracingContext.try_get() is None)


def in_graph(function: Function) -> Function:
    """A decorator: where Dynamo traces, a call is a node of its graph, which what traces that graph sees through.

    Dynamo itself knows no layouts, and would have to know the layout of each gradient before there is one. The function is
    given tensors, numbers, text and tuples of them.
    """
    _waiting.append(function)
    if "torch._dynamo" in sys.modules:
        allow()
    return function


def allow() -> None:
    """Tells Dynamo of the functions that it was not told of yet."""
    while _waiting:
        torch.compiler.allow_in_graph(_waiting.pop())  # type: ignore[no-untyped-call]  # torch has no types for it
