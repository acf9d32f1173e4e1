"""The module of a low-rank adapter, beside the linear layer."""

from __future__ import annotations

from torch import Tensor, nn
from weft import kernels
from weft.kernels.autocast import is_autocasting


class LowRank(nn.Module):
    """A low-rank addend to a linear layer's output: alpha / rank * (input @ A.T) @ B.T (Hu et al. 2022).

    The layer holds the adapter as `lora`. B is laid out as the outputs of the layer's weight are, A as the inputs. On a mesh the
    addend therefore has the layout of the layer's output, Partial included, and both are reduced at once. Where A and B have a
    wider dtype than the layer, as float32 beside bfloat16, the input is cast to the wider dtype, and the sum back, as in peft.
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
