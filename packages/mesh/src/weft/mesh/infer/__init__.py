"""Layout inference: from the operands' layouts to the output's, for operations computed by each rank on its own shards.

A rule refuses operands whose local results would be wrong. The LayoutError gives the nearest layouts accepted by the
rule, in the message and as `nearest`. Rules do not communicate and see no tensors.
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
