"""Kernel launches as torch ops: tracing, recomputation and dispatch modes see a single op for each launch.

On tensors without data (meta and fake tensors) nothing is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from ..dispatch.backend import is_compiling

LIBRARY = library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it


def launched(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a function which launches kernels writing into given tensors. Returns a torch op, `weft::<name>`.

    schema: as for torch.library, without namespace and return value; the tensors written are `Tensor(a!)`.

    The caller allocates the written tensors with torch's own ops: the launch needs no shape rule. With
    `torch.library.custom_op` each call would cost the host several times as much.
    """
    name = schema.partition("(")[0]

    def decorator(launch: Callable[..., None]) -> Callable[..., None]:
        LIBRARY.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
        LIBRARY.impl(name, launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        library.register_fake(f"weft::{name}", _do_nothing, lib=LIBRARY)
        op: Callable[..., None] = getattr(torch.ops.weft, name).default
        return op

    return decorator


def communicating(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`launched` for a function which communicates: calls go to the torch op while tracing, else to the function.

    Within a torch op, collectives would be hidden from dispatch modes, such as a counter of collectives.
    """

    def decorator(run: Callable[..., None]) -> Callable[..., None]:
        op = launched(schema)(run)

        def run_or_trace(*arguments: Any) -> None:
            (op if is_compiling() else run)(*arguments)

        return run_or_trace

    return decorator


def _do_nothing(*arguments: Any, **options: Any) -> None:
    """The op on tensors without data. No shape is inferred: the caller has allocated the tensors to write."""
