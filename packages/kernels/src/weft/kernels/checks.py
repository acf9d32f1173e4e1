"""Checks of operands' dtypes, run in every call of an op: nothing is allocated."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOKEN_DTYPES = (torch.int32, torch.int64)


def check_floats(op: str, names: tuple[str, ...], *operands: Tensor | None) -> None:
    """Raise ValueError for an operand without a floating dtype of 16 bits or more. names: of the operands, in order."""
    for operand in operands:
        if operand is not None and operand.dtype not in WIDE:
            name = next(name for name, each in zip(names, operands, strict=True) if each is operand)
            raise ValueError(
                f"{op}: {name} is {operand.dtype}; cast it with .to(), to one of {', '.join(map(str, WIDE))}"
            )
