"""Plans: right on every rank (simulated, against slices of the whole), minimal, priced by hand, equal by value."""

import contextlib
import io
import itertools
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh
from weft.reshard import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Link,
    MakePartial,
    Permute,
    Plan,
    ReduceScatter,
    Slice,
    Topology,
    plan,
    simulate,
)

from tests.support.shards import every_layout, split, whole_of

LINE = ProcessMesh.grid(tp=2)
FOUR = ProcessMesh.grid(tp=4)
GRID = ProcessMesh.grid(dp=2, tp=2)
OPS = ("sum", "avg", "min", "max", "product")
F32 = torch.float32


BASIC = [
    pytest.param(LINE, "tp: R", "tp: R", (), id="R-R"),
    pytest.param(LINE, "tp: S(1)", "tp: S(1)", (), id="S1-S1"),
    pytest.param(LINE, "tp: P", "tp: P", (), id="P-P"),
    pytest.param(LINE, "tp: S(0)", "tp: R", (AllGather("tp", dim=0),), id="S0-R"),
    pytest.param(LINE, "tp: S(1)", "tp: R", (AllGather("tp", dim=1),), id="S1-R"),
    pytest.param(LINE, "tp: P", "tp: R", (AllReduce("tp"),), id="P-R"),
    pytest.param(LINE, "tp: P(max)", "tp: R", (AllReduce("tp", "max"),), id="Pmax-R"),
    pytest.param(LINE, "tp: P", "tp: S(1)", (ReduceScatter("tp", dim=1),), id="P-S1"),
    pytest.param(LINE, "tp: P(avg)", "tp: S(0)", (ReduceScatter("tp", dim=0, op="avg"),), id="Pavg-S0"),
    pytest.param(LINE, "tp: P(max)", "tp: S(0)", (ReduceScatter("tp", 0, "max"),), id="Pmax-S0"),
    pytest.param(LINE, "tp: S(0)", "tp: S(1)", (AllToAll("tp", src_dim=0, dst_dim=1),), id="S0-S1"),
    pytest.param(LINE, "tp: R", "tp: S(0)", (Slice("tp", dim=0),), id="R-S0"),
    pytest.param(LINE, "tp: R", "tp: P", (MakePartial("tp"),), id="R-P"),
    pytest.param(LINE, "tp: S(0)", "tp: P", (MakePartial("tp", dim=0),), id="S0-P"),
    pytest.param(GRID, "dp: S(0), tp: P", "dp: S(0), tp: R", (AllReduce("tp"),), id="row-parallel"),
    pytest.param(GRID, "dp: S(0), tp: P", "dp: S(0), tp: S(1)", (ReduceScatter("tp", dim=1),), id="sequence-parallel"),
    pytest.param(GRID, "dp: P, tp: S(0)", "dp: R, tp: S(0)", (AllReduce("dp"),), id="gradient"),
    pytest.param(GRID, "tp: S(0), dp: P", "tp: S(0), dp: S(0)", (ReduceScatter("dp", dim=0),), id="zero"),
    pytest.param(GRID, "tp: S(0), dp: S(0)", "tp: S(0)", (AllGather("dp", dim=0),), id="zero-gather"),
    pytest.param(GRID, "dp: S(0), tp: S(0)", "dp: S(0)", (AllGather("tp", dim=0),), id="minor-gather"),
    pytest.param(GRID, "dp: S(0)", "tp: S(0)", (Exchange(Layout(GRID, "tp: S(0)")),), id="moved"),
    pytest.param(GRID, "dp: S(0), tp: S(0)", "", (AllGather(("dp", "tp"), (0, 0)),), id="gathers-in-one"),
    pytest.param(GRID, "dp: S(0), tp: S(1)", "", (AllGather(("dp", "tp"), (0, 1)),), id="gathers-of-two-dims-in-one"),
    pytest.param(GRID, "dp: P, tp: P", "", (AllReduce(("dp", "tp")),), id="all-reduces-in-one"),
    pytest.param(
        GRID, "dp: P, tp: P", "dp: S(0), tp: S(0)", (ReduceScatter(("dp", "tp"), (0, 0)),), id="scatters-in-one"
    ),
    pytest.param(
        GRID, "dp: S(0), tp: S(1)", "dp: S(1), tp: S(0)", (Permute(Layout(GRID, "dp: S(1), tp: S(0)")),), id="turned"
    ),
    pytest.param(GRID, "dp: S(0)", "dp: S(0), tp: S(0)", (Slice("tp", 0),), id="sliced"),
]


