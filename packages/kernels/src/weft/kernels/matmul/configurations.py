"""How a product is computed: the tiles of a kernel, or torch's GEMM; by a table of measurements, and by rules where it is silent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

TABLE = Path(__file__).with_name("measured.json")  # benchmarks/tune_matmul.py writes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The tiles of a product [M, K] @ [K, N].

    group_m: rows of tiles that are gone down before the next column. parts: in which a tile goes through its epilogue.
    splits: of K, whose products are added up by a second kernel. descriptors: whether tiles are loaded by TMA, where memory is
    aligned for it. specialized: whether warps that load and warps that multiply are told apart; only with 4 warps, for triton 3.6
    and 3.7 silently leave it with 8, and in one part, for triton 3.6 cannot cut a tile there.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    warps: int
    stages: int
    group_m: int = 8
    parts: int = 1
    splits: int = 1
    descriptors: bool = True
    specialized: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "warps", "parts"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} is {size}; give a power of two")
        if min(self.group_m, self.splits, self.stages) < 1:
            raise ValueError(f"{self}: group_m, splits and stages are 1 at least")
        if self.specialized and not (self.warps == 4 and self.parts == 1 and self.descriptors):
            raise ValueError(f"{self}: warps are specialized with descriptors alone; give warps=4, parts=1")

    def flop_per_byte(self, itemsize: int, products: int = 1) -> float:
        """Of a step of the inner loop: over the bytes of a's tile and of the products' tiles of b."""
        flop = 2 * self.tile_m * self.tile_n * self.tile_k * products
        return round(flop / ((self.tile_m + self.tile_n * products) * self.tile_k * itemsize), 1)


Kind = Literal["plain", "fused", "one_scale", "gated", "grouped", "grouped_weights"]
ONE_PASS: tuple[Kind, ...] = ("fused", "one_scale")  # where the kernel saves a pass


class Class(NamedTuple):
    """Products that are computed alike. chip: as "sm_90". dtype: of the factors, "tf32" where float32 is multiplied so.

    kind: "plain" where no more than a bias follows, "fused" where an epilogue does that torch's GEMM does not have, and "one_scale" where
    the factors have 8 bits and no more than a number each for scales; "gated" where two products of one input make a gate; "grouped" of groups of rows, with or without an epilogue, and "grouped_weights" of sums over them.
    transposed: the factors [M, K] and [K, N] whose columns are contiguous: "", "a", "b" or "ab".
    m, n, k: the sizes, of groups those of one of them; with how many groups there are, rounded up to powers of two.
    """

    chip: str
    dtype: str
    kind: Kind
    transposed: str
    m: int
    n: int
    k: int
    groups: int = 1

    @classmethod
    def of(cls, chip: str, dtype: str, kind: Kind, transposed: str, M: int, N: int, K: int, groups: int = 1) -> Class:
        m, n, k, groups = (1 << max(0, size - 1).bit_length() for size in (M, N, K, groups))
        return cls(chip, dtype, kind, transposed, m, n, k, groups)


def kind_of(
    a: Tensor,
    activation: str | None,
    alpha: float,
    residual: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    z: Tensor | None = None,
) -> Kind:
    """Of a product that is followed by these. z: where what the activation is applied to is kept."""
    if a.dtype.itemsize == 1:
        return "one_scale" if all(each is None or each.numel() == 1 for each in (a_scale, b_scale)) else "fused"
    follows = activation is not None or alpha != 1 or any(each is not None for each in (residual, z))
    return "fused" if follows else "plain"


def transposed(a: Tensor, b: Tensor) -> str:
    """See `Class`."""
    return "".join(name for name, factor in zip("ab", (a, b), strict=True) if factor.stride(-1) != 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a tuning run found of a class: the fastest configuration, its time, and that of torch's GEMM with the same epilogue.

    where: the device and the versions of torch and triton.
    """

    of: Class
    configuration: Configuration
    seconds: float
    torch_seconds: float
    where: str

    def as_json(self) -> dict[str, Any]:
        return {
            "of": self.of._asdict(),
            "configuration": asdict(self.configuration),
            "seconds": self.seconds,
            "torch_seconds": self.torch_seconds,
            "where": self.where,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        given = dict(row) | {"of": Class(**row["of"]), "configuration": Configuration(**row["configuration"])}
        return cls(**given)


def read(file: Path) -> dict[Class, Measured]:
    return {row.of: row for row in map(Measured.from_json, json.loads(file.read_text()))}


class Row(Protocol):
    """What a table has for a class."""

    def as_json(self) -> dict[str, Any]: ...


def write(rows: Mapping[Any, Row], file: Path) -> None:
    """One line a row, so that a new measurement is a change of one line."""
    lines = [json.dumps(rows[of].as_json()) for of in sorted(rows)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")


MEASURED = read(TABLE)


def by_measurement(of: Class, measured: Mapping[Class, Measured] = MEASURED) -> Configuration | None:
    """The fastest configuration that was measured of the class; None where none was."""
    row = measured.get(of)
    return None if row is None else row.configuration


def kernel_runs(of: Class, measured: Mapping[Class, Measured] = MEASURED) -> bool:
    """Whether the kernel computes such products, and not torch's GEMM with what follows: the faster one, by measurement.

    Of what was not measured the kernel computes ONE_PASS alone: what follows is then no pass of its own. A gate saves less beside
    two products, two passes over its output of six, than the better GEMM may.
    """
    row = measured.get(of)
    return of.kind in ONE_PASS if row is None else row.seconds < row.torch_seconds


# Untuned: what compiles without spills and fills the shared memory that the chip has, see benchmarks/results/aot.
LARGE = Configuration(tile_m=128, tile_n=256, tile_k=64, warps=8, stages=3, parts=8)
MIDDLE = Configuration(tile_m=128, tile_n=128, tile_k=64, warps=4, stages=4, parts=4)
FLAT = Configuration(tile_m=64, tile_n=128, tile_k=64, warps=4, stages=4, parts=2)
EIGHT_BITS = Configuration(tile_m=128, tile_n=128, tile_k=128, warps=8, stages=4, parts=2)  # two sums: see `multiplied`
BY_POINTERS = Configuration(tile_m=128, tile_n=128, tile_k=32, warps=8, stages=3, parts=4, descriptors=False)
NOT_ALIGNED = Configuration(tile_m=64, tile_n=64, tile_k=32, warps=4, stages=3, parts=4, descriptors=False)
ON_AMD = Configuration(tile_m=128, tile_n=128, tile_k=32, warps=8, stages=2, parts=2, descriptors=False)
SINGLE = Configuration(
    tile_m=64, tile_n=64, tile_k=32, warps=8, stages=2, parts=2, descriptors=False
)  # float32 without tensor cores
INTERPRETED = Configuration(tile_m=16, tile_n=32, tile_k=16, warps=1, stages=1, group_m=2, parts=2)
WAVES, SPLIT_K, MOST_SPLITS = 2, 1024, 8


@lru_cache(maxsize=65536)
def by_rule(chip: str, itemsize: int, aligned: bool, M: int, N: int, K: int, processors: int) -> Configuration:
    """The configuration of a class that was not measured. aligned: for descriptors. processors: that run programs at once."""
    if chip == "interpreted":
        return INTERPRETED
    if itemsize == 4:
        chosen = SINGLE
    elif not aligned:
        chosen = NOT_ALIGNED
    elif chip.startswith("gfx"):
        chosen = ON_AMD
    elif int(chip.removeprefix("sm_")) < 90:
        chosen = BY_POINTERS
    elif itemsize == 1:
        chosen = EIGHT_BITS
    elif FLAT.tile_m >= M:
        chosen = FLAT
    else:
        chosen = LARGE if _tiles(LARGE, M, N) >= processors else MIDDLE
    idle = processors // max(1, WAVES * _tiles(chosen, M, N))
    splits = min(idle, MOST_SPLITS, K // SPLIT_K)
    return _replaced(chosen, splits=splits) if splits > 1 else chosen


def halved(configuration: Configuration) -> Configuration:
    """For two products at once: tiles of half the columns, which take as many registers together, and their epilogue some more."""
    if configuration.tile_n <= 16:
        return configuration
    whole = _replaced(configuration, splits=1)
    warps = 8 if whole == MIDDLE else whole.warps
    return _replaced(whole, tile_n=whole.tile_n // 2, parts=max(1, whole.parts // 2), warps=warps)


def grouped(configuration: Configuration) -> Configuration:
    """For products of groups: K is not split, and a program that finds its group has fewer registers for the tile."""
    whole = _replaced(configuration, splits=1, specialized=False)
    as_middle = (whole.tile_m, whole.tile_n, whole.warps) == (MIDDLE.tile_m, MIDDLE.tile_n, MIDDLE.warps)
    return _replaced(whole, warps=8) if as_middle else whole


def fitted(kind: Kind, configuration: Configuration) -> Configuration:
    """What a kernel of this kind makes of a configuration for one product."""
    match kind:
        case "gated":
            return halved(configuration)
        case "grouped" | "grouped_weights":
            return grouped(configuration)
    return configuration


def _tiles(configuration: Configuration, M: int, N: int) -> int:
    return -(-M // configuration.tile_m) * -(-N // configuration.tile_n)


def _replaced(configuration: Configuration, **changes: int) -> Configuration:
    return Configuration(**(asdict(configuration) | changes))
