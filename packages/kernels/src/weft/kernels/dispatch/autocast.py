"""The dtype of each op under `torch.autocast`, after torch's own lists of ops."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from functools import reduce

import torch
from torch import Tensor, is_autocast_enabled

DEVICES = ("cpu", "cuda")


class CastTo(Enum):
    """The dtype to which `torch.autocast` casts an op's floating operands. float64 operands are never cast."""

    LOWER = "the dtype of autocast"
    FLOAT32 = "float32"
    WIDEST = "the widest dtype of the operands"
    UNCHANGED = "the dtype of each operand, unchanged"
    LOWER_INSIDE = "autocast's dtype, passed as compute_dtype: the op casts operands and sums their gradients itself"


# By name of the op.
CASTS = {
    "add": CastTo.WIDEST,
    "add_layer_norm": CastTo.FLOAT32,
    "add_rms_norm": CastTo.FLOAT32,
    "all_gather_matmul": CastTo.LOWER,
    "attention": CastTo.LOWER,
    "combine": CastTo.UNCHANGED,  # sums in float32
    "cross_entropy": CastTo.UNCHANGED,  # computes and returns float32 for any logits
    "dispatch": CastTo.UNCHANGED,
    "dropout": CastTo.UNCHANGED,
    "embedding": CastTo.UNCHANGED,
    "experts": CastTo.LOWER,
    "geglu": CastTo.WIDEST,
    "gelu": CastTo.UNCHANGED,
    "grouped_matmul": CastTo.LOWER,
    "layer_norm": CastTo.FLOAT32,
    "linear": CastTo.LOWER,
    "linear_cross_entropy": CastTo.LOWER_INSIDE,
    "matmul": CastTo.LOWER,
    "matmul_reduce_scatter": CastTo.LOWER,
    "qkv_linear": CastTo.LOWER,
    "rms_norm": CastTo.FLOAT32,
    "rms_norm_rope": CastTo.FLOAT32,
    "rope": CastTo.UNCHANGED,  # computes in float32
    "route": CastTo.UNCHANGED,  # computes and returns float32 for any scores
    "router_statistics": CastTo.UNCHANGED,  # as route
    "sigmoid_gate": CastTo.WIDEST,
    "swiglu": CastTo.WIDEST,
    "swiglu_linear": CastTo.LOWER,
}


def is_autocasting() -> bool:
    """Whether autocast is enabled on any device. Asked in every call, before the slower `autocast_dtype`."""
    return is_autocast_enabled("cpu") or is_autocast_enabled("cuda")


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype of the autocast enabled on the tensor's device; None if none is enabled."""
    device = _device(tensor)
    enabled = device in DEVICES and is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def autocast_off(tensor: Tensor) -> AbstractContextManager[None]:
    """Context without autocast on the tensor's device, entered once an op's operands are cast."""
    return torch.autocast(_device(tensor), enabled=False)


def _device(tensor: Tensor) -> str:
    """The tensor's device type. A meta tensor has none: the first device with autocast enabled, if any, stands in."""
    device = tensor.device.type
    return next(filter(is_autocast_enabled, DEVICES), device) if device == "meta" else device


def operands_dtype(cast_to: CastTo, dtype: torch.dtype, operands: list[torch.dtype]) -> torch.dtype | None:
    """The dtype to which autocast casts an op's operands; None to leave all operands unchanged.

    cast_to: of the op. dtype: of autocast.
    operands: the dtypes of the operands for which `may_be_cast` is True. If any has 8 bits, nothing is cast: the caller
        chose float8 factors, and the factors' scales are float32.
    """
    if any(each.itemsize == 1 for each in operands):
        return None
    match cast_to:
        case CastTo.LOWER:
            return dtype
        case CastTo.FLOAT32:
            return torch.float32
        case CastTo.WIDEST:
            return reduce(torch.promote_types, operands) if operands else None
        case CastTo.UNCHANGED | CastTo.LOWER_INSIDE:
            return None


def may_be_cast(operand: object) -> bool:
    """Whether autocast casts an operand: any floating tensor, except float64."""
    return isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
