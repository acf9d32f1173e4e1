"""Ops on tensors without data: shapes and dtypes, of outputs and of gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft import kernels

from tests.kernels.cases import ints, normal
from tests.kernels.test_incoming_gradients import OPS

LOGITS = (normal(6, 5, 8),)
MORE: dict[str, tuple[Callable[..., Tensor], Tensor | None, tuple[Tensor, ...]]] = {
    "rope": (lambda _, x, cos, sin: kernels.rope(x, cos, sin), None, (normal(6, 5, 8), normal(5, 2), normal(5, 2))),
    "rms_norm_rope": (
        lambda _, x, weight, cos, sin: kernels.rms_norm_rope(x, weight, cos, sin),
        None,
        (normal(6, 5, 8), normal(4), normal(5, 2), normal(5, 2)),
    ),
    "dropout": (lambda key, x: kernels.dropout(x, 0.5, key), torch.tensor(3, dtype=torch.uint64), LOGITS),
    "dropout-in-order": (
        lambda key, x: kernels.dropout(x, 0.5, key, order=((3, 5), (0, 3))),
        torch.tensor(3, dtype=torch.uint64),
        LOGITS,
    ),
    "dropout-residual": (
        lambda key, x, residual: kernels.dropout(x, 0.5, key, residual=residual),
        torch.tensor(3, dtype=torch.uint64),
        (normal(6, 5, 8), normal(6, 5, 8, seed=1)),
    ),
    "dropout-int": (lambda _, x: kernels.dropout(x, 0.5, 3), None, LOGITS),
    "cross_entropy-mean": (lambda ids, x: kernels.cross_entropy(x, ids, z_loss=0.1), ints(8, 6, 5), LOGITS),
    "cross_entropy-all": (
        lambda ids, x, weight: kernels.cross_entropy(
            x, ids, weight=weight.detach(), label_smoothing=0.1, z_loss=0.1, softcap=2.0, return_lse=True
        )[0],
        ints(8, 6, 5),
        (normal(6, 5, 8), normal(8)),
    ),
    "linear_cross_entropy-mean": (
        lambda ids, x, weight, bias: kernels.linear_cross_entropy(x, weight, ids, linear_bias=bias, chunk_tokens=7),
        ints(8, 6, 5),
        (normal(6, 5, 8), normal(8, 8), normal(8)),
    ),
}
CASES = {**OPS, **MORE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["fake", "meta"])
@pytest.mark.parametrize("name", CASES)
def test_an_op(name: str, way: str, dtype: torch.dtype) -> None:
    run, ids, tensors = CASES[name]
    operands = [each.to(dtype) for each in tensors]
    expected = found(run, ids, operands)
    mode = FakeTensorMode()
    without_data: Callable[[Tensor], Tensor] = (
        mode.from_tensor if way == "fake" else partial(torch.Tensor.to, device="meta")
    )
    operands = [without_data(each) for each in operands]
    if ids is not None and (not name.startswith("dropout") or way == "fake"):  # a key lies on the CPU
        ids = without_data(ids)
    with mode if way == "fake" else nullcontext():
        made = found(run, ids, operands)
    assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in expected]


def found(run: Callable[..., Tensor], ids: Tensor | None, operands: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in operands]
    output = run(ids, *leaves)
    gradients = torch.autograd.grad(output.sum(), leaves, allow_unused=True)
    return [output, *(each for each in gradients if each is not None)]
