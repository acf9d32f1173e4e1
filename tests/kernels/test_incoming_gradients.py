"""A backward takes every layout of the incoming gradient from which the one that it needs follows without communication."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.kernels.packing import pack, unpack
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, to_global

from tests.kernels.cases import FOUR, GRID, ints, normal
from tests.support.collectives import Collectives
from tests.support.pool import Pool

TABLES = normal(5, 2), normal(5, 2)
KEY = torch.tensor(3, dtype=torch.uint64)
TOKENS, CLASSES = ints(11, 6, 5), ints(8, 6, 5)
# What runs, given the ids of rows that are sharded, and its operands: those with 6 rows are sharded.
OPS: dict[str, tuple[Callable[..., Tensor], Tensor | None, tuple[Tensor, ...]]] = {
    "linear": (lambda _, x, w: kernels.linear(x, w), None, (normal(6, 5, 8), normal(4, 8))),
    "linear-gelu": (lambda _, x, w: kernels.linear(x, w, activation="gelu"), None, (normal(6, 5, 8), normal(4, 8))),
    "matmul": (
        lambda _, a, b, bias, residual: kernels.matmul(
            a, b, bias=bias, activation="silu", residual=residual, alpha=0.5
        ),
        None,
        (normal(6, 5, 8), normal(8, 4), normal(4), normal(6, 5, 4)),
    ),
    "swiglu_linear": (
        lambda _, *tensors: kernels.swiglu_linear(*tensors),
        None,
        (normal(6, 5, 8), normal(4, 8), normal(4, 8, seed=1)),
    ),
    "rms_norm": (lambda _, x, w: kernels.rms_norm(x, w), None, (normal(6, 5, 8), normal(8))),
    "rms_norm-heads": (lambda _, x, w: kernels.rms_norm(x, w, head_dim=4), None, (normal(6, 5, 8), normal(4))),
    "layer_norm": (lambda _, *tensors: kernels.layer_norm(*tensors), None, (normal(6, 5, 8), normal(8), normal(8))),
    "add_rms_norm": (
        lambda _, *tensors: kernels.add(*kernels.add_rms_norm(*tensors)),
        None,
        (normal(6, 5, 8), normal(6, 5, 8), normal(8)),
    ),
    "add_layer_norm": (
        lambda _, *tensors: kernels.add(*kernels.add_layer_norm(*tensors)),
        None,
        (normal(6, 5, 8), normal(6, 5, 8), normal(8), normal(8)),
    ),
    "rms_norm_rope": (
        lambda _, x, w: kernels.rms_norm_rope(x, w, *TABLES),
        None,
        (normal(6, 5, 8), normal(4)),
    ),
    "geglu": (lambda _, x, y: kernels.geglu(x, y), None, (normal(6, 5, 8), normal(6, 5, 8))),
    "gelu": (lambda _, x: kernels.gelu(x), None, (normal(6, 5, 8),)),
    "rope": (lambda _, x: kernels.rope(x, *TABLES), None, (normal(6, 5, 8),)),
    "swiglu": (lambda _, x, y: kernels.swiglu(x, y), None, (normal(6, 5, 8), normal(6, 5, 8))),
    "add": (lambda _, x, y: kernels.add(x, y), None, (normal(6, 5, 8), normal(6, 5, 8))),
    "add-repeated": (lambda _, x, y: kernels.add(x, y), None, (normal(6, 5, 8), normal(5, 8))),
    "attention": (lambda _, q, k, v: kernels.attention(q, k, v, head_dim=4), None, (normal(6, 5, 8),) * 3),
    "attention-in-order": (
        lambda _, q, k, v: kernels.attention(q, k, v, head_dim=4, order=((3, 5), (0, 3))),
        None,
        (normal(6, 5, 8),) * 3,
    ),
    "dropout": (lambda _, x: kernels.dropout(x, 0.5, KEY), None, (normal(6, 5, 8),)),
    "dropout-residual": (
        lambda _, x, y: kernels.dropout(x, 0.5, KEY, residual=y),
        None,
        (normal(6, 5, 8), normal(6, 5, 8)),
    ),
    "dropout-in-order": (
        lambda _, x: kernels.dropout(x, 0.5, KEY, order=((3, 5), (0, 3))),
        None,
        (normal(6, 5, 8),),
    ),
    "pack": (lambda _, x, y: pack(x, y, parts=2), None, (normal(6, 5, 8), normal(6, 5, 4))),
    "unpack": (lambda _, x: unpack(x, (4, 2))[0], None, (normal(6, 5, 2, 6),)),
    "embedding": (kernels.embedding, TOKENS, (normal(11, 8),)),
    "cross_entropy": (lambda ids, x: kernels.cross_entropy(x, ids, reduction="none"), CLASSES, (normal(6, 5, 8),)),
    "linear_cross_entropy": (
        lambda ids, x, w: kernels.linear_cross_entropy(x, w, ids, reduction="none"),
        CLASSES,
        (normal(6, 5, 8), normal(8, 8)),
    ),
}
ROWS = "tp: S(0)"


def laid_out(mesh: ProcessMesh, ids: Tensor | None, tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, list[Tensor]]:
    """Those with 6 rows sharded on them, the others whole."""
    rows = Layout(mesh, ROWS)
    laid = [distribute(tensor, rows if tensor.shape[:1] == (6,) else Layout(mesh)) for tensor in tensors]
    return None if ids is None else distribute(ids, rows), laid


def mean_of_the_output(name: str) -> None:
    """torch gives the gradient of a mean whole, and each rank leaves out what is not its own."""
    run, ids, tensors = OPS[name]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    run(ids, *plain).mean().backward()
    ids, laid = laid_out(FOUR, ids, tensors)
    mean = run(ids, *(tensor.requires_grad_() for tensor in laid)).mean()
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
