"""A backward takes every layout of the incoming gradient that becomes the needed one without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.kernels.plain import pack, unpack
from weft.mesh import Layout, ProcessMesh, Replicate, Shard
from weft.reshard import Slice, distribute, layout_of, plan, to_global

from tests.kernels.cases import FOUR, GRID, ints, normal
from tests.support.collectives import Collectives
from tests.support.pool import Pool

TABLES = normal(5, 2), normal(5, 2)
KEY = torch.tensor(3, dtype=torch.uint64)
TOKENS, CLASSES = ints(11, 6, 5), ints(8, 6, 5)
CHOSEN = ints(4, 80).sort().values.view(8, 5, 2)  # experts in order: rows sorted on each rank are sorted on the whole
# The op, the ids of sharded rows, and the operands: operands with 6 rows are sharded.
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
    "grouped_matmul": (
        lambda ends, a, b: kernels.grouped_matmul(a, b, ends),
        torch.tensor([2, 6], dtype=torch.int32),
        (normal(6, 8), normal(2, 8, 4)),
    ),
    "experts": (
        lambda chosen, x, *operands: kernels.experts(x, chosen, *operands),
        ints(3, 6, 5, 2),
        (normal(6, 5, 8), normal(6, 5, 2), *(normal(3, 4, 8, seed=seed) for seed in range(2)), normal(3, 8, 4)),
    ),
    "all_gather_matmul": (
        lambda _, a, b: kernels.all_gather_matmul(a, b),
        None,
        (normal(6, 5, 8), normal(8, 4)),
    ),
    "matmul_reduce_scatter": (
        lambda _, a, b: kernels.matmul_reduce_scatter(a, b),
        None,
        (normal(6, 5, 8), normal(8, 4)),
    ),
    "qkv_linear": (
        lambda _, *tensors: kernels.add(kernels.add(*(q_k_v := kernels.qkv_linear(*tensors))[:2]), q_k_v[2]),
        None,
        (normal(6, 5, 8), *(normal(4, 8, seed=seed) for seed in range(3))),
    ),
    "swiglu_linear": (
        lambda _, *tensors: kernels.swiglu_linear(*tensors),
        None,
        (normal(6, 5, 8), normal(4, 8), normal(4, 8, seed=1)),
    ),
    "rms_norm": (lambda _, x, w: kernels.rms_norm(x, w), None, (normal(6, 5, 8), normal(8))),
    "rms_norm-alone": (lambda _, x: kernels.rms_norm(x), None, (normal(6, 5, 8),)),
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
    "sigmoid_gate": (lambda _, x, y: kernels.sigmoid_gate(x, y), None, (normal(6, 5, 8), normal(6, 5, 1))),
    "add-repeated": (lambda _, x, y: kernels.add(x, y), None, (normal(6, 5, 8), normal(5, 8))),
    "attention": (lambda _, q, k, v: kernels.attention(q, k, v, head_dim=4), None, (normal(6, 5, 8),) * 3),
    "attention-in-order": (
        lambda _, q, k, v: kernels.attention(q, k, v, head_dim=4, order=((3, 5), (0, 3))),
        None,
        (normal(6, 5, 8),) * 3,
    ),
    "attention-documents": (
        lambda ids, q, k, v: kernels.attention(q, k, v, head_dim=4, documents=ids),
        ints(2, 6, 5).sort(-1).values,
        (normal(6, 5, 8),) * 3,
    ),
    "attention-softcap": (
        lambda _, q, k, v, sinks: kernels.attention(q, k, v, head_dim=4, softcap=2.0, sinks=sinks),
        None,
        (*(normal(6, 5, 8),) * 3, normal(2)),
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
    "route": (lambda _, scores: kernels.route(scores, 2)[1], None, (normal(6, 5, 8),)),
    "dispatch": (lambda ids, x: kernels.dispatch(x, ids, num_experts=4)[0], CHOSEN, (normal(8, 5, 8),)),
    "combine": (lambda ids, y, weights: kernels.combine(y, ids, weights), CHOSEN, (normal(80, 8), normal(8, 5, 2))),
    "router_statistics": (
        lambda ids, logits: kernels.router_statistics(logits, ids),
        ints(8, 6, 5, 2),
        (normal(6, 5, 8),),
    ),
    "cross_entropy": (lambda ids, x: kernels.cross_entropy(x, ids, reduction="none"), CLASSES, (normal(6, 5, 8),)),
    "linear_cross_entropy": (
        lambda ids, x, w: kernels.linear_cross_entropy(x, w, ids, reduction="none"),
        CLASSES,
        (normal(6, 5, 8), normal(8, 8)),
    ),
}
TRAVELLING = ("all_gather_matmul", "matmul_reduce_scatter")  # whose backward communicates, whatever arrives
# How the ids and the operands lie where not by their rows: on four ranks of "tp", and beside "dp" on two.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dispatch": ("tp: S(0)", "tp: S(0)"),
    "combine": ("tp: S(0)", "tp: S(0)", "tp: S(0)"),
    "grouped_matmul": ("", "", "tp: S(2)"),
    "all_gather_matmul": ("", "tp: S(1)", "tp: S(1)"),
    "matmul_reduce_scatter": ("", "tp: S(2)", "tp: S(0)"),
}
ROWS, HEADS, TOKENS_CUT = "dp: S(0)", "dp: S(0), tp: S(2)", "dp: S(0), tp: S(1)"
BESIDE: dict[str, tuple[str, ...]] = {
    "linear": ("", ROWS, "tp: S(0)"),
    "linear-gelu": ("", ROWS, "tp: S(0)"),
    "matmul": ("", ROWS, "tp: S(1)", "tp: S(0)", HEADS),
    "grouped_matmul": ("", "", "tp: S(2), dp: S(0)"),
    "experts": (ROWS, ROWS, ROWS, "tp: S(1)", "tp: S(1)", "tp: S(2)"),
    "all_gather_matmul": ("", TOKENS_CUT, "tp: S(1)"),
    "matmul_reduce_scatter": ("", HEADS, "tp: S(0)"),
    "qkv_linear": ("", ROWS, "tp: S(0)", "tp: S(0)", "tp: S(0)"),
    "swiglu_linear": ("", ROWS, "tp: S(0)", "tp: S(0)"),
    "rms_norm": ("", TOKENS_CUT, ""),
    "rms_norm-heads": ("", HEADS, ""),
    "layer_norm": ("", TOKENS_CUT, "", ""),
    "rms_norm_rope": ("", HEADS, ""),
    "geglu": ("", HEADS, HEADS),
    "rope": ("", HEADS),
    "swiglu": ("", HEADS, HEADS),
    "attention": ("", HEADS, HEADS, HEADS),
    "attention-in-order": ("", TOKENS_CUT, ROWS, ROWS),
    "attention-documents": (ROWS, HEADS, HEADS, HEADS),
    "attention-softcap": ("", HEADS, HEADS, HEADS, "tp: S(0)"),
    "dropout": ("", TOKENS_CUT),
    "embedding": (ROWS, "tp: S(1)"),
    "dispatch": (ROWS, HEADS),
    "combine": (ROWS, "dp: S(0), tp: S(1)", ROWS),
    "cross_entropy": (ROWS, HEADS),
    "linear_cross_entropy": (ROWS, ROWS, "tp: S(0)"),
}
OF_LOCAL_TENSORS = {"vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"}  # no layouts
WITHOUT_GRADIENTS = {"KeyValueCache", "document_bounds", "normal", "rope_tables", "sequence_load", "uniform"}
OF_USERS = {"on_local_tensors"}  # see test_on_local_tensors.py


def test_all_ops_are_here() -> None:
    ops = {name.partition("-")[0] for name in OPS} - {"pack", "unpack"}
    assert ops == set(kernels.__all__) - OF_LOCAL_TENSORS - WITHOUT_GRADIENTS - OF_USERS


def laid_out(name: str, mesh: ProcessMesh) -> tuple[Tensor | None, list[Tensor]]:
    """The ids and operands of an op, laid out by the tables; else tensors with 6 rows are sharded, the rest whole."""
    _, ids, tensors = OPS[name]
    beside = len(mesh.shape) > 1
    layouts = (BESIDE if beside else LAYOUTS).get(name)
    rows = "dp: S(0), tp: S(0)" if beside else "tp: S(0)"
    given = [ids, *tensors]
    texts = layouts or [rows if each is not None and each.shape[:1] == (6,) else "" for each in given]
    laid = [
        None if each is None else distribute(each, Layout(mesh, text)) for each, text in zip(given, texts, strict=True)
    ]
    return laid[0], [each for each in laid[1:] if each is not None]


def mean_of_the_output(name: str) -> None:
    """torch gives the gradient of a mean whole, and each rank drops the other ranks' shards."""
    run, ids, tensors = OPS[name]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    run(ids, *plain).mean().backward()
    ids, laid = laid_out(name, FOUR)
    output = run(ids, *(tensor.requires_grad_() for tensor in laid))
    mean, exact = output.mean(), torch.ones_like(output)
    with Collectives() as from_exact:
        torch.autograd.grad(output, laid, exact, retain_graph=True)
    with Collectives() as seen:
        mean.backward()
    assert seen.kinds == from_exact.kinds
    assert seen.kinds == [] or name in TRAVELLING
    for one, other in zip(laid, plain, strict=True):
        torch.testing.assert_close(to_global(one.grad), other.grad)


