"""Ops under torch.autocast: the dtypes of torch's own ops, and values within twice the error of torch's autocast."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from weft import kernels
from weft.kernels.dispatch.backend import CASTS
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, to_global

from tests.architecture.rules import ROOT
from tests.kernels.autocast_ops import OPS
from tests.kernels.cases import ints, normal
from tests.support.pool import Pool

LOWER = pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])

# Whose rows no axis cuts, or are sorted by expert on each rank: test_routing_sharded.py.
BY_EXPERT = {"combine", "dispatch", "grouped_matmul"}


def operands_of(name: str, given: str, lower: torch.dtype) -> list[Tensor]:
    """Operands as a model gives them. given: letters, w for float32, l for the lower dtype; the last one repeats."""
    shapes = OPS[name][2]
    dtypes = [lower if letter == "l" else torch.float32 for letter in given.ljust(len(shapes), given[-1])]
    return [normal(*shape, seed=i).to(dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))]


def found(
    run: Callable[..., Tensor], ids: Tensor | None, operands: list[Tensor], lower: torch.dtype | None
) -> list[Tensor]:
    """The output and the operands' gradients; backward outside of autocast. Whole on every rank."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    with torch.autocast("cpu", dtype=lower or torch.bfloat16, enabled=lower is not None):
        output = run(ids, *leaves)
    gradients = torch.autograd.grad(output, leaves, torch.full_like(output, 2.0))
    return [to_global(each) if isinstance(each, DTensor) else each for each in (output.detach(), *gradients)]


def compare(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor], lower: torch.dtype) -> None:
    for mine, eager, true in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == eager.dtype
        allowed = 2 * float((eager - true).abs().max()) + 4 * torch.finfo(mine.dtype).eps * float(true.abs().max())
        assert float((mine - true).abs().max()) <= allowed


def test_the_table_has_every_op():
    assert set(OPS) == set(CASTS)


def test_the_guides_table_is_the_same():
    table = re.findall(
        r"^\| (`.+?) \| (.+?)(?:;.*)? \|$", (ROOT / "docs/guides/mixed_precision.md").read_text(), re.MULTILINE
    )
    named = [(op, dtype) for ops, dtype in table for op in re.findall(r"`(\w+)`", ops)]
    assert sorted(named) == sorted((op, cast_to.value) for op, cast_to in CASTS.items())


