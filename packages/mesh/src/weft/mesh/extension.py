"""Names for the other Weft packages and for extensions: the packages import nothing else from inside `weft.mesh`.

Boxes of elements, pictures, checked arguments, layouts rewritten between meshes, and the engine of layout rules.
A release may rename them; the changelog says how.
"""

from .infer import terms
from .layout import Box, chunk, largest_part, overlap, volume
from .picture import WIDTH, coloured, draw
from .process_mesh import MOST_RANKS, as_mesh
from .refinement import axes_of, coarsened, parts_of_axes, refined
from .version import version_of

__all__ = [
    "MOST_RANKS",
    "WIDTH",
    "Box",
    "as_mesh",
    "axes_of",
    "chunk",
    "coarsened",
    "coloured",
    "draw",
    "largest_part",
    "overlap",
    "parts_of_axes",
    "refined",
    "terms",
    "version_of",
    "volume",
]
