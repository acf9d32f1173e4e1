"""`check_hangs` finds every program that hangs, and no plan that runs; real processes hang in the same calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weft.mesh import ProcessMesh
from weft.models import ExpertPlan, PipelinePlan
from weft.models.families import make_model
from weft.models.predict.hang_report import Hang
from weft.models.predict.hangs import NoHang, check_hangs, find_hang
from weft.models.predict.matching import Issued, Program
from weft.models.predict.rank_kinds import _divide, check_plan
from weft.models.schedules.schedule import NAMES, Action, Schedule
from weft.models.step.record import RecordedStep, StepShape, run_on_shapes

from tests.models.predict import hanging
from tests.models.predict.hanging import CASES, Case, tensor
from tests.models.test_every_mesh import FAMILIES, KEY, LENGTH, criterion_of, inputs_of, mesh_of, needs, rows_of, table
from tests.models.test_every_mesh import plans as plans_of
from tests.support.pool import RanksFailed

Sizes = tuple[int, int, int, int]  # of pp, dp, cp and tp


@pytest.mark.every_value
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs_that_hang(case: Case) -> None:
    found = check_hangs(case.program, ProcessMesh.grid(tp=case.ranks))
    assert isinstance(found, Hang), found
    assert (found.kind, found.rule) == (case.kind, case.rule), found
    text = str(found)
    assert [part for part in case.said if part not in text] == [], text
    assert "hanging.py" in text, "both sides name a line"


# ----- programs that run


def everything() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([0, ranks - 1])
    if rank in (0, ranks - 1):
        dist.all_reduce(tensor(), group=group)
    dist.broadcast(tensor(), src=1)
    gathered = tensor(ranks * 4)
    work = dist.all_gather_single(gathered, tensor(4), async_op=True)
    dist.barrier()
    work.wait()
    dist.all_to_all_single(tensor(4 * ranks), tensor(4 * ranks))


def messages_in_turns() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for parity in range(2):
        if rank % 2 == parity:
            dist.send(tensor(), (rank + 1) % ranks, tag=7)
        else:
            dist.recv(tensor(), (rank - 1) % ranks, tag=7)


def messages_in_a_batch() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ends = (rank + 1) % ranks, (rank - 1) % ranks
    ops = [dist.P2POp(dist.isend, tensor(), ends[0]), dist.P2POp(dist.irecv, tensor(), ends[1])]
    for _ in range(2):
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def receives_posted_ahead() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    work = dist.irecv(tensor(), (rank - 1) % ranks)
    assert work is not None
    sent = dist.isend(tensor(), (rank + 1) % ranks)
    assert sent is not None
    work.wait()
    sent.wait()


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("program", "ranks", "calls"),
    [
        (everything, 4, 6),
        (messages_in_turns, 4, 2),
        (messages_in_a_batch, 2, 4),
        (messages_in_a_batch, 3, 4),
        (receives_posted_ahead, 3, 2),
        (nothing, 1, 0),
        (nothing, 2, 0),
    ],
)
def test_programs_that_run(program: Callable[[], None], ranks: int, calls: int) -> None:
    assert check_hangs(program, ProcessMesh.grid(dp=ranks)) == NoHang(
        ranks=ranks, kinds=ranks, recorded=ranks, calls=calls
    )


def test_ranks_that_are_not_recorded_are_taken_to_join() -> None:
    mesh = ProcessMesh.grid(dp=100)
    found = check_hangs(everything, mesh, ranks=[0, 1, 99])
    assert (found.hangs, str(found)) == (
        False,
        "no rank waits for another: 3 ranks, 6 collectives and sends each at most",
    )
    with pytest.raises(ValueError, match="has 100 ranks, and up to 64 are recorded; give `ranks`"):
        check_hangs(everything, mesh)
    with pytest.raises(ValueError, match="rank 100 of `ranks` is not in"):
        check_hangs(everything, mesh, ranks=[100])


def test_a_program_that_fails_names_its_rank() -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data") as error:
        check_hangs(fails, ProcessMesh.grid(dp=2))
    assert (
        error.value.__notes__
        == ["raised by the program of rank 1 of ProcessMesh(dp=2), which runs on tensors without data"]
        or "rank 1" in error.value.__notes__[0]
    )
    assert not dist.is_initialized()


def test_both_sides_beside_one_another() -> None:
    """The whole text of a `Hang`."""
    found = check_hangs(hanging.sends_in_a_circle, ProcessMesh.grid(dp=2))
    line = hanging.sends_in_a_circle.__code__.co_firstlineno + 2
    at = f"hanging.py:{line} in sends_in_a_circle"
    n = len(at)
    assert str(found).splitlines() == [
        "ranks 0, 1 wait for one another in a circle",
        f"  {'rank 0, call 1':{n}}  |  rank 1, call 1",
        f"  {'send of [4, 2] float32 to rank 1':{n}}  |  send of [4, 2] float32 to rank 0",
        f"  {'group of ranks 0, 1':{n}}  |  group of ranks 0, 1",
        f"  {at}  |  {at}",
        "waits",
        f"  rank 0 waits in call 1, send of [4, 2] float32 to rank 1 ({at}): rank 1 issues its part after its call 1",
        f"  rank 1 waits in call 1, send of [4, 2] float32 to rank 0 ({at}): rank 0 issues its part after its call 1",
        "hangs on every backend",
    ]


def test_ranks_that_make_groups_in_other_orders() -> None:
    """Making a group waits for the members, in a recording as in real processes."""

    def group(rank: int, *members: int) -> list[Any]:
        return [Issued(kind="make group", group=f"ranks {members}", members=members)]

    programs = [
        Program(0, (*group(0, 0, 1), 0, *group(0, 0, 2), 1)),
        Program(1, (*group(1, 1, 2), 0, *group(1, 0, 1), 1)),
        Program(2, (*group(2, 0, 2), 0, *group(2, 1, 2), 1)),
    ]
    found = find_hang(programs)
    assert isinstance(found, Hang) and found.kind == "cycle" and len(found.waits) == 3


# ----- plans of Weft's


def checked(
    family: str, sizes: Sizes, changes: dict[str, Any], *, most_ranks: int = 64, fault: Any = None, **config: Any
) -> NoHang | Hang:
    """A training step of a family's small model on shapes, of all ranks; or of some of each kind."""
    layers, microbatches = needs(sizes, {"pipeline": None, **changes})
    mesh = mesh_of(sizes)
    with torch.device("meta"):
        model = make_model(replace(FAMILIES[family], **{"num_layers": layers, **config}))
    rows = max(rows_of(microbatches), 2 * sizes[1]) if most_ranks < 64 else rows_of(microbatches)
    length = 16 if most_ranks < 64 else LENGTH
    shape = StepShape(
        batch=(rows * microbatches if most_ranks < 64 else rows, length),
        criterion=criterion_of(model, microbatches),
        inputs=inputs_of(model, KEY),
        microbatches=microbatches,
    )
    plan = replace(model.parallel_plan(), **changes)

    def record_rank(rank: int, listen: Any) -> RecordedStep:
        update = None if fault is None else lambda _: fault(rank)
        return run_on_shapes(model, mesh, plan, replace(shape, rank=rank), clip_norm=1.0, update=update, listen=listen)

    batch = shape.batch[0] // microbatches, length
    assert isinstance(batch[0], int)
    return check_plan(record_rank, mesh, plan, batch=batch, most_ranks=most_ranks)


