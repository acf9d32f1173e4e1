"""A backward takes every layout of the incoming gradient from which the one that it needs follows without communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.mesh import Layout
from weft.reshard import distribute, to_global

from tests.kernels.cases import FOUR, GRID, ints, normal
from tests.support.collectives import Collectives
from tests.support.pool import Pool

TABLES = normal(5, 2), normal(5, 2)
OPS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (lambda x, w: kernels.linear(x, w), (normal(6, 5, 8), normal(4, 8))),
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w), (normal(6, 5, 8), normal(8))),
    "rope": (lambda x: kernels.rope(x, *TABLES), (normal(6, 5, 8),)),
    "swiglu": (kernels.swiglu, (normal(6, 5, 8), normal(6, 5, 8))),
    "add": (kernels.add, (normal(6, 5, 8), normal(6, 5, 8))),
    "attention": (lambda q, k, v: kernels.attention(q, k, v, head_dim=4), (normal(6, 5, 8),) * 3),
    "dropout": (lambda x: kernels.dropout(x, 0.5, 3), (normal(6, 5, 8),)),
    "embedding": (lambda w: kernels.embedding(tokens_like(w), w), (normal(11, 8),)),
    "cross_entropy": (lambda x: kernels.cross_entropy(x, classes_like(x), reduction="none"), (normal(6, 5, 8),)),
    "linear_cross_entropy": (
        lambda x, w: kernels.linear_cross_entropy(x, w, classes_like(x), reduction="none"),
        (normal(6, 5, 8), normal(8, 8)),
    ),
}


def beside(ids: Tensor, like: Tensor) -> Tensor:
    """Ids whose rows are sharded, beside a DTensor."""
    return distribute(ids, Layout(like.device_mesh, ROWS)) if isinstance(like, DTensor) else ids


def tokens_like(weight: Tensor) -> Tensor:
    return beside(ints(11, 6, 5), weight)


def classes_like(x: Tensor) -> Tensor:
    return beside(ints(8, 6, 5), x)


ROWS = "tp: S(0)"


def mean_of_the_output(name: str) -> None:
    """torch gives the gradient of a mean whole, and each rank leaves out what is not its own."""
    run, tensors = OPS[name]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    run(*plain).mean().backward()
    rows = Layout(FOUR, ROWS)
    activations = [tensor.shape[:1] == (6,) for tensor in tensors]
    laid = [
        distribute(tensor, rows if sharded else Layout(FOUR)).requires_grad_()
        for tensor, sharded in zip(tensors, activations, strict=True)
    ]
    mean = run(*laid).mean()
    with Collectives() as seen:
        mean.backward()
    assert seen.kinds == []
    for one, other in zip(laid, plain, strict=True):
        torch.testing.assert_close(to_global(one.grad), other.grad)


@pytest.mark.parametrize("name", OPS)
def test_the_mean_of_a_sharded_output_has_a_backward(pool: Pool, name: str) -> None:
    pool.run(mean_of_the_output, name, ranks=4)


def sliced_by_two_axes() -> None:
    x = normal(6, 5, 8)
    laid = distribute(x, Layout(GRID, "tp: S(0), dp: S(0)")).requires_grad_()
    kernels.swiglu(laid, laid).backward(distribute(normal(6, 5, 8, seed=1), Layout(GRID)))
    plain = x.clone().requires_grad_()
    kernels.swiglu(plain, plain).backward(normal(6, 5, 8, seed=1))
    torch.testing.assert_close(to_global(laid.grad), plain.grad)


def test_a_whole_gradient_is_cut_in_the_order_of_the_output(pool: Pool) -> None:
    pool.run(sliced_by_two_axes, ranks=4)


def refused() -> str:
    laid = distribute(normal(6, 5, 8), Layout(FOUR, "tp: S(0)")).requires_grad_()
    with pytest.raises(ValueError) as caught:
        kernels.add(laid, laid).backward(distribute(normal(6, 5, 8), Layout(FOUR, "tp: S(1)")))
    return str(caught.value)


def test_a_gradient_that_would_have_to_travel_is_refused(pool: Pool) -> None:
    for message in pool.run(refused, ranks=4):
        assert "reshard the output before it is used, so that its gradient comes as (tp: S(0))" in message
