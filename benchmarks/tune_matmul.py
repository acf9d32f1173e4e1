"""`python -m benchmarks.tune_matmul`: measures how products are cut on this GPU, and writes the table that `weft.kernels` reads.

    python -m benchmarks.tune_matmul                              # all dtypes; hours
    python -m benchmarks.tune_matmul --dtype bf16 --dtype fp8

Of each class of products the fastest configuration, beside torch's GEMM followed by the same epilogue compiled, or beside torch's of one
group after the other. What was measured before, on other chips or of other classes, stays in the table. The classes are those of the
layers of `benchmarks.products` and of the experts of `benchmarks.grouped_products`: forward, and of both gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from weft.kernels.matmul.configurations import (
    BY_POINTERS,
    FLAT,
    LARGE,
    MIDDLE,
    SINGLE,
    TABLE,
    Class,
    Configuration,
    Kind,
    Measured,
    fitted,
    read,
    write,
)

from benchmarks import grouped_products
from benchmarks.grouped_products import EXPERTS, Groups
from benchmarks.products import (
    FORMATS,
    KERNEL,
    SHAPES,
    TOKENS,
    TORCH,
    Factors,
    Format,
    Way,
    check,
    gated,
    plain,
    truths,
    with_gelu,
)
from benchmarks.timing import Clock, Device, in_turn

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


@dataclass(frozen=True, slots=True)
class Case:
    """A class of products and one of them. truth: its first rows in float64. ways: KERNEL's, with a configuration, and TORCH's."""

    of: Class
    format: Format
    truth: Tensor
    ways: Callable[[Configuration | None], Mapping[str, Way]]


# Of each kind of `Class` what is measured, and its name in `truths`.
KINDS: Mapping[Kind, tuple[Callable[..., dict[str, Way]], str]] = {
    "plain": (plain, "plain"),
    "fused": (with_gelu, "gelu"),
    "gated": (gated, "swiglu"),
}


def of_product(kind: Kind, transposed: str, sizes: tuple[int, int, int], format: Format, device: str) -> Case:
    from weft.kernels.matmul.launch import class_of

    given = Factors.of(*sizes, device, format, transposed)
    ways, name = KINDS[kind]
    return Case(class_of(given.a, given.b, kind), format, truths(given)[name], partial(ways, given))


def of_groups(transposed: str, groups: int, sizes: tuple[int, int, int], format: Format, device: str) -> Case:
    from weft.kernels.matmul.launch import class_of

    given = Groups.of(groups, *sizes, device, format, transposed)
    of = class_of(given.a, given.b[0], "grouped", groups)
    return Case(of, format, grouped_products.truth_of_rows(given), partial(grouped_products.of_rows, given))


def of_weights(groups: int, sizes: tuple[int, int, int], format: Format, device: str) -> Case:
    from weft.kernels.matmul.launch import class_of

    given = Groups.of(groups, *sizes, device, format)
    of = class_of(given.a.mT, given.grad, "grouped_weights", groups)
    return Case(of, format, grouped_products.truth_of_weights(given), partial(grouped_products.of_weights, given))


def cases(
    format: Format,
    device: str,
    tokens: Sequence[int] = TOKENS,
    layers: Iterable[tuple[int, int]] = tuple(sorted(set(SHAPES.values()))),
    experts: Iterable[tuple[int, int, int]] = tuple(EXPERTS.values()),
) -> Iterator[Callable[[], Case]]:
    """What makes each case, one after the other, for they do not fit in memory together. layers: columns of the output, of the input.

    8 bits have no gradients, and no product that nothing follows.
    """
    eight = format.dtype.itemsize == 1
    for M in tokens:
        for N, K in layers:
            forward, of_input, of_weight = ("b", (M, N, K)), ("", (M, K, N)), ("a", (N, K, M))
            yield partial(of_product, "fused", *forward, format, device)
            if not eight:
                yield partial(of_product, "fused", *of_input, format, device)
                yield partial(of_product, "gated", *forward, format, device)
                for each in (forward, of_input, of_weight):
                    yield partial(of_product, "plain", *each, format, device)
        for groups, N, K in experts:
            yield partial(of_groups, "", groups, (M, N, K), format, device)
            yield partial(of_groups, "b", groups, (M, K, N), format, device)
            if not eight:
                yield partial(of_weights, groups, (M, N, K), format, device)


def candidates(of: Class, format: Format, among: Iterable[Configuration] = CANDIDATES) -> list[Configuration]:
    """Those for 16 bits, with as many bytes of the inner dim, as this kind of kernel takes them."""
    found = [replace(each, tile_k=each.tile_k * 2 // format.dtype.itemsize) for each in among]
    if format.dtype == torch.float32:
        found.append(SINGLE)
    return list(dict.fromkeys(fitted(of.kind, each) for each in found))


def fastest(case: Case, among: Iterable[Configuration], clock: Clock, where: str, rounds: int = 10) -> Measured:
    """The candidate that took the least time of the product; one that the chip cannot run is none.

    Raises Inaccurate for one that is wrong.
    """
    named: dict[str, Configuration] = {}
    ways: dict[str, Way] = {TORCH: case.ways(None)[TORCH]}
    with torch.no_grad(), case.format.chosen():
        for candidate in among:
            way = case.ways(candidate)[KERNEL]
            made = _made(way)
            if made is not None:
                check(str(candidate), made, case.truth, case.format.allowed)
                named[str(candidate)], ways[str(candidate)] = candidate, way
        timed = in_turn(ways, clock, rounds=rounds, replayed=())
    best = min(named, key=lambda name: timed[name].median)
    seconds, torch_seconds = timed[best].median, timed[TORCH].median
    return Measured(of=case.of, configuration=named[best], seconds=seconds, torch_seconds=torch_seconds, where=where)


def _made(way: Way) -> Tensor | None:
    from triton.runtime.errors import OutOfResources

    try:
        return way()
    except OutOfResources:  # of shared memory, on a smaller chip
        return None


def tune(table: Path = TABLE, formats: Iterable[Format] = tuple(FORMATS.values())) -> None:
    """Raises RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU to measure on; run this where there is one")
    import triton

    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    for format in formats:
        measure(cases(format, "cuda"), format, table, Device(), where)


def measure(
    makers: Iterable[Callable[[], Case]], format: Format, table: Path, clock: Clock, where: str, rounds: int = 10
) -> None:
    """Adds what is found of each case to the table, at once."""
    rows = read(table)
    for make in makers:
        with format.chosen():  # a class is of tf32 where float32 is multiplied so
            case = make()
        rows[case.of] = row = fastest(case, candidates(case.of, format), clock, where, rounds)
        write(rows, table)
        print(f"{row.torch_seconds / row.seconds:6.1%} of torch's speed: {case.of}, {row.configuration}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_matmul", description="Measure how products are cut."
    )
    parser.add_argument("--dtype", action="append", choices=FORMATS, help="may be repeated; all without it")
    names: list[str] = parser.parse_args().dtype or [*FORMATS]
    tune(formats=[FORMATS[name] for name in names])


if __name__ == "__main__":
    main()
