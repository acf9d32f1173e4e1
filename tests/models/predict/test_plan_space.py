"""The space of plans: every mesh once, and accepted is what `weft train` accepts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from weft.models.predict.plans import (
    CONTEXTS,
    RECOMPUTES,
    SEARCHED_SCHEDULES,
    ZEROS,
    Candidate,
    Space,
    reason_of,
)
from weft.models.schedules.schedule import NAMES
from weft.models.train.candidates import checker, config_with
from weft.models.train.config import TrainConfig
from weft.models.train.recipes import recipe

from .every_plan import list_every_plan

TINY, MOE = recipe("llama-tiny"), recipe("qwen3-moe-tiny")


def with_rows(config: TrainConfig, rows: int) -> TrainConfig:
    return replace(config, data=replace(config.data, batch_size=rows))


def members_of(space: Space) -> list[Candidate]:
    return [member for family in space.families() for member in space.members(family)]


@pytest.mark.parametrize("processes", [1, 2, 6, 8, 12, 17])
def test_meshes_are_all_ways_to_use_every_process(processes: int) -> None:
    meshes = list(Space(processes=processes, rows=1).meshes())
    sizes = range(1, processes + 1)
    expected = {each for each in product(sizes, repeat=4) if math.prod(each) == processes}
    assert {(mesh.pp, mesh.dp, mesh.cp, mesh.tp) for mesh in meshes} == expected
    assert len(meshes) == len(expected)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("config", "processes", "rows"),
    [
        pytest.param(TINY, 4, 6, id="dense"),
        pytest.param(TINY, 8, 4, id="dense-8"),
        pytest.param(TINY, 3, 5, id="odd"),
        pytest.param(MOE, 4, 4, id="experts"),
    ],
)
def test_accepted_candidates_are_those_that_train_accepts(config: TrainConfig, processes: int, rows: int) -> None:
    """Checks each member by itself: whether it can run must not depend on sequence, zero and recompute."""
    config = with_rows(config, rows)
    space = Space(processes=processes, rows=rows, num_experts=getattr(config.model, "num_experts", 0))
    accepted, refused = set(), Counter[str]()
    for member in members_of(space):
        try:
            config_with(config, member)
        except ValueError as error:
            refused[reason_of(error)] += 1
        else:
            accepted.add(member)
    found = list_every_plan(space, checker(config))
    assert set(found.accepted) == accepted
    assert len(found.accepted) == len(accepted), "no candidate comes twice"
    assert found.refused == refused
    assert accepted and refused


def test_every_option_is_enumerated() -> None:
    found = list_every_plan(Space(processes=8, rows=8), checker(with_rows(TINY, 8))).accepted
    assert {each.zero for each in found} == set(ZEROS)
    assert {each.recompute for each in found} == set(RECOMPUTES)
    assert {each.context for each in found} == {None, *CONTEXTS}
    assert {each.schedule for each in found} == {None, *SEARCHED_SCHEDULES}
    assert set(NAMES) - set(SEARCHED_SCHEDULES) == {"zero_bubble"}
    assert {each.sequence for each in found} == {False, True}
    assert {each.microbatches for each in found} == {1, 2, 4, 8}


def test_a_space_contains_its_candidates_alone() -> None:
    fixed = {"recompute": "full"}
    every = {each for experts in (0, 4) for each in members_of(Space(processes=4, rows=6, num_experts=experts))}
    for experts, kept in product((0, 4), ({}, fixed)):
        space = Space(processes=4, rows=6, num_experts=experts, fixed=kept)
        members = set(members_of(space))
        changed = {replace(each, microbatches=5) for each in members} | {replace(each, dp=3) for each in members}
        assert members and {each for each in every | changed if each in space} == members


def test_a_schedule_that_is_named_is_enumerated() -> None:
    space = Space(processes=8, rows=8, fixed={"schedule": "zero_bubble"})
    found = list_every_plan(space, checker(with_rows(TINY, 8))).accepted
    assert {each.schedule for each in found} == {"zero_bubble"}


def test_options_without_effect_have_one_value() -> None:
    for each in list_every_plan(Space(processes=4, rows=2), checker(with_rows(TINY, 2))).accepted:
        assert not (each.sequence and each.tp == 1)
        assert not (each.zero and each.dp * each.cp == 1)
        assert (each.context is None) == (each.cp == 1)
        assert (each.schedule is None) == (each.pp == 1)


def test_experts_over_tp_are_sharded_by_zero_without_a_data_axis() -> None:
    space = Space(processes=4, rows=4, num_experts=24, fixed={"tp": 4})
    zeros = {(each.ep, each.zero) for family in space.families() for each in space.members(family) if each.over_tp}
    assert (2, 3) in zeros, "2 ranks hold the same experts"
    assert (4, 0) in zeros and (4, 3) not in zeros


def test_fixed_options_are_kept() -> None:
    space = Space(processes=8, rows=8, fixed={"tp": 2, "zero": 3, "microbatches": 4})
    found = list_every_plan(space, checker(with_rows(TINY, 8))).accepted
    assert found
    assert {(each.tp, each.zero, each.microbatches) for each in found} == {(2, 3, 4)}


def test_complexities_differ_and_order_the_simpler_first() -> None:
    found = list_every_plan(Space(processes=8, rows=4), checker(with_rows(TINY, 4))).accepted
    assert len({each.complexity for each in found}) == len(found)
    assert min(found, key=lambda each: each.complexity) == Candidate(dp=8)
    assert Candidate(dp=8).complexity < Candidate(dp=8, zero=1).complexity < Candidate(dp=8, zero=2).complexity
    assert Candidate(dp=8, zero=1).complexity < Candidate(dp=4, tp=2, zero=1).complexity


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        pytest.param(Candidate(), "one process", id="simplest"),
        pytest.param(Candidate(dp=4, tp=2, zero=1, sequence=True), "dp=4 tp=2, zero=1, sequence", id="mesh"),
        pytest.param(
            Candidate(pp=2, schedule="interleaved", chunks=2, microbatches=4, recompute="full"),
            "pp=2, interleaved x 2, 4 microbatches, recompute full",
            id="pipeline",
        ),
        pytest.param(Candidate(dp=2, ep=4, tp=2, over_tp=True), "dp=2 tp=2 ep=4, ep over tp", id="experts"),
        pytest.param(Candidate(cp=2, context="ulysses"), "cp=2, ulysses", id="context"),
    ],
)
def test_a_candidate_in_words(candidate: Candidate, expected: str) -> None:
    assert str(candidate) == expected


@pytest.mark.parametrize(("processes", "rows"), [(0, 1), (1, 0), (-1, 1), (True, 1)])
def test_sizes_below_one_are_refused(processes: int, rows: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Space(processes=processes, rows=rows)


@pytest.mark.parametrize("options", [{"schedules": ("1f1b", "new")}, {"fixed": {"schedule": "new"}}], ids=str)
def test_a_schedule_without_bounds_is_refused_by_name(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.models.predict.plans.NAMES", (*NAMES, "new"))
    with pytest.raises(ValueError, match=r"schedule 'new'.*add a row to SCHEDULE_BOUNDS"):
        Space(processes=8, rows=8, **options)


def test_the_uneven_rows_of_rank_0() -> None:
    assert Candidate(dp=4, microbatches=2).rows_on_rank(10) == 2  # 5 rows over 4 ranks: 2, 2, 1, 0
    assert Candidate(dp=8).rows_on_rank(4) == 1
