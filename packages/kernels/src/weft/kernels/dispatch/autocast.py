"""The dtype of each op under `torch.autocast`, after torch's own lists of ops."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from functools import reduce

import torch
from torch import Tensor, is_autocast_enabled

DEVICES = ("cpu", "cuda")


class Runs(Enum):
    """How `torch.autocast` casts an op's floating operands. float64 operands are never cast."""

    LOWER = "the dtype of autocast"
    FLOAT32 = "float32"
    WIDEST = "the widest dtype of the operands"
    UNCHANGED = "the dtype of each operand, unchanged"
    LOWER_INSIDE = "autocast's dtype, passed as compute_dtype: the op casts operands and sums their gradients itself"


RUNS = {
    "add": Runs.WIDEST,
    "add_layer_norm": Runs.FLOAT32,
    "add_rms_norm": Runs.FLOAT32,
    "all_gather_matmul": Runs.LOWER,
    "attention": Runs.LOWER,
    "combine": Runs.UNCHANGED,  # sums in float32
    "cross_entropy": Runs.UNCHANGED,  # computes and returns float32 for any logits
    "dispatch": Runs.UNCHANGED,
    "dropout": Runs.UNCHANGED,
    "embedding": Runs.UNCHANGED,
    "experts": Runs.LOWER,
    "geglu": Runs.WIDEST,
    "gelu": Runs.UNCHANGED,
    "grouped_matmul": Runs.LOWER,
    "layer_norm": Runs.FLOAT32,
    "linear": Runs.LOWER,
    "linear_cross_entropy": Runs.LOWER_INSIDE,
    "matmul": Runs.LOWER,
    "matmul_reduce_scatter": Runs.LOWER,
    "qkv_linear": Runs.LOWER,
    "rms_norm": Runs.FLOAT32,
    "rms_norm_rope": Runs.FLOAT32,
    "rope": Runs.UNCHANGED,  # computes in float32
    "route": Runs.UNCHANGED,  # computes and returns float32 for any scores
    "router_statistics": Runs.UNCHANGED,  # as route
    "sigmoid_gate": Runs.WIDEST,
    "swiglu": Runs.WIDEST,
    "swiglu_linear": Runs.LOWER,
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


def operands_dtype(runs: Runs, dtype: torch.dtype, operands: list[torch.dtype]) -> torch.dtype | None:
    """The dtype to which autocast casts an op's operands; None to leave all operands unchanged.

    runs: of the op. dtype: of autocast.
    operands: the dtypes of the operands for which `may_be_cast` is True. If any has 8 bits, nothing is cast: the caller
        chose float8 factors, and the factors' scales are float32.
    """
    if any(each.itemsize == 1 for each in operands):
        return None
    match runs:
        case Runs.LOWER:
            return dtype
        case Runs.FLOAT32:
            return torch.float32
        case Runs.WIDEST:
            return reduce(torch.promote_types, operands) if operands else None
        case Runs.UNCHANGED | Runs.LOWER_INSIDE:
            return None


def may_be_cast(operand: object) -> bool:
    """Whether autocast casts an operand: any floating tensor, except float64."""
    return isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