@LOWER
@pytest.mark.parametrize("given", ["w", "l", "lw"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_on_plain_tensors(name: str, given: str, lower: torch.dtype) -> None:
    ours, theirs, _, ids = OPS[name]
    operands = operands_of(name, given, lower)
    truth = found(theirs, ids, [operand.double() for operand in operands], None)
    compare(found(ours, ids, operands, lower), found(theirs, ids, operands, lower), truth, lower)


def by_halves(
    run: Callable[..., Tensor], ids: Tensor | None, operands: list[Tensor], lower: torch.dtype
) -> list[Tensor]:
    """Results of two processes with half of the rows each, combined as torch's data parallelism does."""
    halves = []
    for rows in (slice(0, 3), slice(3, 6)):
        cut = [each[rows] if len(each) == 6 else each for each in operands]
        halves.append(found(run, None if ids is None else ids[rows], cut, lower))
    parts = list(zip(*halves, strict=True))
    if parts[0][0].ndim == 0:  # the mean of two means
        parts = [tuple(part / 2 for part in each) for each in parts]
    return [torch.cat(part) if part[0].shape[:1] == (3,) else part[0] + part[1] for part in parts]


def on_ranks(name: str, given: str, lower: torch.dtype) -> None:
    mesh = ProcessMesh.grid(tp=2)
    ours, theirs, _, ids = OPS[name]
    operands = operands_of(name, given, lower)
    truth = found(theirs, ids, [operand.double() for operand in operands], None)
    expected = by_halves(theirs, ids, operands, lower)
    rows = Layout(mesh, "tp: S(0)")
    laid = [distribute(each, rows if each.shape[0] == 6 else Layout(mesh)) for each in operands]
    compare(found(ours, None if ids is None else distribute(ids, rows), laid, lower), expected, truth, lower)


@LOWER
@pytest.mark.parametrize("given", ["w", "l", "lw"])
@pytest.mark.parametrize("name", sorted(set(OPS) - BY_EXPERT))
def test_an_op_on_dtensors(pool: Pool, name: str, given: str, lower: torch.dtype) -> None:
    pool.run(on_ranks, name, given, lower, ranks=2)


def by_group(loss: str, given: str, lower: torch.dtype) -> None:
    """Ranks with 5 and 3 of the 8 classes: loss and local gradients against torch's of all classes."""
    part = (slice(0, 5), slice(5, 8))[dist.get_rank()]
    place = {"group": dist.group.WORLD, "vocab_start": part.start, "vocab_size": 8}
    _, theirs, _, ids = OPS[loss]
    operands = operands_of(loss, given, lower)
    truth = found(theirs, ids, [operand.double() for operand in operands], None)
    expected = found(theirs, ids, operands, lower)
    if loss == "cross_entropy":
        own = [operands[0][..., part].contiguous()]
        ours = found(lambda ids, x: kernels.vocab_parallel_cross_entropy(x, ids, **place), ids, own, lower)
    else:
        options = {"chunk_tokens": 7, **place}
        run = lambda ids, x, w: kernels.vocab_parallel_linear_cross_entropy(x, w, ids, **options)  # noqa: E731
        ours = found(run, ids, [operands[0], operands[1][part]], lower)
    for each in (truth, expected):  # the last one's gradient is of the rank's classes
        each[-1] = each[-1][..., part] if loss == "cross_entropy" else each[-1][part]
    compare(ours, expected, truth, lower)


@LOWER
@pytest.mark.parametrize("given", ["w", "l", "lw"])
@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
def test_a_vocab_parallel_loss_of_local_tensors(pool: Pool, loss: str, given: str, lower: torch.dtype) -> None:
    pool.run(by_group, loss, given, lower, ranks=2)


def inside(run: Callable[..., Tensor], ids: Tensor | None, operands: list[Tensor]) -> list[Tensor]:
    """Like `found`, with backward inside the autocast region."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(ids, *leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, torch.full_like(output, 2.0))]


@pytest.mark.parametrize("name", OPS)
def test_a_backward_inside_of_the_region_is_the_same(name: str) -> None:
    run, _, _, ids = OPS[name]
    operands = operands_of(name, "w", torch.bfloat16)
    for one, other in zip(inside(run, ids, operands), found(run, ids, operands, torch.bfloat16), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def compiled_as_eager(name: str, mesh: ProcessMesh | None) -> None:
    torch._dynamo.reset()
    run, _, _, ids = OPS[name]
    operands = operands_of(name, "w", torch.bfloat16)
    if mesh is not None:
        rows = Layout(mesh, "tp: S(0)")
        operands = [distribute(each, rows if each.shape[0] == 6 else Layout(mesh)) for each in operands]
        ids = None if ids is None else distribute(ids, rows)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    eager = found(run, ids, operands, torch.bfloat16)
    for lower in (torch.bfloat16, None):  # autocast is looked at in each call
        dtypes = [each.dtype for each in found(run, ids, operands, lower)]
        again = found(compiled, ids, operands, lower)
        assert [each.dtype for each in again] == dtypes
        if lower is not None:
            torch.testing.assert_close(again, eager)


COMPILED = ("attention", "linear", "linear_cross_entropy", "rms_norm")


@pytest.mark.exhaustive
# Each op once here; further tests run each op on DTensors, too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in COMPILED[1:3])) for name in COMPILED]
)
def test_a_compiled_op(name: str) -> None:
    compiled_as_eager(name, None)


@pytest.mark.exhaustive  # the sample has the eager op on DTensors, and the compiled op on plain tensors
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_op_on_dtensors(pool: Pool, name: str) -> None:
    pool.run(compiled_as_eager, name, ProcessMesh.grid(tp=2), ranks=2)


def test_float64_is_left_alone() -> None:
    x, weight = normal(3, 8), normal(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kernels.linear(x, weight).dtype == torch.float64
        assert kernels.linear_cross_entropy(x, weight, ints(4, 3)).dtype == torch.float64
        assert kernels.linear_cross_entropy(target=ints(4, 3), input=x, linear_weight=weight).dtype == torch.float64


def test_an_asked_compute_dtype_and_keywords_are_heeded() -> None:
    x, weight = normal(3, 8).float(), normal(4, 8).float()
    expected = kernels.linear_cross_entropy(x, weight, ints(4, 3))
    lower = kernels.linear_cross_entropy(x, weight, ints(4, 3), compute_dtype=torch.bfloat16)
    assert not torch.equal(lower, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        asked = kernels.linear_cross_entropy(x, weight, ints(4, 3), compute_dtype=torch.float32)
        by_name = kernels.linear_cross_entropy(target=ints(4, 3), linear_weight=weight, input=x)
        assert kernels.linear(weight=weight, input=x).dtype == torch.bfloat16
    assert torch.equal(asked, expected) and torch.equal(by_name, lower)


def test_a_compute_dtype_is_that_of_the_gemms_and_not_of_the_gradients() -> None:
    x, weight, ids = normal(6, 8).bfloat16(), normal(9, 8).requires_grad_(), ints(9, 6)
    weight = weight.detach().float().requires_grad_()
    with pytest.raises(
        ValueError,
        match=r"linear_weight is torch.float32 on cpu, input torch.bfloat16 on cpu; .* or give a compute_dtype",
    ):
        kernels.linear_cross_entropy(x, weight, ids)
    for dtype, rounded in ((torch.bfloat16, weight.bfloat16()), (torch.float32, weight), (torch.float64, weight)):
        loss = kernels.linear_cross_entropy(x, weight, ids, compute_dtype=dtype, chunk_tokens=2)
        (found,) = torch.autograd.grad(loss, weight)
        truth = F.cross_entropy(F.linear(x.double(), rounded.double()), ids)
        (true,) = torch.autograd.grad(truth, weight)
        assert loss.dtype == torch.promote_types(dtype, torch.float32) and found.dtype == torch.float32
        torch.testing.assert_close(loss.double(), truth, rtol=2 * torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(
            found, true, rtol=0, atol=max(torch.finfo(dtype).eps, 1e-7) * float(true.abs().max())
        )
    with pytest.raises(ValueError, match=r"compute_dtype is torch.int8; give one of torch.bfloat16"):
        kernels.linear_cross_entropy(x, weight, ids, compute_dtype=torch.int8)


def test_a_sum_in_place_is_the_one_that_was_given() -> None:
    a, b, total = normal(4, 3).float(), normal(3, 5).float(), torch.zeros(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.matmul(a, b, accumulate_into=total) is total
    torch.testing.assert_close(total, a.bfloat16().float() @ b.bfloat16().float())


def test_factors_of_eight_bits_and_their_scales_are_left_alone() -> None:
    a, b = (normal(*shape).to(torch.float8_e4m3fn) for shape in ((6, 8), (8, 4)))
    given = {"a_scale": normal(6).float(), "b_scale": torch.tensor(0.5), "bias": normal(4).bfloat16()}
    expected = kernels.matmul(a, b, **given)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(kernels.matmul(a, b, **given), expected)
        with pytest.raises(ValueError, match="cannot be multiplied"):  # no factor is converted to 8 bits
            kernels.matmul(a, b.bfloat16())
