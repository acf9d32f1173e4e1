"""Meshes, layouts, layout inference and mesh-independent random keys; needs nothing but the standard library."""

from typing import TYPE_CHECKING

from . import infer
from .layout import Layout, LayoutError
from .placement import Partial, Placement, Replicate, Shard, as_placement
from .process_mesh import ProcessMesh
from .random import derive_key
from .version import version_of

__all__ = [
    "Layout",
    "LayoutError",
    "Partial",
    "Placement",
    "ProcessMesh",
    "Replicate",
    "Shard",
    "as_placement",
    "derive_key",
    "infer",
]

__version__: str
if not TYPE_CHECKING:  # a type checker would take a module `__getattr__` to define every name
    __getattr__ = version_of(__name__)
