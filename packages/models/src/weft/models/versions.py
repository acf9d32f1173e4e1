"""Versions of Python, torch and the packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("weft-mesh", "weft-reshard", "weft-kernels", "weft-models", "triton")


def versions() -> dict[str, str | None]:
    """Name -> version, of Python, torch ("2.13.0+cpu") and the packages; None for a missing package."""
    import torch  # takes seconds; importing it here keeps errors about a command's options fast

    own = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return own | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
