"""`in_graph`: functions that stay a single node in Dynamo's graph. `between_graphs`: functions that stay outside.

Dynamo cannot trace layouts, which are Python values. Therefore functions on DTensors are decorated with `in_graph`.
Dynamo and Triton are slow to import, and are imported when DTensors are first used (`allow`), not before. Where a
program imports Dynamo earlier, as by torch.compile, Dynamo hears of these functions then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

Function = TypeVar("Function", bound=Callable[..., Any])

if hasattr(torch.compiler, "_compile_session_context"):  # torch 2.13: True during all of torch.compile
    is_compiling = torch.compiler.is_compiling
else:

    def is_compiling() -> bool:
        """Whether Dynamo or AOTAutograd traces the running code; torch.compiler before 2.13 tells of Dynamo alone."""
        return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def guard_shapes() -> None:
    """While Dynamo traces: makes the graph valid only for the global shapes of the traced DTensors, on every rank.

    Dynamo itself (torch 2.13) guards a DTensor's local sizes alone. A new global shape may leave a rank's local size
    unchanged: this rank would run the old graph, with the old global shape, while other ranks compile. A plan holds for
    a single global shape.
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


def _as_concrete(value: Any) -> Any:
    """Replaces symbolic sizes by their values, each with a guard. Dynamo makes a size symbolic once it has changed."""
    if isinstance(value, tuple):
        return tuple([_as_concrete(each) for each in value])
    return int(value) if isinstance(value, torch.SymInt) else value


_unregistered: list[Callable[[], Any]] = []  # each tells Dynamo of a function; not called yet


def in_graph(function: Function) -> Function:
    """Decorator: while Dynamo traces, a call is a single node of the graph, into which AOTAutograd traces later.

    Dynamo knows no layouts, and would have to know each gradient's layout before the gradient exists. The function
    takes tensors, numbers, strings and tuples of these. The graph holds for the traced global shapes; see
    `guard_shapes`.
    """

    @wraps(function)
    def node(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            return function(*args, **kwargs)
        guard_shapes()
        return function(*_as_concrete(args), **{name: _as_concrete(each) for name, each in kwargs.items()})

    _register(lambda: torch.compiler.allow_in_graph(node))  # type: ignore[no-untyped-call]  # torch has no types for it
    return cast(Function, node)


def between_graphs(reason: str) -> Callable[[Function], Function]:
    """Decorator: compiled code calls the function uncompiled, after one graph and before the next.

    For functions that communicate by counts or Python objects of the batch, which differ from step to step.
    reason: why, and the remedy; part of torch's error for compiled code with fullgraph=True.
    """

    def decorate(function: Function) -> Function:
        called: list[Callable[..., Any]] = [function]

        @wraps(function)
        def uncompiled(*args: Any, **kwargs: Any) -> Any:
            return called[0](*args, **kwargs)

        def register() -> None:
            called[0] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]

        _register(register)
        return cast(Function, uncompiled)

    return decorate


def _register(tell: Callable[[], Any]) -> None:
    """Calls `tell`, which tells Dynamo of a function, as soon as Dynamo is imported."""
    _unregistered.append(tell)
    if "torch._dynamo" in sys.modules:
        allow()


def allow() -> None:
    """Tells Dynamo of new functions of `in_graph` and `between_graphs`. Called when DTensors are first used, and when
    Dynamo is imported.
    """
    while _unregistered:
        _unregistered.pop()()


class _ImportOfDynamo(MetaPathFinder):
    """Calls `allow` at the end of the import of Dynamo. Finds no module itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute: Callable[[ModuleType], None] = spec.loader.exec_module

        def execute_and_allow(module: ModuleType) -> None:
            execute(module)
            allow()

        spec.loader.exec_module = execute_and_allow  # type: ignore[method-assign]
        return spec


if "torch._dynamo" not in sys.modules:
    sys.meta_path.insert(0, _ImportOfDynamo())
