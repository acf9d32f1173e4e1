"""Names for the other Weft packages and for extensions: the packages import nothing else from inside `weft.mesh`.

Boxes of elements, pictures, checked arguments, layouts rewritten between meshes, and the engine of layout rules.
A release may rename them; the changelog says how.
"""

from .arguments import as_int, as_shape, is_number
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
    "as_int",
    "as_mesh",
    "as_shape",
    "axes_of",
    "chunk",
    "coarsened",
    "coloured",
    "draw",
    "is_number",
    "largest_part",
    "overlap",
    "parts_of_axes",
    "refined",
    "terms",
    "version_of",
    "volume",
]