@pytest.mark.parametrize("name", OPS)
def test_the_mean_of_a_sharded_output_has_a_backward(pool: Pool, name: str) -> None:
    pool.run(mean_of_the_output, name, ranks=4)


def coarser(output: DTensor) -> Iterator[Layout]:
    """Layouts from which the output's layout follows by dropping data."""
    own = layout_of(output)
    choices = [
        (placement, Replicate()) if isinstance(placement, Shard) else (Replicate(),) for placement in own.placements
    ]
    for placements in product(*choices):
        layout = own.replace(**dict(zip(own.mesh.axis_names, placements, strict=True)))
        wanted = own.replace(**{axis: "R" for axis in own.mesh.axis_names if not isinstance(own[axis], Shard)})
        steps = plan(layout, wanted, tuple(output.shape), output.dtype).steps
        if all(isinstance(step, Slice) for step in steps):
            yield layout


def check_every_layout(name: str) -> int:
    """Checks every layout of the incoming gradient, the output's first, and returns their number."""
    run, ids, tensors = OPS[name]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = run(ids, *plain)
    upstream = normal(*expected.shape, seed=7)
    expected.backward(upstream)
    ids, laid = laid_out(name, GRID)
    output = run(ids, *(tensor.requires_grad_() for tensor in laid))
    assert isinstance(output, DTensor)
    layouts, kinds = list(coarser(output)), []
    for layout in layouts:
        grad = distribute(upstream, layout)
        with Collectives() as seen:
            gradients = torch.autograd.grad(output, laid, grad, retain_graph=True)
        kinds.append(seen.kinds)
        for one, other in zip(gradients, plain, strict=True):
            torch.testing.assert_close(to_global(one), other.grad, msg=lambda told, at=layout: f"({at}): {told}")
    assert kinds == [kinds[0]] * len(kinds)
    return len(layouts)


