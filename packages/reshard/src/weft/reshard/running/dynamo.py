"""Functions that Dynamo takes as one node. Dynamo, and Triton with it, is imported when DTensors are first used, and not before."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

Function = TypeVar("Function", bound=Callable[..., Any])

if hasattr(torch.compiler, "_compile_session_context"):  # torch 2.13, where it is True for all of a torch.compile
    is_compiling = torch.compiler.is_compiling
else:

    def is_compiling() -> bool:
        """Whether what runs is traced: by Dynamo, of which torch tells, or by what traces its graph, of which it did not yet."""
        return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def guard_shapes() -> None:
    """Where Dynamo traces a function: other whole shapes of the DTensors that it was given are compiled anew, on every rank.

    Dynamo itself (torch 2.13) looks at a DTensor's local sizes alone, which may be the same on one rank where the whole shape is
    another: that rank would take the old graph, with the old whole shape, while others compile. A plan is made for a whole shape.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource

    guarded: set[Any] = vars(context).setdefault("_weft_guarded", set())
    for tensor, how in context.tensor_to_context.items():  # type: ignore[no-untyped-call]
        if isinstance(tensor, DTensor) and how.tensor_source not in guarded:
            guarded.add(how.tensor_source)
            guard = AttrSource(how.tensor_source, "shape").make_guard(GuardBuilder.EQUALS_MATCH)
            context.guards_context.dynamo_guards.add(guard)


def _as_numbers(given: Any) -> Any:
    """Numbers that Dynamo takes for symbols, since they were others before, as the numbers that they are now; each is guarded so."""
    if isinstance(given, tuple):
        return tuple([_as_numbers(each) for each in given])
    return int(given) if isinstance(given, torch.SymInt) else given


_waiting: list[Callable[..., Any]] = []


def in_graph(function: Function) -> Function:
    """A decorator: where Dynamo traces, a call is a node of its graph, which what traces that graph sees through.

    Dynamo itself knows no layouts, and would have to know the layout of each gradient before there is one. The function is
    given tensors, numbers, text and tuples of them. Its graph is for the whole shapes that it was traced with: see `guard_shapes`.
    """

    @wraps(function)
    def node(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            return function(*args, **kwargs)
        guard_shapes()
        return function(*_as_numbers(args), **{name: _as_numbers(each) for name, each in kwargs.items()})

    _waiting.append(node)
    if "torch._dynamo" in sys.modules:
        allow()
    return cast(Function, node)


def allow() -> None:
    """Tells Dynamo of the functions that it was not told of yet."""
    while _waiting:
        torch.compiler.allow_in_graph(_waiting.pop())  # type: ignore[no-untyped-call]  # torch has no types for it
