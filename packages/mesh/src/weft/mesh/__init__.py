"""Meshes, layouts, inference and mesh-independent keys; the standard library alone."""

from . import infer
from .layout import Layout, LayoutError
from .placement import Partial, Placement, Replicate, Shard, as_placement
from .process_mesh import ProcessMesh
from .random import derive_key

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