def every_op() -> dict[str, int]:
    return {name: check_every_layout(name) for name in OPS}


@pytest.mark.exhaustive
def test_a_backward_takes_every_layout_that_says_enough(pool: Pool) -> None:
    """For outputs sharded over both axes of a mesh: gradients whole on either axis, or on both."""
    for counts in pool.run(every_op, ranks=4):
        assert counts.keys() == OPS.keys()
        assert {name: counts[name] for name in ("linear", "gelu", "grouped_matmul")} == {
            "linear": 4,
            "gelu": 3,  # rows are sharded over "dp", then "tp": a shard over "tp" alone has different rows
            "grouped_matmul": 2,
        }
        assert counts.pop("router_statistics") == 1  # a sum over all tokens, sharded over no axis
        assert min(counts.values()) > 1


def of_two_outputs() -> None:
    """The gradient of one output is whole; the second's has the output's layout."""
    x, residual, weight = normal(6, 5, 8), normal(6, 5, 8, seed=1), normal(8)
    rows = Layout(GRID, "dp: S(0), tp: S(1)")
    found = []
    for operands in ((x, residual, weight), (distribute(x, rows), distribute(residual, rows), weight)):
        leaves = [each.clone().requires_grad_() for each in operands[:2]]
        total, norm = kernels.add_rms_norm(*leaves, operands[2])
        (total.mean() + kernels.swiglu(norm, norm).mean()).backward()
        found.append([to_global(leaf.grad) if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)


def test_the_gradients_of_two_outputs_may_lie_otherwise(pool: Pool) -> None:
    pool.run(of_two_outputs, ranks=4)


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