def pipeline(name: Any, microbatches: int = 4) -> PipelinePlan:
    return PipelinePlan(schedule=name, microbatches=microbatches)


PLANS: list[tuple[str, Sizes, dict[str, Any]]] = [
    *(("llama", (1, 3, 1, 1), {"zero": zero}) for zero in range(4)),
    *(("qwen2", (2, 1, 1, 1), {"pipeline": pipeline(name)}) for name in NAMES),  # embedding and output are tied
    *(("gpt", (4, 1, 1, 1), {"pipeline": pipeline(name)}) for name in NAMES),
    *(("llama", (1, 1, 2, 1), {"context": way, "zero": 1}) for way in ("all_gather", "ulysses")),
    *(
        ("llama", (1, 1, 1, 2), {"sequence": sequence, "recompute": kind})
        for sequence, kind in product((False, True), ("selective", "full"))
    ),
    *(("mixtral", (1, 4, 1, 1), {"experts": ExpertPlan(size=2, tokens=way)}) for way in ("gather", "exchange")),
    ("qwen3_moe", (1, 2, 1, 2), {"experts": ExpertPlan(size=4, over_tp=True, tokens="exchange"), "zero": 2}),
    ("qwen2", (2, 2, 1, 1), {"zero": 3, "pipeline": pipeline("1f1b")}),
    ("qwen3", (2, 1, 1, 2), {"zero": 0, "sequence": True, "pipeline": pipeline("zero_bubble")}),
]


@pytest.mark.parametrize(
    ("before", "position", "after"),
    [
        pytest.param([0, 0, 0, 0], 2, [0, 0, 2, 2], id="neighbours"),
        pytest.param([0, 1, 0, 1, 0], 1, [0, 1, 2, 1, 2], id="a-further-kind-at-the-position"),
        pytest.param([0, 1, 0, 1, 0], 3, [0, 1, 0, 1, 4], id="a-further-kind-between"),
    ],
)
def test_a_divided_kind_joins_no_further_kind(before: list[int], position: int, after: list[int]) -> None:
    kind_at = {"dp": [0, 0], "tp": before}
    _divide(kind_at, "tp", 0, position)
    assert kind_at == {"dp": [0, 0], "tp": after}


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "sizes", "changes"), PLANS)
def test_plans_of_the_table_are_not_accused(family: str, sizes: Sizes, changes: dict[str, Any]) -> None:
    found = checked(family, sizes, changes)
    assert isinstance(found, NoHang), f"\n{found}"
    assert found.calls > 0


