"""Whether Weft's kernel or torch's fused attention computes a plain causal call on a GPU: the faster by measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..dispatch.backend import chip_of

TABLE = Path(__file__).with_name("measured.json")  # benchmarks/tune_attention.py writes it
Heads = tuple[str, str, int]  # chip, dtype and head_dim of `CallClass`


class CallClass(NamedTuple):
    """A class of causal calls with as many queries as keys and no other option: a key of the table."""

    chip: str  # as "sm_90"
    dtype: str
    head_dim: int
    tokens: int  # of a row, rounded up to a power of two

    @classmethod
    def of(cls, chip: str, dtype: torch.dtype, head_dim: int, tokens: int) -> CallClass:
        return cls(chip, str(dtype).removeprefix("torch."), head_dim, 1 << max(0, tokens - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of the table: the measured times of forward and backward for a class of calls."""

    of: CallClass
    seconds: float  # of Weft's kernels
    torch_seconds: float  # of torch's scaled_dot_product_attention
    where: str  # the device, and the versions of torch and triton

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"of": self.of._asdict()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measurement:
        return cls(**{**row, "of": CallClass(**row["of"])})


def read(file: Path) -> dict[CallClass, Measurement]:
    """The table in a JSON file."""
    return {row.of: row for row in map(Measurement.from_json, json.loads(file.read_text()))}


def faster_calls(measured: Mapping[CallClass, Measurement]) -> dict[Heads, tuple[int, ...]]:
    """The classes for which Weft's kernels were measured faster: numbers of tokens by chip, dtype and head_dim."""
    found: dict[Heads, tuple[int, ...]] = {}
    for of, row in sorted(measured.items()):
        if row.seconds < row.torch_seconds:
            found[of[:3]] = (*found.get(of[:3], ()), of.tokens)
    return found


FASTER = faster_calls(read(TABLE))


def is_kernel_faster(device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> bool:
    """Whether Weft's kernels were measured faster for this class of calls; False where the class was not measured."""
    if not FASTER:
        return False
    # Comparisons, as torch.compile may know of `tokens` no more than bounds: see `CallClass.of`.
    measured = FASTER.get((chip_of(device)[0], str(dtype).removeprefix("torch."), head_dim), ())
    return any(most // 2 < tokens <= most for most in measured)
