"""Routing on DTensors: tokens over several axes and dims, sums that stay Partial, ranks outside the mesh, autocast."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import combine, dispatch, route, router_statistics
from weft.kernels.extension import sort_by_expert
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh
from weft.reshard import distribute, layout_of, to_global

from tests.kernels.cases import ints, normal
from tests.support.collectives import Collectives
from tests.support.pool import Pool

CUBE = ProcessMesh.grid(dp=2, cp=2, tp=2)
E, K, H = 6, 2, 8
X, SCORES = normal(4, 8, H), normal(4, 8, E)
TOKENS = ["dp: S(0), cp: S(1)", "dp: S(0), cp: S(0)", "cp: S(0), dp: S(0)", "dp: S(1), cp: S(1)", "cp: S(0)", ""]


def layer(x: Tensor, scores: Tensor) -> list[Tensor]:
    """A layer whose experts give their rows back, and its statistics as the second of two layers with equal scores."""
    experts, weights = route(scores, K, scale=1.5)
    rows, _ = dispatch(x, experts, num_experts=E)
    first = router_statistics(scores, experts, layers=2)
    sums = router_statistics(scores, experts, first, layer=1, layers=2)
    return [combine(rows, experts, weights), sums, rows, experts]


def on_the_cube(text: str) -> list[str]:
    plain = [each.clone().requires_grad_() for each in (X, SCORES)]
    outputs, upstream = layer(*plain)[:2], [normal(4, 8, H, seed=5), normal(2, 2 * E + 1, seed=6)]
    expected = [*outputs, *torch.autograd.grad(outputs, plain, upstream)]
    tokens = Layout(CUBE, text)
    laid = [distribute(each, tokens).requires_grad_() for each in (X, SCORES)]
    laid_upstream = [distribute(upstream[0], tokens), distribute(upstream[1], Layout(CUBE))]
    with Collectives() as seen:
        *outputs, rows, experts = layer(*laid)
        found = [*outputs, *torch.autograd.grad(outputs, laid, laid_upstream)]
    assert seen.kinds == []
    axes = [axis for dim in sorted(tokens.shard_order) for axis in tokens.shard_order[dim]]
    assert layout_of(outputs[0]) == layout_of(experts) == tokens
    assert layout_of(outputs[1]) == Layout(CUBE, dict.fromkeys(axes, Partial("sum")))
    assert layout_of(rows).shard_order.get(0, ()) == tuple(axes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(to_global(one), other)
    return [str(layout_of(each)) for each in (rows, *found)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", TOKENS)
def test_tokens_over_several_axes_equal_one_process(text: str, pool: Pool) -> None:
    first, *others = pool.run(on_the_cube, text, ranks=8)
    assert others == [first] * 7


def outside() -> tuple[list[str], list[tuple[int, ...]]]:
    mesh = ProcessMesh([0, 1], ["dp"])
    rows = Layout(mesh, "dp: S(0)")
    x, scores = (distribute(each, rows).requires_grad_() for each in (X.float(), SCORES.bfloat16()))
    experts, weights = route(scores, K)
    sorted_rows, ends = dispatch(x, experts, num_experts=E)
    sums = router_statistics(scores, experts)
    output = combine(sorted_rows, experts, weights)
    gradients = torch.autograd.grad(
        [output, sums], [x, scores],
        [distribute(torch.ones(4, 8, H), rows), distribute(torch.ones(1, 2 * E + 1), Layout(mesh))],
    )  # fmt: skip
    found = [experts, weights, sorted_rows, ends, sums, output, *gradients]
    return [f"{each.to_local().dtype} {layout_of(each)}" for each in found], [tuple(each.shape) for each in found]


def test_a_rank_outside_the_mesh_has_the_same_dtypes_and_shapes(pool: Pool) -> None:
    first, *others = pool.run(outside, ranks=3)
    assert others == [first] * 2
    assert first[0][0] == "torch.int32 dp: S(0)" and first[0][4] == "torch.float32 dp: P(sum)"


def refusals() -> list[str]:
    two = ProcessMesh.grid(dp=2)
    rows = Layout(two, "dp: S(0)")
    experts = ints(E, 3, 4, K)
    messages = []
    for call in (
        lambda: dispatch(distribute(normal(3, 4, H), rows), distribute(experts, rows), num_experts=E),
        lambda: combine(distribute(normal(24, H), rows), distribute(experts, rows), distribute(normal(3, 4, K), rows)),
        lambda: sort_by_expert(distribute(experts, rows), E),
        lambda: route(distribute(normal(3, E), Layout(two, "dp: S(1)")), K),
        lambda: route(distribute(normal(3, E), rows), K, bias=distribute(normal(E), rows)),
        lambda: router_statistics(
            distribute(normal(3, E), rows), distribute(experts[:, 0], rows), distribute(normal(1, 13), Layout(two))
        ),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(f"{type(caught.value) is LayoutError} {caught.value}")
    return messages


def test_layouts_that_do_not_fit_are_refused_with_a_remedy(pool: Pool) -> None:
    for of_dispatch, of_combine, of_sort, of_scores, of_bias, of_sums in pool.run(refusals, ranks=2):
        uneven = "dim 0 of size 3 cannot be split evenly over 'dp' of size 2; pad it, or replicate it over them"
        assert of_dispatch == f"True dispatch: {uneven}"
        assert of_combine == f"True combine: {uneven}"
        assert of_sort.startswith("False sort_by_expert takes plain tensors") and "experts.to_local()" in of_sort
        assert "reshard the scores to (dp: S(0))" in of_scores
        assert "the bias is (dp: S(0)), but each token needs all of it; reshard it to (dp: R)" in of_bias
        assert "reshard them to (dp: P(sum))" in of_sums


def under_autocast() -> None:
    mesh = ProcessMesh.grid(dp=2)
    rows = Layout(mesh, "dp: S(0)")
    x, scores = (distribute(each.float(), rows) for each in (X, SCORES))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            experts, weights = route(scores, K)
            sorted_rows, _ = dispatch(x, experts, num_experts=E)
            found.append([weights, sorted_rows, combine(sorted_rows, experts, weights)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one.to_local(), other.to_local())
    dist.barrier()


def test_autocast_changes_no_operand(pool: Pool) -> None:
    pool.run(under_autocast, ranks=2)
