"""The version of each Weft package, read from the installed metadata only when asked for.

Reading the metadata takes longer than importing `weft.mesh`.
"""

from __future__ import annotations

from collections.abc import Callable


def version_of(module: str) -> Callable[[str], str]:
    """The `__getattr__` of a package: returns `__version__`, and raises AttributeError for any other name.

    module: the package's import name, as "weft.mesh".
    """

    def attribute(name: str) -> str:
        if name != "__version__":
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from importlib.metadata import version

        return version(module.replace(".", "-"))

    return attribute
