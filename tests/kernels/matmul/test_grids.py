"""How many programs are launched, and for which chips: without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.kernels import matmul
from weft.kernels.dispatch.backend import multiplies
from weft.kernels.matmul import function, reference

from .cases import assert_as_good_as_eager, expected, normal
from .test_tiles import SMALL

LIMIT = 65_535  # of a grid's second and third dims: CUDA's programming guide, technical specifications


class Grids:
    """Stands for a kernel: keeps its grids, and the first argument of each launch, and launches nothing."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, ...], Tensor]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda first, *arguments, **options: self.launched.append((grid, first))


@pytest.mark.parametrize("splits", [1, 2])
def test_batches_beyond_a_grid_are_launched_in_parts(
    interpreted: None, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.kernels.matmul import launch

    products, sums = Grids(), Grids()
    monkeypatch.setattr(launch.kernel, "product", products)
    monkeypatch.setattr(launch.kernel, "combine", sums)
    a, b, out = (torch.empty(1, dtype=torch.bfloat16).expand(70_000, *sizes) for sizes in ((2, 32), (32, 3), (2, 3)))
    launch.product(a, b, None, None, None, None, out, None, configuration=replace(SMALL, splits=splits))
    assert [grid for grid, _ in products.launched] == [(1, LIMIT, splits), (1, 70_000 - LIMIT, splits)]
    assert [grid for grid, _ in sums.launched] == [(1, 1, LIMIT), (1, 1, 70_000 - LIMIT)] * (splits - 1)


@pytest.mark.parametrize(
    ("tiles", "batches", "splits", "programs"),
    [
        pytest.param(1000, 1, 1, 132, id="a-program-a-processor"),
        pytest.param(5, 1, 1, 5, id="few-tiles"),
        pytest.param(1000, 3, 4, 11, id="shared"),
        pytest.param(1000, LIMIT, 1, 1, id="more-products-than-processors"),
    ],
)
def test_the_processors_are_shared_by_the_products(tiles: int, batches: int, splits: int, programs: int) -> None:
    from weft.kernels.matmul import launch

    assert launch.grid(tiles, 132, batches, splits) == (programs, batches, splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_are_those_of_all_batches(interpreted: None, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.matmul import launch

    monkeypatch.setattr(launch, "MOST_IN_GRID", 3)
    a, b, bias = (normal(*shape, dtype=torch.bfloat16) for shape in ((5, 4, 48), (5, 48, 8), (8,)))
    residual = normal(5, 4, 8, dtype=torch.bfloat16, seed=1)
    out, z = torch.empty_like(residual), torch.empty_like(residual)
    launch.product(a, b, bias, residual, None, None, out, z, "silu", configuration=replace(SMALL, splits=splits))
    given = (a, b, bias, "silu", residual)
    wide = [each.double() if isinstance(each, Tensor) else each for each in given]
    assert_as_good_as_eager(out, expected(*given), expected(*wide))
    assert_as_good_as_eager(z, expected(*given[:3]), expected(*wide[:3]))


def test_groups_beyond_a_grid_are_launched_in_parts(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.grouped_matmul import launch

    sums = Grids()
    monkeypatch.setattr(launch.kernel, "weights_by_group", sums)
    a, grad = torch.empty(4, 2), torch.empty(4, 3)
    out = torch.empty(1).expand(70_000, 2, 3)
    launch.weights(a, grad, torch.zeros(70_000, dtype=torch.int32), out, configuration=SMALL)
    assert [grid for grid, _ in sums.launched] == [(1, LIMIT), (1, 70_000 - LIMIT)]


def test_parts_of_groups_are_those_of_all(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.kernels.grouped_matmul import launch
    from weft.kernels.matmul import launch as products

    for each in (launch, products):
        monkeypatch.setattr(each, "MOST_IN_GRID", 2)
    sizes = [3, 0, 5, 1, 2]
    a, grad = normal(12, 6, dtype=torch.float32), normal(12, 8, dtype=torch.float32)
    out = torch.empty(5, 6, 8)
    launch.weights(
        a, grad, torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32), out, configuration=SMALL
    )
    parts = [each.split([*sizes, 1])[:-1] for each in (a, grad)]
    for g, (rows, of_grad) in enumerate(zip(*parts, strict=True)):
        assert_as_good_as_eager(out[g], rows.mT @ of_grad, rows.double().mT @ of_grad.double())


TRITONS = {
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16"
}  # fmt: skip


@pytest.mark.parametrize("chip", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_triton_is_asked_for_what_it_compiles_alone(chip: str) -> None:
    from triton.backends.compiler import GPUTarget

    if chip.startswith("sm_"):
        from triton.backends.nvidia.compiler import CUDABackend

        options = CUDABackend(GPUTarget("cuda", int(chip[3:]), 32)).parse_options({})
    else:
        from triton.backends.amd.compiler import HIPBackend

        options = HIPBackend(GPUTarget("hip", chip, 64)).parse_options({})
    for dtype, name in TRITONS.items():
        assert multiplies(chip, dtype) == (name in options.supported_fp8_dtypes), dtype
    assert multiplies(chip, torch.bfloat16)


@pytest.mark.parametrize(("chip", "uses_kernel"), [("sm_80", False), ("sm_90", True)])
def test_factors_that_a_chip_has_not_take_the_torch_path(
    chip: str, uses_kernel: bool, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (function, reference):
        monkeypatch.setattr(module, "chip_of", lambda device: (chip, 108))
    monkeypatch.setattr(function, "MEASURED", {})
    with FakeTensorMode():
        a, b = (torch.empty(16, 16, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2))
        assert function.uses_kernel(a, b, "fused") == function.compiles(a, b) == uses_kernel
        assert function.compiles(a.to(torch.float8_e5m2), b.to(torch.float8_e5m2))
        assert matmul(a, b).dtype == torch.bfloat16
