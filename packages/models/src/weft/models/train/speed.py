"""What a step computes, beside what the chip can."""

from __future__ import annotations

import torch

from ..config import ModelConfig

# Dense products of bfloat16, in FLOP/s, by what the device's name has in it; the first that fits counts. From the makers' data sheets.
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
    """Floating-point operations of a training step for each token of sequences of T.

    6 for each weight that multiplies, and 12 T for each feature of a layer's attention, which a causal mask does not lower: so
    counts Chowdhery et al., "PaLM" (2022), appendix B, whose share of the peak everyone compares.
    multiplying: the number of these weights, where the config does not know it.
    """
    weights = model.num_parameters - model.num_looked_up if multiplying is None else multiplying
    return 6 * weights + 12 * model.num_layers * model.attention_width * T


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """The most FLOP/s of products on this device; None where it is not known: for other chips, and above 16 bits."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _BF16_PEAKS if part in name), None)
