"""Which layout an operation gives when it is computed on local parts, and which layouts it needs for that.

A rule refuses what would be wrong: it raises a LayoutError that names the nearest layouts that would do, which it also
holds as `nearest`. Nothing here communicates, or looks at a tensor.
"""

from .gradients import gradient
from .pointwise import elementwise, whole
from .products import einsum
from .reductions import reduction
from .selections import concat, embedding, gather, split
from .views import reshape, transpose

__all__ = [
    "concat",
    "einsum",
    "elementwise",
    "embedding",
    "gather",
    "gradient",
    "reduction",
    "reshape",
    "split",
    "transpose",
    "whole",
]
