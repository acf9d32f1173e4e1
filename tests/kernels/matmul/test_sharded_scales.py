"""Factors of 8 bits on a mesh: scales lie as the rows of a, and as the columns of b."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels import matmul
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute, layout_of, to_global

from tests.kernels.cases import TWO
from tests.support.pool import Pool

from .cases import assert_as_good_as_eager, normal

M, N, K = 5, 7, 6  # uneven over two
A, B = normal(M, K).to(torch.float8_e4m3fn), normal(K, N).to(torch.float8_e5m2)
SCALES = {
    "rows": (normal(M, dtype=torch.float32).abs(), normal(N, dtype=torch.float32).abs()),
    "numbers": (torch.tensor(0.5), torch.tensor(3.0)),
}
# How a and b lie, their scales of a number for each row and column, and the output.
LAID = {
    "columns": ("tp: R", "tp: S(1)", "tp: R", "tp: S(0)", "tp: S(1)"),
    "rows": ("tp: S(0)", "tp: R", "tp: S(0)", "tp: R", "tp: S(0)"),
    "inner": ("tp: S(1)", "tp: S(0)", "tp: R", "tp: R", "tp: P(sum)"),
}


def product(cut: str, scales: str) -> tuple[str, Tensor]:
    of_a, of_b, *of_scales, _ = LAID[cut]
    if scales == "numbers":
        of_scales = ["tp: R", "tp: R"]
    a, b = distribute(A, Layout(TWO, of_a)), distribute(B, Layout(TWO, of_b))
    a_scale, b_scale = (distribute(each, Layout(TWO, of)) for each, of in zip(SCALES[scales], of_scales, strict=True))
    found = matmul(a, b, a_scale=a_scale, b_scale=b_scale, out_dtype=torch.float32)
    return str(layout_of(found)), to_global(found)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cut", LAID)
def test_scales_lie_as_what_they_scale(pool: Pool, cut: str, scales: str) -> None:
    a_scale, b_scale = (each.double() for each in SCALES[scales])
    left, right = A.double() * (a_scale[:, None] if a_scale.ndim else a_scale), B.double() * b_scale
    for layout, found in pool.run(product, cut, scales, ranks=2):
        assert layout == LAID[cut][-1]
        assert found.dtype == torch.float32
        assert_as_good_as_eager(found, left.float() @ right.float(), left @ right)


def lying_otherwise() -> list[str]:
    a, b = distribute(A, Layout(TWO, "tp: S(0)")), distribute(B, Layout(TWO))
    whole = [distribute(each, Layout(TWO)) for each in SCALES["rows"]]
    cut = distribute(SCALES["rows"][1], Layout(TWO, "tp: S(0)"))
    messages = []
    for scales in ({"a_scale": whole[0]}, {"b_scale": cut}):
        with pytest.raises(LayoutError) as caught:
            matmul(a, b, **scales)
        messages.append(str(caught.value))
    return messages


def test_scales_that_lie_otherwise_name_the_reshard(pool: Pool) -> None:
    for of_a, of_b in pool.run(lying_otherwise, ranks=2):
        assert "reshard the a_scale to (tp: S(0))" in of_a
        assert "reshard the b_scale to (tp: R)" in of_b
