"""The norm of gradients counts each element once, however many ranks, names and stages hold it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import tensor as dtensor
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, clip_grad_norm_, distribute, to_global

GRID = ProcessMesh.grid(dp=2, tp=2)
STAGES = [ProcessMesh.grid(tp=2), ProcessMesh.grid(tp=2, first_rank=2)]


def value(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laid(gradient: Tensor, layout: Layout) -> nn.Parameter:
    parameter = nn.Parameter(distribute(torch.zeros(gradient.shape), Layout(layout.mesh)))
    parameter.grad = distribute(gradient, layout)
    return parameter


LAYOUTS = ["", "dp: S(0)", "tp: S(1)", "dp: S(0), tp: S(0)", "tp: S(0), dp: S(1)"]
SHAPES = [(5, 3), (4, 4), (1, 7), (3, 2), (6, 6)]


def clipped(norm_type: float, max_norm: float) -> tuple[float, list[Tensor]]:
    """Clip gradients in all layouts and a plain one, the first passed twice; returns the norm and the gradients."""
    parameters = [
        laid(value(i, *shape), Layout(GRID, layout))
        for i, (shape, layout) in enumerate(zip(SHAPES, LAYOUTS, strict=True))
    ]
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = value(9, 3)
    norm = clip_grad_norm_([*parameters, plain, parameters[0]], max_norm, norm_type)
    return float(norm), [*(to_global(each.grad) for each in parameters), plain.grad]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_anchor_23_25_each_element_counts_once_in_any_layout(norm_type: float, max_norm: float, pool: Any) -> None:
    gradients = [*(value(i, *shape) for i, shape in enumerate(SHAPES)), value(9, 3)]
    norm = torch.cat([each.flatten() for each in gradients]).double().norm(norm_type).item()
    for found, after in pool.run(clipped, norm_type, max_norm, ranks=4):
        assert found == pytest.approx(norm, rel=1e-6)
        for each, gradient in zip(after, gradients, strict=True):
            torch.testing.assert_close(each, gradient * min(1, max_norm / norm), rtol=1e-5, atol=1e-7)


def tied_on_stages(own_alone: bool) -> tuple[float, list[Tensor]]:
    """A table on both stages, and a weight on each stage; a rank passes its own stage's tensors, or all."""
    tables = [laid(value(0, 4, 4), Layout(mesh, "tp: S(0)")) for mesh in STAGES]
    weights = [laid(value(1 + i, 4, 2), Layout(mesh, "tp: S(1)")) for i, mesh in enumerate(STAGES)]
    mine = 0 if torch.distributed.get_rank() < 2 else 1
    given = [tables[mine], weights[mine]] if own_alone else [*tables, *weights]
    mesh = ProcessMesh.grid(pp=2, tp=2) if own_alone else None
    norm = clip_grad_norm_(given, 0.5, mesh=mesh, copies=[tables[1]])
    return float(norm), [each.grad.to_local() for each in (tables[mine], weights[mine])]


@pytest.mark.parametrize("own_alone", [True, False])
def test_anchor_24_a_weight_tied_across_stages_counts_once(own_alone: bool, pool: Any) -> None:
    norm = torch.cat([value(0, 4, 4).flatten(), value(1, 4, 2).flatten(), value(2, 4, 2).flatten()]).norm().item()
    for rank, (found, (table, _)) in enumerate(pool.run(tied_on_stages, own_alone, ranks=4)):
        assert found == pytest.approx(norm, rel=1e-6)
        part = value(0, 4, 4).chunk(2)[rank % 2]
        torch.testing.assert_close(table, part * 0.5 / norm, rtol=1e-5, atol=1e-7)


