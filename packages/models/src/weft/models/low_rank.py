"""What a low-rank adapter computes, beside the layer that it adapts."""

from __future__ import annotations

from torch import Tensor, nn
from weft import kernels
from weft.kernels.autocast import is_autocasting


class LowRank(nn.Module):
    """What a low-rank adapter adds to a linear layer's output: alpha / rank * (input @ A.T) @ B.T (Hu et al. 2022).

    It is beside the layer, as its `lora`, and lies as the layer's weight does: B as its outputs, A as its inputs. So on a mesh
    its output has the layout of the layer's, Partial where that is, and both are reduced at once. Where A and B are wider than
    the layer, as float32 beside bfloat16, the input is cast to their dtype, and the sum back to the layer's, as peft does.
    """

    def __init__(self, a: Tensor, b: Tensor, alpha: float) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        self.scale = alpha / a.shape[0]

    def forward(self, input: Tensor, output: Tensor) -> Tensor:
        """input [..., in_features], output [..., out_features] of the layer -> that with the adapter's added to it"""
        added = kernels.linear(kernels.linear(_cast(input, self.A), self.A), self.B)
        return _cast(kernels.add(_cast(output, added), added, alpha=self.scale), output)

    def extra_repr(self) -> str:
        return f"rank={self.A.shape[0]}, scale={self.scale:g}"


def _cast(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of another tensor; as it is under autocast, which casts by itself."""
    return x if x.dtype == like.dtype or is_autocasting() else x.to(like.dtype)
