"""The version of each package of Weft, read from what is installed when it is asked for: reading takes longer than importing."""

from __future__ import annotations

from collections.abc import Callable


def version_of(module: str) -> Callable[[str], str]:
    """The `__getattr__` of a package, as "weft.mesh": its `__version__`, and AttributeError for another name."""

    def attribute(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version(module.replace(".", "-"))

    return attribute
