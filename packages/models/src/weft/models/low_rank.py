"""The module of a LoRA adapter, attached to a linear layer."""

from __future__ import annotations

from torch import Tensor, nn
from weft import kernels
from weft.kernels.extension import is_autocasting


class LowRank(nn.Module):
    """A LoRA adapter: adds alpha / rank * (input @ A.T) @ B.T to a linear layer's output (Hu et al. 2022).

    The layer holds the adapter as its submodule `lora`. On a mesh, B is sharded like the outputs of the layer's
    weight and A like the inputs. The product then has the layout of the layer's output, Partial included, and both
    are reduced together. If A and B have a wider dtype than the layer, for example float32 beside bfloat16, the input
    is cast to the wider dtype and the sum is cast back, as in peft.
    """

    def __init__(self, a: Tensor, b: Tensor, alpha: float) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)
        self.scale = alpha / a.shape[0]

    def forward(self, input: Tensor, output: Tensor) -> Tensor:
        """input [..., in_features], the layer's output [..., out_features] -> the output plus the adapter's product."""
        added = kernels.linear(kernels.linear(_cast(input, self.A), self.A), self.B)
        return _cast(kernels.add(_cast(output, added), added, alpha=self.scale), output)

    def extra_repr(self) -> str:
        return f"rank={self.A.shape[0]}, scale={self.scale:g}"


def _cast(x: Tensor, like: Tensor) -> Tensor:
    """Casts x to the dtype of `like`; leaves x unchanged under autocast, which casts by itself."""
    return x if x.dtype == like.dtype or is_autocasting() else x.to(like.dtype)
