"""Repeated computations give the same bits, forward and backward: no sum depends on which program comes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.mesh import Layout
from weft.reshard import distribute

from tests.kernels.cases import TWO, normal
from tests.kernels.matmul.test_tiles import SMALL
from tests.support.pool import Pool

REPEATS = 3


def found(run: Callable[..., Tensor | Sequence[Tensor]], *given: Tensor) -> list[Tensor]:
    """The outputs and all gradients."""
    leaves = [each.detach().requires_grad_() for each in given]
    outputs = run(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    upstream = [normal(*each.shape, seed=7 + i).to(each) for i, each in enumerate(outputs)]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def grouped(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    ends = torch.tensor([5, 5, 25], dtype=torch.int32, device=a.device)
    return kernels.grouped_matmul(a, b, ends, bias=bias, activation="silu")


def mixed(x: Tensor, *operands: Tensor) -> Tensor:
    """Two of three experts for each token."""
    chosen = torch.arange(2 * len(x), device=x.device).reshape(-1, 2) % 3
    return kernels.experts(x, chosen, *operands)


OPS: dict[str, tuple[Callable[..., Tensor | Sequence[Tensor]], tuple[tuple[int, ...], ...]]] = {
    "matmul": (lambda a, b, bias: kernels.matmul(a, b, bias=bias, activation="gelu"), ((20, 96), (96, 24), (24,))),
    "grouped_matmul": (grouped, ((26, 40), (3, 40, 24), (3, 24))),
    "experts": (mixed, ((26, 40), (26, 2), (3, 24, 40), (3, 24, 40), (3, 40, 24))),
    "swiglu_linear": (kernels.swiglu_linear, ((20, 40), (24, 40), (24, 40))),
    "qkv_linear": (kernels.qkv_linear, ((20, 40), (24, 40), (12, 40), (12, 40), (24,), (12,), (12,))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_an_op_and_its_gradients(name: str, dtype: torch.dtype, device: str) -> None:
    run, shapes = OPS[name]
    given = [normal(*shape, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]
    first = found(run, *given)
    for _ in range(REPEATS - 1):
        for one, other in zip(found(run, *given), first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("splits", [2, 3])
def test_a_product_in_splits(splits: int, interpreted: None) -> None:
    """The splits are added in their own order, whichever is done first: a reversed order would give another sum."""
    from weft.kernels.matmul import launch

    a, b = normal(20, 96).float() * 10.0 ** torch.arange(96).remainder(7), normal(96, 24).float()
    outs = [torch.empty(20, 24) for _ in range(REPEATS)]
    for out in outs:
        launch.product(a, b, None, None, None, None, out, None, configuration=replace(SMALL, splits=splits))
    assert all(torch.equal(out, outs[0]) for out in outs)
    size = -(-96 // splits)
    parts = [launched(a[:, start : start + size], b[start : start + size]) for start in range(0, 96, size)]
    in_order, total = torch.zeros(20, 24), torch.zeros(20, 24)
    for part in parts:
        in_order += part
    for part in reversed(parts):
        total += part
    assert torch.equal(outs[0], in_order)
    assert splits == 2 or not torch.equal(outs[0], total)


def launched(a: Tensor, b: Tensor) -> Tensor:
    from weft.kernels.matmul import launch

    out = torch.empty(len(a), b.shape[1])
    launch.product(a, b, None, None, None, None, out, None, configuration=SMALL)
    return out


def scattered() -> list[list[Tensor]]:
    a, b = (
        distribute(normal(6, 8).bfloat16(), Layout(TWO, "tp: S(1)")),
        distribute(normal(8, 10).bfloat16(), Layout(TWO, "tp: S(0)")),
    )
    times = []
    for _ in range(REPEATS):
        leaves = [each.detach().requires_grad_() for each in (a, b)]
        out = kernels.matmul_reduce_scatter(*leaves)
        upstream = distribute(normal(6, 10, seed=7).bfloat16(), Layout(TWO, "tp: S(0)"))
        times.append([each.to_local().detach() for each in (out, *torch.autograd.grad(out, leaves, upstream))])  # type: ignore[attr-defined]
    return times


def test_a_sum_over_ranks(pool: Pool) -> None:
    for first, *others in pool.run(scattered, ranks=2):
        for other in others:
            assert all(torch.equal(one, two) for one, two in zip(other, first, strict=True))
