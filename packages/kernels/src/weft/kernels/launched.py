"""Kernel launches as ops of torch: what traces, records or recomputes sees each as one op, and tensors without data launch nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from .backend import is_compiling

LIBRARY = library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it


def launched(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of a function that launches kernels, which write into tensors that it is given.

    schema: as of torch.library, without the namespace; what is written is `Tensor(a!)`, and nothing is returned. So memory is
    allocated by torch's own ops before, and there is no second rule for shapes. `torch.library.custom_op` would do the same, at
    several times the host's time for each call.
    """
    name = schema.partition("(")[0]

    def decorator(launch: Callable[..., None]) -> Callable[..., None]:
        LIBRARY.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
        LIBRARY.impl(name, launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        library.register_fake(f"weft::{name}", _nothing, lib=LIBRARY)
        op: Callable[..., None] = getattr(torch.ops.weft, name).default
        return op

    return decorator


def communicating(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `launched`, of a function that communicates: an op where it is traced alone, since what an op does is hidden from whoever
    counts collectives.
    """

    def decorator(run: Callable[..., None]) -> Callable[..., None]:
        op = launched(schema)(run)

        def run_or_trace(*arguments: Any) -> None:
            (op if is_compiling() else run)(*arguments)

        return run_or_trace

    return decorator


def _nothing(*arguments: Any, **more: Any) -> None:
    """Of tensors without data: what is written has its shape already."""
