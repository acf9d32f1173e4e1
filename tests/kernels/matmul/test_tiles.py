"""The tiles of a product: elements read, counted; the order of the tiles; configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from weft.kernels.launching.traffic import counted_traffic
from weft.kernels.matmul import configurations
from weft.kernels.matmul.configurations import (
    BY_POINTERS,
    EIGHT_BITS,
    FLAT,
    LARGE,
    MIDDLE,
    NOT_ALIGNED,
    ON_AMD,
    SINGLE,
    Configuration,
    choose_by_rule,
)

from .cases import assert_as_good_as_eager, expected, normal

SMALL = Configuration(tile_m=16, tile_n=32, tile_k=16, warps=1, stages=1, group_m=2)
WAYS = {
    "descriptors": SMALL,
    "pointers": replace(SMALL, descriptors=False),
    "in-parts": replace(SMALL, parts=4),
    "split": replace(SMALL, splits=3),
    "split-pointers": replace(SMALL, splits=2, descriptors=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"], ids=["none", "a", "b", "both"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(33, 40, 48), (16, 32, 16), (8, 72, 104), (17, 3, 5)],
    ids=["odd-rows", "one-tile", "odd-tiles", "odd"],
)
def test_each_way_to_cut_a_product(interpreted: None, M: int, N: int, K: int, transposed: str, way: str) -> None:
    from weft.kernels.matmul import launch

    a = normal(K, M, dtype=torch.bfloat16).mT if "a" in transposed else normal(M, K, dtype=torch.bfloat16)
    b = normal(N, K, dtype=torch.bfloat16).mT if "b" in transposed else normal(K, N, dtype=torch.bfloat16)
    bias = normal(N, dtype=torch.bfloat16)
    found, z = (torch.empty(M, N, dtype=torch.bfloat16) for _ in range(2))
    launch.product(a, b, bias, None, None, None, found, z, "silu", configuration=WAYS[way])
    given = (a, b, bias)
    wide = [each.double() for each in given]
    assert_as_good_as_eager(found, expected(*given, "silu"), expected(*wide, "silu"))
    assert_as_good_as_eager(z, expected(*given), expected(*wide))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_sum_is_added_to_in_float32(interpreted: None, splits: int) -> None:
    from weft.kernels.matmul import launch

    a, b, total = normal(20, 48, dtype=torch.bfloat16), normal(48, 24, dtype=torch.bfloat16), normal(20, 24).float()
    truth = total.double() + a.double() @ b.double()
    eager = total + a.float() @ b.float()
    configuration = replace(SMALL, splits=splits)
    launch.product(a, b, None, None, None, None, total, None, accumulate=True, configuration=configuration)
    assert_as_good_as_eager(total, eager, truth)


@pytest.mark.parametrize(("way", "splits"), [("descriptors", 1), ("pointers", 1), ("split", 3)])
def test_a_tile_reads_its_rows_and_columns_once(interpreted: None, way: str, splits: int) -> None:
    """A tile reads its panels once: the floor, times the tiles that share each panel. Masked elements are not read."""
    from weft.kernels.matmul import launch

    M, N, K = 40, 72, 48  # three rows and three columns of tiles, the last ones cut
    a, b = normal(M, K, dtype=torch.float16), normal(K, N, dtype=torch.float16)
    out = torch.empty(M, N, dtype=torch.float16)
    with counted_traffic() as traffic:
        launch.product(a, b, None, None, None, None, out, None, configuration=WAYS[way])
    panels = (3 * M * K + 3 * K * N) * 2  # of the floor (M K + K N) * 2
    partial = 0 if splits == 1 else splits * M * N * 4
    assert traffic.loaded == panels + partial
    assert traffic.stored == M * N * 2 + partial


def order_of(tiles_m: int, tiles_n: int, group_m: int) -> list[tuple[int, int]]:
    """The order of the tiles, as the kernel computes it."""
    from weft.kernels.matmul import kernel

    def place(tile: int) -> tuple[int, int]:
        m, n = kernel.tile_of.fn(tile, tiles_m, tiles_n, group_m)
        return int(m), int(n)

    return [place(tile) for tile in range(tiles_m * tiles_n)]


def panels_of_waves(order: list[tuple[int, int]], programs: int) -> int:
    """Panels of a and b that concurrent programs read, summed over all waves: the L2's traffic from memory."""

    def waves() -> Iterator[list[tuple[int, int]]]:
        for start in range(0, len(order), programs):
            yield order[start : start + programs]

    return sum(len({m for m, _ in wave}) + len({n for _, n in wave}) for wave in waves())


@pytest.mark.parametrize(("tiles_m", "tiles_n", "group_m"), [(7, 5, 3), (1, 9, 8), (8, 8, 8), (64, 32, 8)])
def test_every_tile_has_its_turn_once(interpreted: None, tiles_m: int, tiles_n: int, group_m: int) -> None:
    order = order_of(tiles_m, tiles_n, group_m)
    assert sorted(order) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]


def test_grouped_tiles_share_panels_in_the_l2(interpreted: None) -> None:
    """8192 x 8192 in tiles of 128 x 256 on an H100's 132 multiprocessors takes 16 waves.

    This is a model of the tiles' order, not a measurement.
    """
    rows, grouped = (panels_of_waves(order_of(64, 32, group_m), 132) for group_m in (1, LARGE.group_m))
    least = 16 * 2 * 132**0.5  # of squares of tiles
    assert rows == 590
    assert grouped == 448
    assert grouped <= 1.25 * least


def test_a_chip_gets_what_it_can_run() -> None:
    bf16 = 2
    assert choose_by_rule("sm_90", bf16, True, 8192, 8192, 4096, 132) is LARGE
    assert choose_by_rule("sm_90", bf16, True, 1024, 2048, 512, 132) is MIDDLE
    assert choose_by_rule("sm_90", bf16, False, 8192, 8191, 4096, 132) is NOT_ALIGNED
    assert choose_by_rule("sm_80", bf16, True, 8192, 8192, 4096, 108) is BY_POINTERS
    assert choose_by_rule("gfx942", bf16, True, 8192, 8192, 4096, 304) is ON_AMD
    assert choose_by_rule("sm_90", 4, True, 8192, 8192, 4096, 132) is SINGLE
    assert choose_by_rule("sm_90", 1, True, 8192, 8192, 4096, 132) is EIGHT_BITS
    assert choose_by_rule("sm_90", bf16, True, 16, 4096, 512, 132) is FLAT


def test_k_is_split_where_tiles_are_too_few() -> None:
    chosen = choose_by_rule("sm_90", 2, True, 128, 512, 16384, 132)
    assert chosen.splits == configurations.MOST_SPLITS
    assert choose_by_rule("sm_90", 2, True, 128, 512, 1024, 132).splits == 1  # short sums


def test_warps_are_specialized_with_four_of_them_alone() -> None:
    with pytest.raises(ValueError, match="give warps=4, parts=1"):
        replace(LARGE, specialized=True)
    with pytest.raises(ValueError, match="tile_m is 48; give a power of two"):
        replace(LARGE, tile_m=48)
