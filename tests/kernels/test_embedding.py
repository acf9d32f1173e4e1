"""embedding by kernels and in plain torch: rows, their gradients in one order, and bytes moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.kernels.embedding import function
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.cases import ints, normal

V, H = 11, 20


def gradient_by_one_hot(tokens: Tensor, grad: Tensor, padding_idx: int | None) -> Tensor:
    one_hot = torch.nn.functional.one_hot(tokens.flatten(), V).double()
    found = one_hot.T @ grad.double().reshape(-1, H)
    if padding_idx is not None:
        found[padding_idx] = 0
    return found


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize(
    "tokens", [ints(V, 6, 5), ints(V, 0), ints(2, 40), torch.tensor(4)], ids=["some", "none", "two", "one"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_rows_and_the_sums_of_their_gradients(
    dtype: torch.dtype, tokens: Tensor, padding_idx: int | None, device: str
) -> None:
    weight = normal(V, H).to(device, dtype).requires_grad_()
    y = kernels.embedding(tokens.to(device), weight, padding_idx=padding_idx)
    assert torch.equal(y.detach().cpu(), weight.detach().cpu()[tokens])
    upstream = normal(*y.shape, seed=1).to(device, dtype)
    (first,), (second,) = (torch.autograd.grad(y, weight, upstream, retain_graph=True) for _ in range(2))
    truth = gradient_by_one_hot(tokens, upstream.cpu(), padding_idx)
    assert torch.equal(first, second)
    torch.testing.assert_close(first.cpu().double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_parts_of_a_table_add_up_to_it(padding_idx: int | None, device: str) -> None:
    tokens, weight = ints(V, 6, 5).to(device), normal(V, H).float().to(device)
    upstream = normal(6, 5, H, seed=1).float().to(device)
    total, rows = torch.zeros(6, 5, H, device=device), []
    for start, stop in ((0, 4), (4, 4), (4, V)):
        options = {"vocab_start": start, "vocab_size": V, "padding_idx": padding_idx}
        y, saved = function.forward(tokens, weight[start:stop], **options)
        total += y
        rows.append(function.backward(saved, upstream, (False, True), **options)[1])
    assert torch.equal(total, weight[tokens])
    truth = gradient_by_one_hot(tokens.cpu(), upstream.cpu(), padding_idx)
    torch.testing.assert_close(torch.cat(rows).cpu().double(), truth, rtol=1e-6, atol=1e-6)


def test_a_rank_reads_its_own_rows_alone(interpreted: None) -> None:
    tokens, weight = torch.tensor([0, 9, 3, 9]), normal(4, 512).bfloat16().requires_grad_()
    row = 2 * 512
    with counted_traffic() as forward:
        y, saved = function.forward(tokens, weight, vocab_start=0, vocab_size=V)
    assert (forward.loaded, forward.stored) == (2 * row + 4 * 8, 4 * row)
    with counted_traffic() as backward:
        function.backward(saved, torch.ones_like(y), (False, True), vocab_start=0, vocab_size=V)
    assert (backward.loaded, backward.stored) == (2 * row + 2 * 8 + 4 * 2 * 8, 4 * row)
