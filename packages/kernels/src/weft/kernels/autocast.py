"""Which op runs in what under `torch.autocast`, as in torch's own lists of ops."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum
from functools import reduce

import torch
from torch import Tensor, is_autocast_enabled

DEVICES = ("cpu", "cuda")


class Runs(Enum):
    """What the floating operands of an op are cast to. Those in float64 never are, nor what computes with them."""

    LOWER = "the dtype of autocast"
    FLOAT32 = "float32"
    WIDEST = "the widest dtype of its operands"
    AS_GIVEN = "the dtype that it is given"
    LOWER_INSIDE = "the dtype of autocast, by its compute_dtype: it casts its operands and sums their gradients itself"


RUNS = {
    "add": Runs.WIDEST,
    "add_layer_norm": Runs.FLOAT32,
    "add_rms_norm": Runs.FLOAT32,
    "all_gather_matmul": Runs.LOWER,
    "attention": Runs.LOWER,
    "cross_entropy": Runs.AS_GIVEN,  # its passes compute in float32 and give float32
    "dropout": Runs.AS_GIVEN,
    "embedding": Runs.AS_GIVEN,
    "geglu": Runs.WIDEST,
    "gelu": Runs.AS_GIVEN,
    "grouped_matmul": Runs.LOWER,
    "layer_norm": Runs.FLOAT32,
    "linear": Runs.LOWER,
    "linear_cross_entropy": Runs.LOWER_INSIDE,
    "matmul": Runs.LOWER,
    "matmul_reduce_scatter": Runs.LOWER,
    "qkv_linear": Runs.LOWER,
    "rms_norm": Runs.FLOAT32,
    "rms_norm_rope": Runs.FLOAT32,
    "rope": Runs.AS_GIVEN,  # computes in float32
    "swiglu": Runs.WIDEST,
    "swiglu_linear": Runs.LOWER,
}


def is_autocasting() -> bool:
    """Whether autocast is enabled anywhere: what costs the host least to ask, in every call."""
    return is_autocast_enabled("cpu") or is_autocast_enabled("cuda")


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """That of the autocast which is enabled where the tensor lies; None without one."""
    device = _device(tensor)
    enabled = device in DEVICES and is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else None


def autocast_off(tensor: Tensor) -> AbstractContextManager[None]:
    """In it torch casts nothing where the tensor lies: what an op computes has been cast."""
    return torch.autocast(_device(tensor), enabled=False)


def _device(tensor: Tensor) -> str:
    """Where the tensor lies; of one without data, which lies nowhere, a device that has autocast enabled, if there is one."""
    device = tensor.device.type
    return next(filter(is_autocast_enabled, DEVICES), device) if device == "meta" else device


def operands_dtype(runs: Runs, dtype: torch.dtype, operands: list[torch.dtype]) -> torch.dtype | None:
    """What operands are cast to where autocast has `dtype`; None to leave them as they are.

    operands: the dtypes of those that `may_be_cast`. Beside factors of 8 bits nothing is cast: they are what a product is to be of,
    and their scales are of float32.
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
        case Runs.AS_GIVEN | Runs.LOWER_INSIDE:
            return None


def may_be_cast(operand: object) -> bool:
    """Whether autocast casts such an operand: a floating tensor, but for float64."""
    return isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