@pytest.mark.parametrize("mesh, src, dst, steps", BASIC)
def test_steps_are_minimal(mesh, src, dst, steps):
    assert plan(Layout(mesh, src), Layout(mesh, dst), (8, 8), F32).steps == steps


@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (5, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("mesh, src, dst, steps", [case for case in BASIC if case.values[0] is LINE])
def test_steps_are_minimal_on_uneven_sizes_too(mesh, src, dst, steps, shape):
    assert plan(Layout(mesh, src), Layout(mesh, dst), shape, F32).steps == steps


def test_an_axis_of_size_one_moves_nothing():
    mesh = ProcessMesh.grid(dp=1, tp=2)
    for src, dst in itertools.product(("R", "S(0)", "S(1)", "P(sum)", "P(max)"), repeat=2):
        assert plan(Layout(mesh, f"dp: {src}"), Layout(mesh, f"dp: {dst}"), (4, 4), F32).steps == ()


@pytest.mark.parametrize(
    "mesh, src, dst, shape, received",
    [
        # fp32: 4 bytes. Four ranks, 8 x 8 = 64 elements.
        pytest.param(FOUR, "tp: S(0)", "tp: R", (8, 8), [4 * 48] * 4, id="all-gather"),
        pytest.param(FOUR, "tp: P", "tp: R", (8, 8), [4 * 2 * 3 * 16] * 4, id="all-reduce"),
        pytest.param(FOUR, "tp: P", "tp: S(0)", (8, 8), [4 * 3 * 16] * 4, id="reduce-scatter"),
        pytest.param(FOUR, "tp: S(0)", "tp: S(1)", (8, 8), [4 * 3 * 4] * 4, id="all-to-all"),
        pytest.param(FOUR, "tp: R", "tp: S(1)", (8, 8), [0] * 4, id="slice"),
        pytest.param(FOUR, "tp: R", "tp: P", (8, 8), [0] * 4, id="make-partial"),
        # Three chunks of ceil(7 / 4) = 2 rows of 3: the last is padded.
        pytest.param(FOUR, "tp: S(0)", "tp: R", (7, 3), [4 * 3 * 2 * 3] * 4, id="all-gather-uneven"),
        # Of 5 rows ranks hold 2, 2, 1 and 0: padding would make the last rank receive 6, so parts are exchanged
        # unpadded.
        pytest.param(FOUR, "tp: S(0)", "tp: R", (5, 3), [4 * 9, 4 * 9, 4 * 12, 4 * 15], id="exchange-uneven"),
        # 5 x 3 elements in chunks of ceil(15 / 4) = 4: three for the reduce-scatter, three for the all-gather.
        pytest.param(FOUR, "tp: P", "tp: R", (5, 3), [4 * 24] * 4, id="all-reduce-uneven"),
        # Three chunks of ceil(5 / 4) = 2 rows.
        pytest.param(FOUR, "tp: P", "tp: S(0)", (5, 3), [4 * 3 * 2 * 3] * 4, id="reduce-scatter-uneven"),
        # Rows 2, 2, 1 and none of 5; columns 1, 1, 1 and none of 3: 5 elements each, less the own rows'.
        pytest.param(FOUR, "tp: S(0)", "tp: S(1)", (5, 3), [4 * 3, 4 * 3, 4 * 4, 0], id="all-to-all-uneven"),
        pytest.param(FOUR, "tp: P", "tp: S(0)", (0, 3), [0] * 4, id="nothing"),
        pytest.param(GRID, "dp: S(0), tp: P", "dp: S(0)", (8, 8), [4 * 2 * 16] * 4, id="local-to-the-axis"),
    ],
)
def test_received_bytes_by_hand(mesh, src, dst, shape, received):
    made = plan(Layout(mesh, src), Layout(mesh, dst), shape, F32)
    assert [made.received_bytes(rank) for rank in mesh.ranks] == received
    assert made.max_received_bytes == max(received)
    assert made.received_bytes(99) == 0
    half = plan(Layout(mesh, src), Layout(mesh, dst), shape, torch.bfloat16)
    assert half.max_received_bytes * 2 == max(received)


def test_no_plan_is_dearer_than_gathering_everything():
    for src, dst in itertools.product(every_layout(GRID, 2, partials=()), repeat=2):
        whole = Layout(GRID)
        over_whole = plan(src, whole, (8, 8), F32).received_bytes(0) + plan(whole, dst, (8, 8), F32).received_bytes(0)
        assert plan(src, dst, (8, 8), F32).received_bytes(0) <= over_whole


def test_plans_are_values_found_again():
    src, dst = Layout(GRID, "dp: S(0)"), Layout(GRID, "tp: S(1)")
    first = plan(src, dst, (8, 8), F32)
    again = plan(Layout(ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]), "dp: S(0)"), dst, torch.Size((8, 8)), F32)
    assert again is first
    assert pickle.loads(pickle.dumps(first)) == first
    assert hash(first) and first.layouts
    assert pickle.dumps(first) == pickle.dumps(replace(first))  # a hash is another in each process
    assert isinstance(first, Plan)
    assert plan(src, dst, [8, 8], torch.bfloat16) != first
    with pytest.raises(AttributeError):
        first.steps = ()


