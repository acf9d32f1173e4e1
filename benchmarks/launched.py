"""The cost of the kernels which a call launches, as compiled by Triton in this process for the call's sizes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

COST = ("registers", "spill_bytes", "shared_bytes")  # per thread, per thread, per program


def cost(way: Callable[[], object]) -> dict[str, float | str]:
    """The largest figures of COST among Weft's kernels launched by a call of the way, and the kernels' "configuration".

    The figures are read from private caches of Triton 3.6 and 3.7. If these are different in the installed Triton, the
    figures are absent and "configuration" has the reason.
    """
    try:
        kernels = _launched(way)
        figures = [_figures(kernel) for _, kernel in kernels]
        told = "; ".join(sorted({f"{name}: {_configuration(kernel)}" for name, kernel in kernels}))
    except (AttributeError, LookupError, TypeError) as error:
        return {"configuration": f"not read from this triton: {type(error).__name__}: {error}"}
    most: dict[str, float | str] = {name: max(each[name] for each in figures) for name in COST if figures}
    return most | {"configuration": told or "no kernel of Weft's"}


def functions() -> Iterator[Any]:
    """Yields the Triton functions of Weft's imported modules."""
    import triton

    for name, module in list(sys.modules.items()):
        if name.startswith("weft.kernels.") and name.endswith(".kernel"):
            yield from (each for each in vars(module).values() if isinstance(each, triton.JITFunction))


def _launched(way: Callable[[], object]) -> list[tuple[str, Any]]:
    """The names and compiled kernels of a call.

    Triton's caches in memory are empty during the call, so that only launched kernels are in the caches afterwards.
    Triton then loads the kernels from its cache on disk.
    """
    kept = [(function, function.device_caches) for function in functions()]
    try:
        for function, _ in kept:
            function.device_caches = defaultdict(function.create_binder)
        way()
        return [
            (function.__name__, kernel)
            for function, _ in kept
            for caches in function.device_caches.values()
            for kernel in caches[0].values()
        ]
    finally:
        for function, caches in kept:
            function.device_caches = caches


def _figures(kernel: Any) -> dict[str, int]:
    spilled = 4 * kernel.n_spills  # triton counts words
    return dict(zip(COST, (kernel.n_regs, spilled, kernel.metadata.shared), strict=True))


def _configuration(kernel: Any) -> str:
    """The kernel's block sizes and number of warps, as text."""
    names = kernel.src.fn.arg_names
    constants = {names[place[0]]: value for place, value in kernel.src.constants.items()}
    blocks = [f"{name} {value}" for name, value in constants.items() if name.startswith("BLOCK")]
    return ", ".join([*blocks, f"{kernel.metadata.num_warps} warps"])
