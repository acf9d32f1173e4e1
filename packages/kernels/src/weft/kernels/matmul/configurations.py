"""How a product is computed: which tiles the kernel uses, and whether torch's GEMM runs instead.

A table of measurements decides about measured products, and rules about all further products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from ..launching.launched import TableRow

TABLE = Path(__file__).with_name("measured.json")  # written by benchmarks/tune_matmul.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How the kernel computes a product [M, K] @ [K, N]: the size of the tiles, and options for Triton's compiler."""

    tile_m: int
    tile_n: int
    tile_k: int
    warps: int
    stages: int
    group_m: int = 8  # programs go down this many rows of tiles before the next column
    parts: int = 1  # a tile goes through the epilogue in this many parts
    splits: int = 1  # of K; a second kernel adds up the splits' products
    descriptors: bool = True  # load tiles by TMA, where memory is aligned for TMA
    # Some warps load tiles while the rest multiply (Triton's warp_specialize). Needs warps=4, because Triton 3.6 and
    # 3.7 silently ignore the option with 8 warps; and parts=1, because Triton 3.6 cannot split a tile in this loop.
    specialized: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k", "warps", "parts"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"{name} is {size}; give a power of two")
        if min(self.group_m, self.splits, self.stages) < 1:
            raise ValueError(f"{self}: group_m, splits and stages must be 1 or more")
        if self.specialized and not (self.warps == 4 and self.parts == 1 and self.descriptors):
            raise ValueError(
                f"{self}: specialized needs descriptors=True, and 4 warps in one part; give warps=4, parts=1"
            )

    def flop_per_byte(self, itemsize: int, products: int = 1) -> float:
        """The inner loop's arithmetic intensity: flop over bytes, for a tile of a and `products` tiles of b."""
        flop = 2 * self.tile_m * self.tile_n * self.tile_k * products
        return round(flop / ((self.tile_m + self.tile_n * products) * self.tile_k * itemsize), 1)


ProductKind = Literal["plain", "fused", "one_scale", "gated", "grouped", "grouped_weights"]
ONE_PASS: tuple[ProductKind, ...] = ("fused", "one_scale")  # kinds for which the kernel saves a pass over the output


class ProductClass(NamedTuple):
    """A class of products which share a configuration: a key of the table of measurements.

    The kinds:
    plain: nothing follows the product but a bias.
    fused: an epilogue follows which torch's GEMM does not have.
    one_scale: factors of 8 bits, each with a single number as the scale, or none.
    gated: two products of the same input, and a gate of both.
    grouped: products of groups of rows, with or without an epilogue.
    grouped_weights: sums over groups of rows, for the gradients of grouped weights.
    """

    chip: str  # as "sm_90"
    dtype: str  # of the factors; "tf32" where float32 is multiplied in tf32
    kind: ProductKind
    transposed: str  # which factors, a [M, K] and b [K, N], have contiguous columns: "", "a", "b" or "ab"
    # The sizes, rounded up to powers of two; for groups, the sizes of a group.
    m: int
    n: int
    k: int
    groups: int = 1  # the number of groups, rounded up to a power of two

    @classmethod
    def of(
        cls, chip: str, dtype: str, kind: ProductKind, transposed: str, M: int, N: int, K: int, groups: int = 1
    ) -> ProductClass:
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
) -> ProductKind:
    """The kind of a product a @ b with this epilogue. z: the buffer for the pre-activation, or None."""
    if a.dtype.itemsize == 1:
        return "one_scale" if all(each is None or each.numel() == 1 for each in (a_scale, b_scale)) else "fused"
    follows = activation is not None or alpha != 1 or any(each is not None for each in (residual, z))
    return "fused" if follows else "plain"