PLANS = (
    "import hashlib, itertools, torch; from weft.mesh import *; from weft.reshard import plan; "
    "mesh = ProcessMesh.grid(dp=2, tp=2); texts = ['R', 'S(0)', 'S(1)', 'P(sum)']; "
    "layouts = [Layout(mesh, p) for p in itertools.product(texts, repeat=2)]; "
    "plans = [plan(a, b, (6, 6), torch.float32).explain() for a in layouts for b in layouts]; "
    "print(hashlib.sha256(repr(plans).encode()).hexdigest())"
)


def planned() -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(PLANS, {})
    return printed.getvalue()


@pytest.mark.exhaustive
def test_the_same_plans_in_every_worker(pool):
    """Ties are broken alike in every process, whatever strings hash to, and whatever was planned before."""
    assert pool.run(planned, ranks=1) == [planned()]


@pytest.mark.exhaustive
def test_the_same_plans_in_every_process():
    there = subprocess.run(
        [sys.executable, "-c", PLANS],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == planned()


def test_explain_draws_the_steps_and_their_bytes():
    made = plan(Layout(GRID, "dp: S(0), tp: P"), Layout(GRID, "dp: S(0)"), (8, 8), F32)
    assert (
        made.explain()
        == """\
(dp: S(0), tp: P(sum)) -> (dp: S(0), tp: R)
torch.float32 (8, 8) on ProcessMesh.grid(dp=2, tp=2)
received by the busiest rank: 128 bytes, as few as any plan
alive at once on a rank: 256 bytes at most

1. AllReduce('tp'): 128 bytes
       +-----+          +-----+
   0:4 | 0+1 |      0:4 | 0 1 |
       +-----+  ->      +-----+
   4:8 | 2+3 |      4:8 | 2 3 |
       +-----+          +-----+\
"""
    )
    nothing = plan(Layout(GRID), Layout(GRID), (8, 8), F32).explain()
    assert nothing.endswith("nothing to do\n+-----+\n| 0-3 |\n+-----+")


def test_explain_lists_what_each_of_a_few_ranks_receives_where_that_differs():
    uneven = plan(Layout(GRID, "dp: S(0), tp: P"), Layout(GRID, "tp: S(0)"), (8, 6), F32)
    assert "received by each: rank 0 96, rank 1 144, rank 2 144, rank 3 96 bytes\n" in uneven.explain()
    even = plan(Layout(LINE, "tp: S(0)"), Layout(LINE), (4,), F32)
    many = ProcessMesh.grid(tp=17)
    for made in (even, plan(Layout(many, "tp: S(0)"), Layout(many), (18,), F32)):
        assert "received by each" not in made.explain()


def test_explain_fits_a_narrow_terminal():
    text = "dp: S(0), tp: S(0)"
    made = plan(Layout(GRID, text), Layout(GRID, "tp: S(1)"), (8, 8), F32)
    pictures = {width: made.explain(width=width).partition("\n\n")[2].splitlines() for width in (24, 40)}
    assert max(map(len, pictures[40])) > 24
    assert "   ->" in pictures[24]
    assert max(map(len, pictures[24][1:])) <= 24


def test_on_a_terminal_the_cells_of_a_plan_are_coloured():
    made = plan(Layout(LINE, "tp: S(0)"), Layout(LINE, "tp: S(1)"), (2, 2), F32)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    console.print(made)
    assert "1:2 |\x1b[33m 1 \x1b[0m|      +-----+-----+" in console.file.getvalue()
    plain = Console(file=io.StringIO(), width=120)
    plain.print(made)
    assert plain.file.getvalue() == made.explain() + "\n"


def test_explain_states_the_gap_to_the_bound_and_the_time():
    links = Topology({"dp": Link(1e-6, 1e9), "tp": Link(1e-6, 1e9)})
    text = plan(Layout(GRID, "dp: S(1), tp: P"), Layout(GRID, "tp: S(1)"), (8, 8), F32, topology=links).explain()
    assert "256 bytes, at least 128 by the bound, 2.00 times that" in text
    assert "predicted time: 2.3 us" in text  # two messages of 1 us and 256 bytes at 1 GB/s


def test_explain_draws_both_meshes():
    far = ProcessMesh.grid(tp=2, first_rank=4)
    text = plan(Layout(LINE, "tp: S(0)"), Layout(far, "tp: S(1)"), (4, 4), F32).explain()
    assert "on ProcessMesh.grid(tp=2) -> ProcessMesh.grid(tp=2, first_rank=4)" in text
    assert "Exchange(tp: S(1) on ProcessMesh.grid(tp=2, first_rank=4))" in text


class TestReplicateToPartial:
    """The value stays at index 0, and further ranks hold the identity: nothing is divided, so nothing is rounded."""

    def test_integers_stay_integers(self):
        parts = simulate(
            plan(Layout(LINE), Layout(LINE, "tp: P"), (3,), torch.int64), split(whole_of((3,)), Layout(LINE))
        )
        assert parts[0].tolist() == whole_of((3,)).tolist()
        assert parts[1].tolist() == [0, 0, 0]
        assert parts[1].dtype == torch.int64

    @pytest.mark.parametrize("op", ["sum", "min", "max", "product"])  # 3 x / 3 rounds
    def test_round_trip_is_exact_in_bf16(self, op):
        mesh = ProcessMesh.grid(tp=3)
        whole = torch.tensor([0.1, -3.3, 7e30], dtype=torch.bfloat16)
        there = plan(Layout(mesh), Layout(mesh, {"tp": Partial(op)}), whole.shape, whole.dtype)
        back = plan(Layout(mesh, {"tp": Partial(op)}), Layout(mesh), whole.shape, whole.dtype)
        results = simulate(back, simulate(there, split(whole, Layout(mesh))))
        assert all(torch.equal(result, whole) for result in results.values())


@pytest.mark.parametrize(
    "src, dst, shape, dtype, message",
    [
        pytest.param("dp: P(sum), tp: P(max)", "", (4,), F32, r"mixes the reductions \['max', 'sum'\]", id="mixed"),
        pytest.param(
            "", "dp: P(avg), tp: P(sum)", (4,), F32, r"mixes the reductions \['avg', 'sum'\]", id="mixed-target"
        ),
        pytest.param("tp: P(sum)", "tp: P(max)", (4,), F32, r"goes from P\(sum\) to P\(max\)", id="changed"),
        pytest.param(
            "tp: P(avg)", "", (4,), torch.int64, r"averages torch.int64.*use Partial\('sum'\)", id="integer-avg"
        ),
        pytest.param("", "tp: P(avg)", (4,), torch.bool, "averages torch.bool", id="bool-avg"),
        pytest.param("tp: S(1)", "", (4,), F32, "shards dim 1 of a tensor of shape", id="no-such-dim"),
        pytest.param("", "tp: S(0)", (), F32, "which has 0 dims", id="scalar"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(src, dst, shape, dtype, message):
    with pytest.raises(LayoutError, match=message):
        plan(Layout(GRID, src), Layout(GRID, dst), shape, dtype)


@pytest.mark.parametrize("lost", ["missing", "shape"])
def test_simulate_refuses_parts_that_do_not_fit(lost):
    parts = split(whole_of((5,)), Layout(LINE, "tp: S(0)"))
    parts = {0: parts[0]} if lost == "missing" else {0: parts[1], 1: parts[1]}
    with pytest.raises(LayoutError, match=r"rank [01] has a tensor of shape"):
        simulate(plan(Layout(LINE, "tp: S(0)"), Layout(LINE), (5,), torch.int64), parts)


def test_simulate_leaves_its_input_alone():
    parts = split(whole_of((4,)), Layout(LINE, "tp: P"))
    before = {rank: part.clone() for rank, part in parts.items()}
    for dst in ("tp: P", "tp: R"):
        for result in simulate(plan(Layout(LINE, "tp: P"), Layout(LINE, dst), (4,), torch.int64), parts).values():
            result.add_(1)
    assert all(torch.equal(parts[rank], before[rank]) for rank in parts)
