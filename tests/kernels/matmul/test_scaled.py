"""torch's GEMM of 8-bit factors instead of the kernel: the products that it takes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.kernels import matmul
from weft.kernels.matmul import configurations, function, reference
from weft.kernels.matmul.configurations import kind_of

from .cases import assert_as_good_as_eager, needs_scaled_rows, normal

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 24, 32, 48


def factors(a: torch.dtype = E4M3, b: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """a by rows, b by columns."""
    return normal(M, K).to(a), normal(N, K, seed=1).to(b).mT


def scales(kind: str) -> tuple[Tensor | None, Tensor | None]:
    of_rows, of_columns = (normal(size, dtype=torch.float32, seed=size).abs() for size in (M, N))
    one, other = torch.tensor(0.5), torch.tensor(3.0)
    return {
        "none": (None, None),
        "numbers": (one, other),
        "rows": (of_rows, of_columns),
        "rows-of-one": (of_rows, other),
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["none", "numbers", *(pytest.param(kind, marks=needs_scaled_rows) for kind in ("rows", "rows-of-one"))]
)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "not-aligned"])
def test_scaled_mm_gives_the_scaled_product(aligned: bool, kind: str) -> None:
    a, b = factors()
    if not aligned:
        a, b = (torch.cat([each.flatten()[:1], each.flatten()])[1:].view(each.shape) for each in (a, b.mT))
        b = b.mT
    of_a, of_b = scales(kind)
    truth = a.double() @ b.double()
    truth = truth if of_a is None else truth * (of_a[:, None] if of_a.ndim else of_a).double()
    truth = truth if of_b is None else truth * of_b.double()
    found = reference.scaled_product(a, b, of_a, of_b, torch.bfloat16)
    assert_as_good_as_eager(found, truth.bfloat16(), truth)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (function, reference):
        monkeypatch.setattr(module, "chip_of", lambda device: ("sm_90", 132))


def fake(rows: int, cols: int, dtype: torch.dtype = E4M3, transposed: bool = False) -> Tensor:
    return (
        torch.empty(cols, rows, dtype=dtype, device="cuda").mT
        if transposed
        else torch.empty(rows, cols, dtype=dtype, device="cuda")
    )


@pytest.mark.parametrize(
    ("a", "b", "kind", "dtype", "taken"),
    [
        pytest.param({}, {}, "numbers", torch.float32, True, id="one-scale-each"),
        pytest.param({}, {}, "rows", torch.bfloat16, True, id="a-scale-a-row"),
        pytest.param({}, {}, "rows", torch.float32, False, id="rows-to-float32"),
        pytest.param({"dtype": E5M2}, {}, "rows", torch.bfloat16, True, id="e5m2-e4m3"),
        pytest.param({"dtype": E5M2}, {"dtype": E5M2}, "numbers", torch.bfloat16, False, id="two-of-e5m2"),
        pytest.param({"transposed": True}, {}, "numbers", torch.bfloat16, False, id="a-by-columns"),
        pytest.param({}, {"transposed": False}, "numbers", torch.bfloat16, False, id="b-by-rows"),
        pytest.param({}, {"cols": 17}, "numbers", torch.bfloat16, False, id="odd"),
        pytest.param({"rows": 0}, {}, "numbers", torch.bfloat16, False, id="empty"),
        pytest.param({"rows": 1}, {}, "numbers", torch.bfloat16, True, id="one-row"),
    ],
)
def test_can_multiply_knows_the_operands_that_torch_takes(
    a: dict[str, Any], b: dict[str, Any], kind: str, dtype: torch.dtype, taken: bool, on_hopper: None
) -> None:
    given = scales(kind)
    with FakeTensorMode():
        left, right = fake(**{"rows": M, "cols": K} | a), fake(**{"rows": K, "cols": N, "transposed": True} | b)
        assert reference.can_multiply(left, right, *given, dtype) == taken


def test_an_older_chip_and_a_cpu_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reference.can_multiply(*factors(), None, None, torch.bfloat16)
    monkeypatch.setattr(reference, "chip_of", lambda device: ("sm_80", 108))
    with FakeTensorMode():
        assert not reference.can_multiply(fake(M, K), fake(K, N, transposed=True), None, None, torch.bfloat16)


@needs_scaled_rows
def test_torchs_scaled_mm_runs_where_the_kernel_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.dtype] = []

    def product(*arguments: Any) -> Tensor:
        calls.append(arguments[-1])
        return scaled_product(*arguments)

    scaled_product = reference.scaled_product
    monkeypatch.setattr(reference, "can_multiply", lambda *arguments: True)
    monkeypatch.setattr(reference, "scaled_product", product)
    a, b = factors()
    of_a, of_b = scales("rows")
    assert of_a is not None and of_b is not None
    bias = normal(N, dtype=torch.bfloat16)
    found = matmul(a, b, bias=bias, a_scale=of_a, b_scale=of_b, activation="relu")
    z = a.double() @ b.double() * of_a[:, None].double() * of_b.double()
    truth = (z + bias.double()).clamp(min=0)
    assert calls == [torch.bfloat16]
    assert_as_good_as_eager(found, (z.bfloat16() + bias).clamp(min=0), truth)


def test_scales_of_all_elements_and_of_rows_are_two_classes() -> None:
    """torch's GEMM is faster with one scale than with scales of rows."""
    a, _ = factors()
    numbers, rows = scales("numbers"), scales("rows")
    assert kind_of(a, None, 1.0) == kind_of(a, "gelu", 1.0, None, *numbers) == "one_scale"
    assert kind_of(a, None, 1.0, None, *rows) == "fused"
    assert kind_of(a.bfloat16(), None, 1.0) == "plain"


def test_unmeasured_products_with_a_scale_use_the_kernel(on_hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "MEASURED", {})
    with FakeTensorMode():
        a, b = fake(M, K), fake(K, N, transposed=True)
        assert function.uses_kernel(a, b, "one_scale") and function.uses_kernel(a, b, "fused")
        assert not function.uses_kernel(a, b, "plain")
    assert set(configurations.ONE_PASS) == {"fused", "one_scale"}