def with_a_frozen_stage(dtype: torch.dtype) -> Tensor:
    """A stage with a gradient, and a stage with a frozen parameter."""
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype))
    if torch.distributed.get_rank():
        parameter.requires_grad_(False)
    else:
        parameter.grad = torch.tensor([3.0, 4.0], dtype=dtype)
    return clip_grad_norm_([parameter], 1.0, mesh=ProcessMesh.grid(pp=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_stage_without_trained_parameters_adds_nothing_in_the_same_dtype(dtype: torch.dtype, pool: Any) -> None:
    """With float64, ranks summed numbers of 4 and of 8 bytes, and ended."""
    for norm in pool.run(with_a_frozen_stage, dtype, ranks=2):
        assert norm.item() == 5.0
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def partial() -> None:
    parameter = laid(value(0, 4, 4), Layout(GRID, "dp: P"))
    with pytest.raises(ValueError, match=r"is \(dp: P\(sum\), tp: R\).*call wait\(\)"):
        clip_grad_norm_([parameter], 1.0)


def test_an_addend_has_no_norm(pool: Any) -> None:
    pool.run(partial, ranks=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plain_gradients_have_torchs_norm_in_the_wider_dtype(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(40, 40, dtype=dtype))
    parameter.grad = value(3, 40, 40).to(dtype)
    truth = parameter.grad.double().norm().item()
    norm = clip_grad_norm_(parameter, 1e9)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert norm.item() == pytest.approx(truth, rel=1e-6)


def test_an_infinite_norm_scales_no_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.inf])
    assert clip_grad_norm_([parameter], 0.1).item() == math.inf
    assert parameter.grad[0] == 1.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("gradient", "max_norm"),
    [
        pytest.param([0.0, 0.0], 0.0, id="zeros-to-zero"),
        pytest.param([0.0, -0.0], 1.0, id="zeros"),
        pytest.param([0.0, 0.0], math.inf, id="zeros-to-infinity"),
        pytest.param([3.0, -4.0], 0.0, id="to-zero"),
        pytest.param([1e-30, -1e-30], 0.0, id="whose-squares-are-zero-to-zero"),
        pytest.param([1e-30, -1e-30], 1.0, id="whose-squares-are-zero"),
        pytest.param([1e-40, 0.0], 1.0, id="subnormal"),
        pytest.param([3.0, -4.0], math.inf, id="to-infinity"),
    ],
)
def test_norms_of_zero_and_bounds_of_zero_are_as_torchs(
    gradient: list[float], max_norm: float, dtype: torch.dtype, norm_type: float
) -> None:
    ours, theirs = (nn.Parameter(torch.zeros(len(gradient), dtype=dtype)) for _ in range(2))
    for parameter in (ours, theirs):
        parameter.grad = torch.tensor(gradient, dtype=dtype)
    norm = clip_grad_norm_([ours], max_norm, norm_type)
    torch.nn.utils.clip_grad_norm_([theirs], max_norm, norm_type)
    assert norm.isfinite()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0.0)


def zeros_on_ranks(max_norm: float) -> Tensor:
    """A shard of zeros on each rank."""
    parameter = nn.Parameter(distribute(torch.ones(5), Layout(ProcessMesh.grid(dp=2), "dp: S(0)")))
    parameter.grad = distribute(torch.zeros(5), Layout(ProcessMesh.grid(dp=2), "dp: S(0)"))
    clip_grad_norm_([parameter], max_norm)
    return parameter.grad.to_local()


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_zeros_on_a_mesh_stay_zeros(max_norm: float, pool: Any) -> None:
    for found in pool.run(zeros_on_ranks, max_norm, ranks=2):
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1.0,), "max_norm is -1.0"), ((math.nan,), "max_norm is nan"), ((1.0, 0.0), "norm_type is 0.0")],
)
def test_mistakes(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_grad_norm_([], *arguments)


def reduced(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> Tensor:
    """The sum of an addend on each rank: 1, and three halves of the last bit that bfloat16 has there."""
    mesh = ProcessMesh.grid(dp=4)
    parameter = nn.Parameter(distribute(torch.zeros(4, dtype=dtype), Layout(mesh)))
    sync = GradientSync(nn.ParameterDict({"weight": parameter}), dtype=reduce_dtype)
    addend = torch.tensor([1.0, 2**-8, 2**-8, 2**-8])[torch.distributed.get_rank()].to(dtype)
    parameter.to_local(grad_placements=[dtensor.Partial()]).backward(addend.repeat(4))
    sync.wait()
    assert parameter.grad is not None
    assert parameter.grad.dtype == dtype
    return to_global(parameter.grad).float()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [
        pytest.param(torch.bfloat16, torch.float32, id="wider"),
        pytest.param(torch.float32, torch.bfloat16, id="narrower"),
        pytest.param(torch.float32, None, id="its-own"),
    ],
)
def test_gradients_are_added_up_in_the_dtype_of_choice(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None, pool: Any
) -> None:
    exact = torch.tensor(1 + 3 * 2**-8)
    expected = exact.to(reduce_dtype or dtype).to(dtype).float() if reduce_dtype != torch.bfloat16 else None
    for found in pool.run(reduced, dtype, reduce_dtype, ranks=4):
        if expected is None:  # rounded as it is added up, whichever way: a number of 8 bits, which the sum is not
            assert torch.equal(found, found.bfloat16().float())
            assert found[0] != exact
        else:
            assert torch.equal(found, expected.expand(4))
