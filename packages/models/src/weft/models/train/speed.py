"""Floating-point operations of a training step, and the peak of the chip, for the metrics tflops and mfu."""

from __future__ import annotations

import torch

from ..config import ModelConfig

# Peak FLOP/s of dense bfloat16 matrix products, by a part of the device's name; the first match counts. From the
# makers' data sheets.
_BF16_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
    ("MI325X", 1307e12),
)


def flops_per_token(model: ModelConfig, T: int, *, multiplying: int | None = None) -> int:
    """Floating-point operations of a training step per token, in sequences of T tokens.

    6 for each weight in a matrix product, plus 12 T for each feature of a layer's attention. A causal mask does not
    lower the count: Chowdhery et al., "PaLM" (2022), appendix B, which published shares of the peak follow.
    multiplying: the number of weights in matrix products; None takes the config's number.
    """
    weights = model.num_parameters - model.num_looked_up if multiplying is None else multiplying
    return 6 * weights + 12 * model.num_layers * model.attention_width * T


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of matrix products on this device; None for chips not in the table, and for float32."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)