@pytest.mark.exhaustive
@pytest.mark.table
@pytest.mark.parametrize(("sizes", "cases"), list(table()))
def test_no_plan_of_the_table_is_accused(
    sizes: Sizes, cases: list[tuple[str, int]], combinations: Callable[[int], None]
) -> None:
    combinations(len(cases))
    for family, number in cases:
        changes = plans_of(sizes, list(FAMILIES).index(family))[number]
        found = checked(family, sizes, changes)
        assert isinstance(found, NoHang), f"{family}, {changes}\n{found}"


def test_a_schedule_that_waits_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage waits for B0 before sending F1; the last stage waits for F1 before sending B0."""

    def actions(text: str, stage: int) -> tuple[Action, ...]:
        return tuple(Action(each[0], stage, int(each[1])) for each in text.split())  # type: ignore[arg-type]

    circle = Schedule(
        name="circle",
        microbatches=2,
        stages=((0,), (1,)),
        actions=(actions("F0 B0 F1 B1", 0), actions("F0 F1 B0 B1", 1)),
    )
    monkeypatch.setattr(PipelinePlan, "make_schedule", lambda *_: circle)
    found = checked("llama", (2, 1, 1, 1), {"pipeline": pipeline("1f1b", 2)})
    assert isinstance(found, Hang) and (found.kind, found.rule) == ("cycle", "gloo"), found
    assert "ranks 0, 1 wait for one another in a circle" in str(found)
    assert [step.split()[7] for step in found.waits] == ["of", "of"] and str(found).count("recv of") >= 2


# ----- kinds of ranks

EVEN: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "head_dim": 8, "intermediate_size": 128
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "sizes", "changes", "config", "kinds"),
    [
        pytest.param("llama", (1, 4, 1, 1), {"zero": 3}, EVEN, 1, id="zero3"),
        pytest.param("llama", (2, 2, 1, 2), {"sequence": True, "pipeline": pipeline("1f1b")}, EVEN, 2, id="stages"),
        pytest.param("llama", (1, 1, 1, 4), {}, EVEN | {"vocab_size": 63}, 2, id="uneven-vocabulary"),
    ],
)
def test_some_ranks_of_each_kind_stand_for_all(
    family: str, sizes: Sizes, changes: dict[str, Any], config: dict[str, Any], kinds: int
) -> None:
    found = checked(family, sizes, changes, most_ranks=1, **config)
    assert isinstance(found, NoHang), found
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert (found.ranks, found.kinds) == (count, kinds)
    assert found.recorded <= count
    assert f"{count} ranks in {kinds} kind" in str(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("culprit", [0, 5, 7])
def test_a_rank_of_a_kind_that_does_something_else_is_found(culprit: int) -> None:
    """Where the first or the last rank of a kind differs, further ranks are recorded, and the kind is divided."""

    def fault(rank: int) -> None:
        from weft.reshard.extension import world

        if rank >= culprit if culprit else rank == 0:
            dist.all_reduce(tensor(3), group=world().group_of_ranks(tuple(range(8))))

    found = checked("llama", (1, 8, 1, 1), {"zero": 1}, most_ranks=1, fault=fault, **EVEN)
    assert isinstance(found, Hang) and found.kind == "missing", found
    assert "all-reduce of [3] float32" in str(found)


# ----- real processes


def run_and_stay(program: Callable[[], None]) -> None:
    """Run a program, and keep the rank's connections open afterwards, as a training loop would."""
    program()
    time.sleep(30)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "waiting"),
    [(hanging.condition_on_rank, [0]), (hanging.receive_without_send, [1]), (hanging.sends_in_a_circle, [0, 1])],
)
def test_programs_found_to_hang_do_hang_on_gloo(program: Callable[[], None], waiting: list[int], pool: Any) -> None:
    """The waiting ranks hang in a wait of torch.distributed, the remaining ranks reach the end of the program.

    Plans without hangs run in test_every_mesh.py, test_pipeline.py and test_zero.py.
    """
    assert check_hangs(program, ProcessMesh.grid(dp=2)).hangs
    with pytest.raises(RanksFailed) as error:
        pool.run(run_and_stay, program, ranks=2, timeout=4.0)
    hanging_ranks = [failure.rank for failure in error.value.failures if f"in {program.__name__}" in failure.what]
    assert sorted(hanging_ranks) == waiting, str(error.value)
    assert all(failure.what.startswith("no answer") for failure in error.value.failures), str(error.value)


@pytest.mark.exhaustive
def test_programs_found_without_hangs_run_on_gloo(pool: Any) -> None:
    for program, ranks in ((everything, 4), (messages_in_turns, 2), (receives_posted_ahead, 3)):
        assert not check_hangs(program, ProcessMesh.grid(dp=ranks)).hangs
        pool.run(program, ranks=ranks)
