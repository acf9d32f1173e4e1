"""Which products run in steps that overlap communication: those measured faster than collective and product in turn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard import layout_of

from ...dispatch import backend

TABLE = Path(__file__).parent.with_name("in_steps.json")  # benchmarks/tune_in_steps.py writes it
Form = Literal["all_gather_matmul", "matmul_reduce_scatter"]


class Product(NamedTuple):
    """A class of products with one measurement: a key of the table."""

    form: Form
    chip: str  # as "sm_90", or "cpu"
    dtype: str
    ranks: int  # the size of the axis that communicates
    # The sizes of the rows of all ranks, [m, k], and of the weight, [n, k], rounded up to powers of two.
    m: int
    n: int
    k: int

    @classmethod
    def of(cls, form: Form, chip: str, dtype: torch.dtype, ranks: int, M: int, N: int, K: int) -> Product:
        m, n, k = (1 << max(0, size - 1).bit_length() for size in (M, N, K))
        return cls(form, chip, str(dtype).removeprefix("torch."), ranks, m, n, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One row of the table: the measured times of forward and backward for a class of products."""

    of: Product
    seconds: float  # in steps
    pair_seconds: float  # the collective and the product in sequence
    where: str  # the device, and the version of torch

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"of": self.of._asdict()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Timing:
        return cls(**{**row, "of": Product(**row["of"])})


def read(file: Path) -> dict[Product, Timing]:
    """The table in a JSON file."""
    return {row.of: row for row in map(Timing.from_json, json.loads(file.read_text()))}


MEASURED = read(TABLE)


def faster_in_steps(form: Form, a: DTensor, weight: Tensor, axis: str) -> bool:
    """Whether the product of a [..., K] and weight [N, K] was measured faster in steps; False where it was not
    measured.

    axis: the axis of a's mesh over which the rows of a are gathered, or the output's rows scattered. Every rank of
    the axis gets the same answer.
    """
    layout = layout_of(a)
    ranks = layout.mesh.axis_size(axis)
    parts = math.prod(layout.parts(dim) for dim in range(a.ndim - 1))
    M = math.prod(a.shape[:-1]) // (parts // ranks if form == "all_gather_matmul" else parts)
    row = MEASURED.get(Product.of(form, chip_of(a.device), a.dtype, ranks, M, *weight.shape))
    return row is not None and row.seconds < row.pair_seconds


def chip_of(device: torch.device) -> str:
    """`Product.chip` of a device."""
    return backend.chip_of(device)[0] if device.type == "cuda" else device.type
