"""Dtypes that ops take. What runs in every call allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOKEN_DTYPES = (torch.int32, torch.int64)


def check_floats(op: str, names: tuple[str, ...], *operands: Tensor | None) -> None:
    """Raises ValueError for an operand that is no floating tensor of 16 bits or more. names: of the operands."""
    for operand in operands:
        if operand is not None and operand.dtype not in WIDE:
            name = next(name for name, each in zip(names, operands, strict=True) if each is operand)
            raise ValueError(
                f"{op}: {name} is {operand.dtype}; cast it with .to(), to one of {', '.join(map(str, WIDE))}"
            )
