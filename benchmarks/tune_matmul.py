"""Measures the fastest tile configuration of each class of products on a GPU, and writes the table of `weft.kernels`.

    python -m benchmarks.tune_matmul                              # all dtypes; hours
    python -m benchmarks.tune_matmul --dtype bf16 --dtype fp8
    python -m benchmarks.tune_matmul --seconds 500                # for 500 seconds; call again until it exits with 0

Each class is also timed with torch: a GEMM followed by the compiled epilogue, or for groups a GEMM for each group in
turn. 8-bit products are compared with torch's 8-bit GEMM, if the chip has one. Rows measured earlier, on other chips
or for other classes, stay in the table. Rows measured with the same versions on this chip are measured again only
with `--again`. The classes are the layers of `benchmarks.products` and the experts of `benchmarks.grouped_products`,
in forward and for both gradients.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from weft.kernels.launching.launched import write_table
from weft.kernels.matmul.configurations import (
    BY_POINTERS,
    FLAT,
    LARGE,
    MIDDLE,
    SINGLE,
    TABLE,
    Configuration,
    ProductClass,
    ProductMeasurement,
    adapt_to_kind,
)

from benchmarks import grouped_products
from benchmarks.grouped_products import EXPERTS, Groups
from benchmarks.launched import cost
from benchmarks.measure_gpu import UNFINISHED
from benchmarks.products import FORMATS, KERNEL, KINDS, SHAPES, TOKENS, TORCH, Format, Truth, Way, check
from benchmarks.timing import Clock, Device, describe_gpu, in_turn

CANDIDATES = (
    LARGE,
    replace(LARGE, tile_m=256, tile_n=128),
    replace(LARGE, group_m=16),
    replace(LARGE, stages=4, tile_k=32),
    MIDDLE,
    replace(MIDDLE, warps=8),
    replace(MIDDLE, stages=3, parts=1, specialized=True),
    replace(MIDDLE, splits=2),
    replace(MIDDLE, splits=4),
    FLAT,
    BY_POINTERS,
)
# Candidates for full float32, without tensor cores: tiles which fit in the registers.
SINGLES = (SINGLE, replace(SINGLE, tile_m=32))


@dataclass(frozen=True, slots=True)
class Case:
    """A class of products, and a product of this class to measure."""

    of: ProductClass
    format: Format
    truth: Callable[[], Truth]  # some rows of every tile
    ways: Callable[[Configuration | None], Mapping[str, Way]]  # KERNEL with the configuration, and TORCH


def of_product(kind: str, transposed: str, sizes: tuple[int, int, int], format: Format, device: str) -> Case:
    """A case of a single product. kind: a key of KINDS."""
    from weft.kernels.matmul.launch import class_of

    what = KINDS[kind]
    given = what.factors(*sizes, device, format, transposed)
    return Case(class_of(given.a, given.b, what.of), format, partial(what.truth_of, given), partial(what.ways, given))


def of_groups(transposed: str, groups: int, sizes: tuple[int, int, int], format: Format, device: str) -> Case:
    from weft.kernels.matmul.launch import class_of

    given = Groups.of(groups, *sizes, device, format, transposed)
    of = class_of(given.a, given.b[0], "grouped", groups)
    return Case(of, format, partial(grouped_products.truth_of_rows, given), partial(grouped_products.of_rows, given))


def of_weights(groups: int, sizes: tuple[int, int, int], format: Format, device: str) -> Case:
    from weft.kernels.matmul.launch import class_of

    given = Groups.of(groups, *sizes, device, format)
    of = class_of(given.a.mT, given.grad, "grouped_weights", groups)
    return Case(
        of, format, partial(grouped_products.truth_of_weights, given), partial(grouped_products.of_weights, given)
    )


def cases(
    format: Format,
    device: str,
    tokens: Sequence[int] = TOKENS,
    layers: Iterable[tuple[int, int]] = tuple(sorted(set(SHAPES.values()))),
    experts: Iterable[tuple[int, int, int]] = tuple(EXPERTS.values()),
) -> Iterator[Callable[[], Case]]:
    """Yields a function for each case, which makes the case: all cases together do not fit in memory.

    layers: the columns of a layer's output and input. 8-bit products have no gradients, and always an epilogue.
    """
    eight = format.dtype.itemsize == 1
    for M in tokens:
        for N, K in layers:
            forward, of_input, of_weight = ("b", (M, N, K)), ("", (M, K, N)), ("a", (N, K, M))
            yield partial(of_product, "gelu", *forward, format, device)
            if eight:
                yield partial(of_product, "fp8, one scale", *forward, format, device)
            else:
                yield partial(of_product, "gelu", *of_input, format, device)
                yield partial(of_product, "swiglu", *forward, format, device)
                for each in (forward, of_input, of_weight):
                    yield partial(of_product, "plain", *each, format, device)
        for groups, N, K in experts:
            yield partial(of_groups, "", groups, (M, N, K), format, device)
            yield partial(of_groups, "b", groups, (M, K, N), format, device)
            if not eight:
                yield partial(of_weights, groups, (M, N, K), format, device)


def candidates(of: ProductClass, format: Format) -> list[Configuration]:
    """The configurations to try: CANDIDATES with as many bytes along the inner dim as in 16 bits, fitted to the kernel.

    8-bit products use two sums, for which the widest tiles have too few registers.
    """
    among: tuple[Configuration, ...] = SINGLES
    if format.dtype != torch.float32 or format.tf32:
        widest = 128 if format.dtype.itemsize == 1 else 256
        among = tuple(
            replace(each, tile_k=each.tile_k * 2 // format.dtype.itemsize)
            for each in CANDIDATES
            if each.tile_n <= widest
        )
        among += (SINGLE,) if format.tf32 else ()
    return list(dict.fromkeys(adapt_to_kind(of.kind, each) for each in among))


def fastest(
    case: Case, among: Iterable[Configuration], clock: Clock, where: str, rounds: int = 10
) -> ProductMeasurement | None:
    """The fastest candidate; None if no candidate runs.

    Candidates which the chip cannot run, and candidates which spill registers, are left out. Raises Inaccurate for a
    candidate with a wrong result.
    """
    named: dict[str, Configuration] = {}
    ways: dict[str, Way] = {TORCH: case.ways(None)[TORCH]}
    torch.compiler.reset()  # see `compared`
    with torch.no_grad(), case.format.chosen():
        truth = case.truth()
        for candidate in among:
            way = case.ways(candidate)[KERNEL]
            made = _made(way)
            if made is not None and not spills(way):
                check(str(candidate), made, truth, case.format.allowed)
                named[str(candidate)], ways[str(candidate)] = candidate, way
        if not named:
            return None
        timed = in_turn(ways, clock, rounds=rounds, replayed=())
    best = min(named, key=lambda name: timed[name].median)
    seconds, torch_seconds = timed[best].median, timed[TORCH].median
    return ProductMeasurement(
        of=case.of, configuration=named[best], seconds=seconds, torch_seconds=torch_seconds, where=where
    )


def _made(way: Way) -> Tensor | None:
    from triton.runtime.errors import OutOfResources

    try:
        return way()
    except OutOfResources:  # a smaller chip has too little shared memory
        return None


def spills(way: Way) -> bool:
    """Whether a kernel launched by the way spills registers to memory."""
    return float(cost(way).get("spill_bytes", 0)) > 0


def tune(
    table: Path = TABLE,
    formats: Iterable[Format] = tuple(FORMATS.values()),
    seconds: float | None = None,
    again: bool = False,
) -> int:
    """Measures all classes of the formats. Returns the number of classes left when the time was over.

    seconds: the time after which no further class is begun; None for no limit. again: measure known classes again.
    Raises RuntimeError without a GPU.
    """
    where = describe_gpu()
    end = None if seconds is None else time.monotonic() + seconds
    clock = Device()
    return sum(measure(list(cases(of, "cuda")), of, table, clock, where, end=end, again=again) for of in formats)


def measure(
    makers: Sequence[Callable[[], Case]],
    format: Format,
    table: Path,
    clock: Clock,
    where: str,
    rounds: int = 10,
    end: float | None = None,
    again: bool = False,
) -> int:
    """Measures the cases, and adds each row to the table at once.

    Returns the number of cases left when the time was over.
    """
    rows, seen = ProductMeasurement.read(table), set[ProductClass]()
    for number, make in enumerate(makers):
        if end is not None and time.monotonic() >= end:
            return len(makers) - number
        with format.chosen():  # the setting decides whether the class is tf32
            case = make()
        known = rows.get(case.of)
        if case.of in seen or (known is not None and known.where == where and not again):
            continue
        seen.add(case.of)
        row = fastest(case, candidates(case.of, format), clock, where, rounds)
        if row is None:
            print(f"no candidate runs here: {case.of}", flush=True)
            continue
        rows[case.of] = row
        write_table(rows, table)
        print(f"{row.torch_seconds / row.seconds:6.1%} of torch's speed: {case.of}, {row.configuration}", flush=True)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_matmul", description="Measure the fastest tiles of each class of products."
    )
    parser.add_argument("--dtype", action="append", choices=FORMATS, help="may be repeated; by default all dtypes")
    parser.add_argument("--seconds", type=float, help="begin no class after this time; the next call continues")
    parser.add_argument(
        "--again", action="store_true", help="also measure classes already measured with these versions on this chip"
    )
    options = parser.parse_args()
    names: list[str] = options.dtype or [*FORMATS]
    left = tune(formats=[FORMATS[name] for name in names], seconds=options.seconds, again=options.again)
    if left:
        print(f"the time is over; {left} products are left: run this command again")
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    main()