def find_transposed(a: Tensor, b: Tensor) -> str:
    """Which of the factors have contiguous columns; see `ProductClass.transposed`."""
    return "".join(name for name, factor in zip("ab", (a, b), strict=True) if factor.stride(-1) != 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductMeasurement(TableRow):
    """A row of the table: the result of a tuning run for a class of products."""

    of: ProductClass  # the timed products
    configuration: Configuration  # the fastest
    seconds: float  # with this configuration
    torch_seconds: float  # of torch's GEMM with the same epilogue
    where: str  # the device, and the versions of torch and triton


MEASURED = ProductMeasurement.read(TABLE)


def find_measured(
    of: ProductClass, measured: Mapping[ProductClass, ProductMeasurement] = MEASURED
) -> Configuration | None:
    """The fastest configuration measured for the class; None where the class was not measured."""
    row = measured.get(of)
    return None if row is None else row.configuration


def is_kernel_faster(of: ProductClass, measured: Mapping[ProductClass, ProductMeasurement] = MEASURED) -> bool:
    """Whether the kernel computes products of this class, instead of torch's GEMM and the epilogue in torch.

    A measured class runs the faster of the two. A class without a measurement runs the kernel only for kinds in
    ONE_PASS, whose epilogue in torch is a further pass over the output. Gated products are not in ONE_PASS: the kernel
    saves two of six passes over the output, but torch's GEMM may be faster by more than two passes.
    """
    row = measured.get(of)
    return of.kind in ONE_PASS if row is None else row.seconds < row.torch_seconds


# The configurations of `choose_by_rule`. Not tuned: these compile without spills and fill the chip's shared memory, see
# benchmarks/results/aot.
LARGE = Configuration(tile_m=128, tile_n=256, tile_k=64, warps=8, stages=3, parts=8)
MIDDLE = Configuration(tile_m=128, tile_n=128, tile_k=64, warps=4, stages=4, parts=4)
FLAT = Configuration(tile_m=64, tile_n=128, tile_k=64, warps=4, stages=4, parts=2)
# tile_n is half of LARGE's: `kernel.multiplied` keeps two sums of 8-bit products in registers, by tile_k and over K.
EIGHT_BITS = Configuration(tile_m=128, tile_n=128, tile_k=128, warps=8, stages=4, parts=2)
BY_POINTERS = Configuration(tile_m=128, tile_n=128, tile_k=32, warps=8, stages=3, parts=4, descriptors=False)
NOT_ALIGNED = Configuration(tile_m=64, tile_n=64, tile_k=32, warps=4, stages=3, parts=4, descriptors=False)
ON_AMD = Configuration(tile_m=128, tile_n=128, tile_k=32, warps=8, stages=2, parts=2, descriptors=False)
# float32 without tensor cores
SINGLE = Configuration(tile_m=64, tile_n=64, tile_k=32, warps=8, stages=2, parts=2, descriptors=False)
INTERPRETED = Configuration(tile_m=16, tile_n=32, tile_k=16, warps=1, stages=1, group_m=2, parts=2)
# K is split where the output has few tiles: into at most MOST_SPLITS splits of at least SPLIT_K, and only while each
# split of each tile has PROCESSORS_PER_SPLIT multiprocessors.
PROCESSORS_PER_SPLIT, SPLIT_K, MOST_SPLITS = 2, 1024, 8


@lru_cache(maxsize=65536)
def choose_by_rule(chip: str, itemsize: int, aligned: bool, M: int, N: int, K: int, processors: int) -> Configuration:
    """The configuration for a product without a measurement.

    aligned: whether TMA can load both factors. processors: the number of multiprocessors.
    """
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
    splits_to_fill = processors // max(1, PROCESSORS_PER_SPLIT * _tiles(chosen, M, N))
    splits = min(splits_to_fill, MOST_SPLITS, K // SPLIT_K)
    return _replace(chosen, splits=splits) if splits > 1 else chosen


def halve_tiles(configuration: Configuration) -> Configuration:
    """Return the configuration for a gated product: tiles with half the columns.

    The two products' sums then take as many registers as the sum of a full tile. The gate takes a few more: the tiles
    of MIDDLE get 8 warps instead of 4.
    """
    if configuration.tile_n <= 16:
        return configuration
    unsplit = _replace(configuration, splits=1)
    warps = 8 if unsplit == MIDDLE else unsplit.warps
    return _replace(unsplit, tile_n=unsplit.tile_n // 2, parts=max(1, unsplit.parts // 2), warps=warps)


def adapt_to_groups(configuration: Configuration) -> Configuration:
    """Return the configuration for grouped products: K is not split, and tiles of MIDDLE get 8 warps instead of 4.

    A program's search for a tile's group takes registers.
    """
    unsplit = _replace(configuration, splits=1, specialized=False)
    has_middle_tiles = (unsplit.tile_m, unsplit.tile_n, unsplit.warps) == (MIDDLE.tile_m, MIDDLE.tile_n, MIDDLE.warps)
    return _replace(unsplit, warps=8) if has_middle_tiles else unsplit


def adapt_to_kind(kind: ProductKind, configuration: Configuration) -> Configuration:
    """Return the configuration of a plain product, adapted to products of this kind."""
    match kind:
        case "gated":
            return halve_tiles(configuration)
        case "grouped" | "grouped_weights":
            return adapt_to_groups(configuration)
    return configuration


def _tiles(configuration: Configuration, M: int, N: int) -> int:
    """The number of tiles of an output [M, N]."""
    return -(-M // configuration.tile_m) * -(-N // configuration.tile_n)


def _replace(configuration: Configuration, **changes: int) -> Configuration:
    """A copy of the configuration with some fields changed."""
    return Configuration(**(asdict(configuration) | changes))
