"""Functions that Dynamo takes as one node. Dynamo, and Triton with it, is imported when DTensors are first used, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext

Function = TypeVar("Function", bound=Callable[..., Any])

if hasattr(torch.compiler, "_compile_session_context"):  # torch 2.13, where it is True for all of a torch.compile
    is_compiling = torch.compiler.is_compiling
else:

    def is_compiling() -> bool:
        """Whether what runs is traced: by Dynamo, of which torch tells, or by what traces its graph, of which it did not yet."""
        return torch.compiler.is_compiling() or TracingContext.try_get() is not None


_waiting: list[Callable[..., Any]] = []


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
