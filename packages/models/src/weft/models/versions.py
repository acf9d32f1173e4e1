"""The versions of what runs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("weft-mesh", "weft-reshard", "weft-kernels", "weft-models", "torch", "triton")


def versions() -> dict[str, str | None]:
    """Python's version, and those of the packages; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
