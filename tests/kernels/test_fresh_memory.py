"""`fresh_memory`: an operand in memory as torch allocates it, on whose address and strides a product's bits depend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft.kernels.dispatch.backend import ALIGNMENT, fresh_memory

WHOLE = torch.arange(4 * 6 * 16, dtype=torch.float32).view(4, 6, 16)
VIEWS = {
    "whole": WHOLE,
    "rows": WHOLE[1:3],
    "columns": WHOLE[..., 3:7],
    "from an odd address": WHOLE.view(-1)[3:19],
    "transposed": WHOLE.mT,
    "a row, with the strides of the whole": WHOLE[2:3, 0:4],
    "a row and an odd address": WHOLE[2:3, 1:4, :],
    "empty": WHOLE[2:2],
    "scalar": WHOLE[0, 0, 0],
}


def as_allocated(tensor: Tensor) -> bool:
    new = torch.empty(tensor.shape, dtype=tensor.dtype)
    return tensor.stride() == new.stride() and (not tensor.numel() or tensor.data_ptr() % ALIGNMENT == 0)


@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_as_torch_allocates_it(name: str) -> None:
    fresh = fresh_memory(VIEWS[name])
    assert torch.equal(fresh, VIEWS[name])
    assert as_allocated(fresh)


@pytest.mark.parametrize("name", ["whole", "rows", "a row, with the strides of the whole", "scalar"])
def test_nothing_is_copied_where_the_address_is_aligned(name: str) -> None:
    assert fresh_memory(VIEWS[name]).data_ptr() == VIEWS[name].data_ptr()


def test_a_product_rounds_as_on_new_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 5, generator=generator, dtype=torch.float64)
    w = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    for rows in (slice(0, 3), slice(3, 5), slice(1, 4)):
        new = torch.empty(1, rows.stop - rows.start, 5, dtype=torch.float64).copy_(x[:, rows])
        assert torch.equal(torch.nn.functional.linear(fresh_memory(x[:, rows]), w), torch.nn.functional.linear(new, w))
