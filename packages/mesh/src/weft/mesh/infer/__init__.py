"""Layout inference: from the operands' layouts to the output's, for operations computed by each rank on its own shards.

A rule refuses operands whose local results would be wrong. The LayoutError gives the nearest layouts accepted by the
rule, in the message and as `nearest`. Rules do not communicate and see no tensors.
"""

from .arithmetic import einsum, elementwise, reduction, whole
from .gradients import gradient
from .rearrangement import concat, embedding, gather, reshape, split, transpose

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
