"""Who computes with which whole matrix: the ranks that share it, the owners, the rounds, and the bytes that move."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard import Exchange, plan, simulate
from weft.reshard.planning.matrices import MatrixShards, assign_owners, schedule_rounds, shards_of

from tests.support.shards import split

GRID = ProcessMesh.grid(dp=2, tp=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "costs",
    [
        pytest.param([], id="none"),
        pytest.param([5], id="one"),
        pytest.param([1] * 24, id="equal"),
        pytest.param([9, 9, 9, 4, 4, 4, 4, 1, 1, 1], id="kinds"),
        pytest.param([100, 1, 1, 1], id="one-large"),
        pytest.param([i * i % 37 + 1 for i in range(100)], id="many"),
    ],
)
def test_matrices_are_shared_evenly(costs: list[int], ranks: int) -> None:
    owners = assign_owners(costs, ranks)
    assert len(owners) == len(costs)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(costs)
    least = max(math.ceil(sum(costs) / ranks), max(costs, default=0))
    assert max(loads) <= 4 / 3 * least
    if len(set(costs)) == 1:
        assert max(loads) - min(loads) <= costs[0]


def test_equal_matrices_are_dealt_out_in_turn() -> None:
    assert assign_owners([7] * 6, 4) == [0, 1, 2, 3, 0, 1]
    assert assign_owners([1, 8, 1, 8], 2) == [0, 0, 1, 1], "the expensive ones first"


@pytest.mark.parametrize(
    ("text", "shape", "rows", "expected"),
    [
        pytest.param("dp: R, tp: R", (6, 4), None, None, id="replicated"),
        pytest.param("dp: R, tp: S(0)", (6, 4), None, ("tp", "tp: S(1)", (6, 4), 6), id="tp-rows"),
        pytest.param("dp: R, tp: S(-1)", (6, 4), None, ("tp", "tp: S(2)", (6, 4), 6), id="tp-columns"),
        pytest.param("dp: S(0), tp: S(1)", (6, 4), None, ("dp tp", "dp: S(1), tp: S(2)", (6, 4), 6), id="both"),
        pytest.param("tp: S(0), dp: S(0)", (8, 4), None, ("tp dp", "tp: S(1), dp: S(1)", (8, 4), 8), id="tp-first"),
        pytest.param("dp: R, tp: S(0)", (6, 4), 3, None, id="whole-heads"),
        pytest.param("dp: R, tp: S(0)", (6, 4), 2, ("tp", "tp: S(1)", (6, 4), 2), id="cut-heads"),
        pytest.param("dp: S(1), tp: S(0)", (8, 4), 2, ("dp", "dp: S(2)", (4, 4), 2), id="heads-of-tp"),
        pytest.param("tp: S(0), dp: S(0)", (8, 4), 4, ("dp", "dp: S(1)", (4, 4), 4), id="a-head-of-tp"),
        pytest.param("dp: S(0), tp: R", (3, 6, 4), None, None, id="experts"),
        pytest.param("dp: S(0), tp: S(1)", (3, 6, 4), None, ("tp", "tp: S(1)", (6, 4), 6), id="experts-on-tp"),
        pytest.param("dp: S(2), tp: S(1)", (3, 6, 4), None, ("dp tp", "tp: S(1), dp: S(2)", (6, 4), 6), id="stack"),
    ],
)
def test_the_ranks_that_share_a_matrix(
    text: str, shape: tuple[int, ...], rows: int | None, expected: tuple[str, str, tuple[int, int], int] | None
) -> None:
    for rank in GRID:
        found = shards_of(Layout(GRID, text), shape, rank, rows)
        if expected is None or found is None:
            assert (found, expected) == (None, None)
            continue
        axes, layout, whole, blocks = expected
        part = GRID.submesh(rank, *axes.split())
        assert part is not None
        assert set(found.layout.mesh) == set(part)
        assert found == MatrixShards(Layout(found.layout.mesh, layout), whole, blocks)


def test_a_rank_outside_the_mesh_and_axes_of_one_rank_share_nothing() -> None:
    assert shards_of(Layout(ProcessMesh.grid(tp=2), {"tp": Shard(0)}), (4, 4), 5) is None
    assert shards_of(Layout(ProcessMesh.grid(tp=1), {"tp": Shard(0)}), (4, 4), 0) is None


@pytest.mark.parametrize("text", ["dp: R, tp: S(0)", "dp: S(0), tp: S(1)", "tp: S(0), dp: S(0)", "dp: S(1), tp: S(1)"])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 2), (7, 6)], ids=str)
@pytest.mark.parametrize("rows", [None, 1])
def test_the_shards_are_what_each_rank_holds(text: str, shape: tuple[int, int], rows: int | None) -> None:
    layout = Layout(GRID, text)
    for rank in GRID:
        found = shards_of(layout, shape, rank, rows)
        if found is not None:
            assert found.layout.local_shape((1, *found.shape), rank) == (1, *layout.local_shape(shape, rank))


def many(text: str, mesh: ProcessMesh = GRID, rank: int = 0) -> tuple[MatrixShards, ...]:
    """The matrices of three blocks: attention, MLP and its transpose."""
    found = [shards_of(Layout(mesh, text), shape, rank) for _ in range(3) for shape in [(8, 8), (8, 12), (12, 8)]]
    return tuple(each for each in found if each is not None)


def test_in_a_round_each_rank_owns_at_most_one_matrix() -> None:
    matrices = many("dp: S(0), tp: S(1)")
    rounds = schedule_rounds(matrices)
    assert sorted(each for stacks in rounds for stack in stacks for each in stack.members) == [*range(9)]
    assert len(rounds) == 3, "nine matrices on four ranks"
    for stacks in rounds:
        owners = [rank for stack in stacks for rank in stack.target.mesh]
        assert len(owners) == len(set(owners))
        for stack in stacks:
            assert {matrices[each].shape for each in stack.members} == {stack.shape[1:]}
            assert stack.shape[0] == len(stack.members) == stack.target.mesh.size


def test_every_rank_finds_the_same_rounds_of_its_group() -> None:
    for text, axes in (("dp: R, tp: S(0)", ["tp"]), ("dp: S(0), tp: S(1)", ["dp", "tp"])):
        for part in GRID.groups(*axes):
            assert len({schedule_rounds(many(text, rank=rank)) for rank in part}) == 1


def test_groups_of_different_ranks_have_rounds_of_their_own() -> None:
    over_tp, over_both = many("dp: R, tp: S(0)")[:2], many("dp: S(0), tp: S(1)")[:2]
    mixed = (over_tp[0], over_both[0], over_tp[1], over_both[1])
    assert [[stack.members for stack in stacks] for stacks in schedule_rounds(mixed)] == [[(2,), (0,)], [(3,), (1,)]]


@pytest.mark.parametrize("text", ["dp: R, tp: S(0)", "dp: S(0), tp: S(1)", "tp: S(0), dp: S(0)"])
def test_a_stack_moves_in_one_exchange_each_way_at_the_lower_bound(text: str) -> None:
    """Owners receive what they lack of their matrix, and the other ranks then what they lack of their shards."""
    for stack in (each for stacks in schedule_rounds(many(text)) for each in stacks):
        bring = plan(stack.source, stack.target, stack.shape, torch.bfloat16)
        back = plan(stack.target, stack.source, stack.shape, torch.bfloat16)
        assert [*map(type, bring.steps)] == [*map(type, back.steps)] == [Exchange]
        whole = torch.arange(math.prod(stack.shape)).reshape(stack.shape)
        shards = split(whole, stack.source)
        moved = simulate(plan(stack.source, stack.target, stack.shape, torch.int64), shards)
        for rank, slot in zip(stack.target.mesh, range(stack.shape[0]), strict=True):
            assert torch.equal(moved[rank], whole[slot : slot + 1])
        returned = simulate(plan(stack.target, stack.source, stack.shape, torch.int64), moved)
        assert all(torch.equal(returned[rank], shards[rank]) for rank in stack.source.mesh)
        for made, (held, wanted) in ((bring, (stack.source, stack.target)), (back, (stack.target, stack.source))):
            lacking = max(
                sum(
                    rank in wanted.mesh
                    and not (rank in held.mesh and inside(held.local_slices(stack.shape, rank), at))
                    and inside(wanted.local_slices(stack.shape, rank), at)
                    for at in product(*map(range, stack.shape))
                )
                for rank in stack.source.mesh
            )
            assert made.max_received_bytes == 2 * lacking


def inside(box: tuple[slice, ...], at: tuple[int, ...]) -> bool:
    return all(part.start <= index < part.stop for part, index in zip(box, at, strict=True))
