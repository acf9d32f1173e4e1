"""Measures where Weft's attention kernels are faster than torch's fused attention, and writes the kernels' table.

    python -m benchmarks.tune_attention                  # bf16
    python -m benchmarks.tune_attention --dtype fp16
    python -m benchmarks.tune_attention --seconds 100    # for 100 seconds; call again until it exits with 0

Plain causal calls, forward and backward, are timed with both in turn, after a check against float64. A call of a class
that is not in the table runs torch's. Rows measured earlier, on other chips or for other classes, stay in the table.
Rows measured with the same versions on this chip are measured again only with `--again`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from weft.kernels.attention.plain import TABLE, AttentionMeasurement, CallClass
from weft.kernels.dispatch.backend import chip_of
from weft.kernels.launching.launched import write_table

from benchmarks.attentions import KERNEL, TORCH, Case, truth_of, ways_of
from benchmarks.measure_gpu import UNFINISHED
from benchmarks.timing import Clock, Device, describe_gpu, in_turn
from benchmarks.truth import errors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = tuple(
    Case.of(tokens, head_dim) for tokens in (8192, 4096, 2048, 16384, 32768, 1024, 512) for head_dim in (128, 64)
)


def timed(
    case: Case, dtype: torch.dtype, device: str, clock: Clock, where: str, rounds: int = 10
) -> AttentionMeasurement:
    """Times a case in both ways, after a check of both. Raises Inaccurate for a wrong result."""
    operands = case.operands(device, dtype)
    truth, ways = truth_of(case, operands), ways_of(case, operands, (KERNEL, TORCH))
    if failed := dict(ways.failed):
        raise RuntimeError(f"{case.name}: {failed}")
    for name, way in ways.made.items():
        errors(name, way(), truth)
    found = in_turn(ways.made, clock, rounds=rounds, replayed=())
    of = CallClass.of(chip_of(torch.device(device))[0], dtype, case.head_dim, case.tokens)
    return AttentionMeasurement(of=of, seconds=found[KERNEL].median, torch_seconds=found[TORCH].median, where=where)


def measure(
    cases: Iterable[Case],
    dtype: torch.dtype,
    table: Path,
    device: str,
    clock: Clock,
    where: str,
    end: float | None = None,
    again: bool = False,
) -> int:
    """Measures the cases, and adds each row to the table at once. Returns the number of cases left at `end`."""
    rows, chip, left = AttentionMeasurement.read(table), chip_of(torch.device(device))[0], 0
    for case in cases:
        known = rows.get(CallClass.of(chip, dtype, case.head_dim, case.tokens))
        if known is not None and known.where == where and not again:
            continue
        if end is not None and time.monotonic() >= end:
            left += 1
            continue
        row = timed(case, dtype, device, clock, where)
        rows[row.of] = row
        write_table(rows, table)
        print(f"{row.torch_seconds / row.seconds:6.1%} of torch's speed: {row.of}", flush=True)
    return left


def tune(
    table: Path = TABLE, dtypes: Iterable[str] = ("bf16",), seconds: float | None = None, again: bool = False
) -> int:
    """Measures all cases on this machine's GPU. Returns the number of cases left when the time was over.

    seconds: the time after which no further case is begun; None for no limit. again: measure known classes again.
    Raises RuntimeError without a GPU.
    """
    where = describe_gpu()
    end = None if seconds is None else time.monotonic() + seconds
    clock = Device()
    return sum(measure(CASES, DTYPES[each], table, "cuda", clock, where, end, again) for each in dtypes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_attention",
        description="Measure where Weft's attention kernels are faster than torch's fused attention.",
    )
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; bf16 by default")
    parser.add_argument("--seconds", type=float, help="begin no case after this time; the next call continues")
    parser.add_argument(
        "--again", action="store_true", help="also measure classes already measured with these versions on this chip"
    )
    options = parser.parse_args()
    left = tune(dtypes=options.dtype or ("bf16",), seconds=options.seconds, again=options.again)
    if left:
        print(f"the time is over; {left} cases are left: run this command again")
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    main()
