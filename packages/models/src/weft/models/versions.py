"""The versions of what runs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("weft-mesh", "weft-reshard", "weft-kernels", "weft-models", "triton")


def versions() -> dict[str, str | None]:
    """Python's version, torch's as it names itself ("2.13.0+cpu"), and those of the packages; None for one that is not installed."""
    import torch  # which takes seconds: not where a command's options are wrong

    own = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return own | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
