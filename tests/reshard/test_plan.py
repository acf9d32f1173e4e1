"""Plans: right on every rank (simulated, against slices of the whole tensor), minimal, priced by hand, equal by value."""

import itertools
import os
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard
from weft.reshard import AllGather, AllReduce, AllToAll, MakePartial, Plan, ReduceScatter, Slice, plan, simulate
from weft.reshard.search import cheapest

from tests.support.shards import every_layout, rebuild, split

LINE = ProcessMesh.grid(tp=2)
FOUR = ProcessMesh.grid(tp=4)
GRID = ProcessMesh.grid(dp=2, tp=2)
OPS = ("sum", "avg", "min", "max", "product")
F32 = torch.float32


def whole_of(shape, dtype=torch.int64):
    values = torch.arange(torch.Size(shape).numel()).mul(37).remainder(23).sub(11)
    return values.reshape(tuple(shape)).to(dtype)


def check(src, dst, whole, parts=None):
    """The plan's result is every rank's part of the whole."""
    made = plan(src, dst, whole.shape, whole.dtype)
    results = simulate(made, split(whole, src) if parts is None else parts)
    assert torch.equal(rebuild(results, dst, whole.shape), whole), made.explain()


@pytest.mark.parametrize(
    "mesh, shapes",
    [
        pytest.param(LINE, list(itertools.product(range(8), repeat=2)), id="2"),
        pytest.param(ProcessMesh.grid(tp=3), list(itertools.product(range(8), repeat=2)), id="3"),
        pytest.param(GRID, [(7, 5), (1, 6), (3, 0), (4, 4)], id="2x2"),
        pytest.param(ProcessMesh.grid(dp=2, tp=3), [(7, 5), (2, 7)], id="2x3"),
        pytest.param(ProcessMesh([[3, 0], [5, 1]], ["tp", "dp"]), [(5, 3)], id="any-ranks"),
        pytest.param(ProcessMesh.grid(dp=1, tp=2), [(3, 2)], id="1x2"),
        pytest.param(ProcessMesh.grid(dp=2, cp=2, tp=2), [(5, 9)], id="2x2x2-few"),
    ],
)
def test_every_pair_of_layouts(mesh, shapes):
    layouts = every_layout(mesh, 2)
    if mesh.ndim == 3:
        layouts = layouts[::7]
    for shape in shapes:
        whole = whole_of(shape)
        for src in layouts:
            parts = split(whole, src)
            for dst in layouts:
                check(src, dst, whole, parts)


@pytest.mark.parametrize("shape", [pytest.param((n,), id=str(n)) for n in range(8)])
def test_every_pair_of_a_vector(shape):
    for src, dst in itertools.product(every_layout(ProcessMesh.grid(dp=2, tp=3), 1), repeat=2):
        check(src, dst, whole_of(shape))


def test_every_pair_of_a_scalar():
    for src, dst in itertools.product(every_layout(GRID, 0), repeat=2):
        check(src, dst, torch.tensor(5))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_larger_meshes_and_more_dims(data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = ProcessMesh.grid(**dict(zip(("dp", "cp", "tp"), sizes, strict=False)))
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    placements = st.one_of(st.just("R"), st.just("P(sum)"), st.integers(0, len(shape) - 1).map(lambda dim: f"S({dim})"))

    def layout():
        return Layout(
            mesh, ", ".join(f"{axis}: {data.draw(placements)}" for axis in data.draw(st.permutations(mesh.axis_names)))
        )

    check(layout(), layout(), whole_of(shape))


@pytest.mark.parametrize("op", OPS)
def test_every_reduction(op):
    """Source and target may both be Partial, on the same axis or on others."""
    dtype = torch.float64 if op == "avg" else torch.int64
    for src, dst in itertools.product(every_layout(GRID, 2, [Partial(op)]), repeat=2):
        check(src, dst, whole_of((5, 3), dtype))


@pytest.mark.parametrize(
    "first, then, dtype",
    [
        pytest.param(first, then, dtype, id=f"{first}-{then}-{dtype}".replace("torch.", ""))
        for first, then in itertools.permutations(OPS, 2)
        for dtype in (torch.int64, torch.float64)
        if dtype.is_floating_point or "avg" not in (first, then)
    ],
)
def test_one_reduction_resolved_while_another_begins(first, then, dtype):
    """The identity of the second may not be reduced by the first: a sum of ones is 2."""
    for ahead, behind in (("dp", "tp"), ("tp", "dp")):
        check(Layout(GRID, {ahead: Partial(first)}), Layout(GRID, {behind: Partial(then)}), whole_of((5, 3), dtype))


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
    pytest.param(LINE, "tp: P(max)", "tp: S(0)", (AllReduce("tp", "max"), Slice("tp", 0)), id="Pmax-S0"),
    pytest.param(LINE, "tp: S(0)", "tp: S(1)", (AllToAll("tp", src_dim=0, dst_dim=1),), id="S0-S1"),
    pytest.param(LINE, "tp: R", "tp: S(0)", (Slice("tp", dim=0),), id="R-S0"),
    pytest.param(LINE, "tp: R", "tp: P", (MakePartial("tp"),), id="R-P"),
    pytest.param(LINE, "tp: S(0)", "tp: P", (AllGather("tp", dim=0), MakePartial("tp")), id="S0-P"),
    pytest.param(GRID, "dp: S(0), tp: P", "dp: S(0), tp: R", (AllReduce("tp"),), id="row-parallel"),
    pytest.param(GRID, "dp: S(0), tp: P", "dp: S(0), tp: S(1)", (ReduceScatter("tp", dim=1),), id="sequence-parallel"),
    pytest.param(GRID, "dp: P, tp: S(0)", "dp: R, tp: S(0)", (AllReduce("dp"),), id="gradient"),
    pytest.param(GRID, "tp: S(0), dp: P", "tp: S(0), dp: S(0)", (ReduceScatter("dp", dim=0),), id="zero"),
    pytest.param(GRID, "tp: S(0), dp: S(0)", "tp: S(0)", (AllGather("dp", dim=0),), id="zero-gather"),
    pytest.param(GRID, "dp: S(0), tp: S(0)", "dp: S(0)", (AllGather("tp", dim=0),), id="minor-gather"),
    pytest.param(GRID, "dp: S(0)", "tp: S(0)", None, id="moved"),
]


@pytest.mark.parametrize("mesh, src, dst, steps", BASIC)
def test_steps_are_minimal(mesh, src, dst, steps):
    made = plan(Layout(mesh, src), Layout(mesh, dst), (8, 8), F32)
    if steps is None:  # one step cannot do it; two do
        assert len(made.steps) == 2
    else:
        assert made.steps == steps


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
        # Three chunks of ceil(5 / 4) = 2 rows.
        pytest.param(FOUR, "tp: S(0)", "tp: R", (5, 3), [4 * 3 * 2 * 3] * 4, id="all-gather-uneven"),
        # 5 x 3 elements in chunks of ceil(15 / 4) = 4, twice three of them.
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
    assert isinstance(first, Plan)
    assert plan(src, dst, [8, 8], torch.bfloat16) != first
    with pytest.raises(AttributeError):
        first.steps = ()


def test_the_same_plans_in_every_process():
    """Ties are broken the same way whatever strings hash to, and whatever was planned before."""
    made = (
        "import hashlib, itertools, torch; from weft.mesh import *; from weft.reshard import plan; "
        "mesh = ProcessMesh.grid(dp=2, tp=2); texts = ['R', 'S(0)', 'S(1)', 'P(sum)']; "
        "layouts = [Layout(mesh, p) for p in itertools.product(texts, repeat=2)]; "
        "plans = [plan(a, b, (6, 6), torch.float32).explain() for a in layouts for b in layouts]; "
        "print(hashlib.sha256(repr(plans).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", made], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    }
    assert len(digests) == 1


def test_explain_names_the_steps_and_their_bytes():
    text = plan(Layout(GRID, "dp: S(0), tp: P"), Layout(GRID), (8, 8), F32).explain()
    assert text.splitlines()[0].startswith("(dp: S(0), tp: P(sum)) -> (dp: R, tp: R)  torch.float32 (8, 8)")
    assert "AllGather(axis='dp', dim=0)" in text
    assert "AllReduce(axis='tp', op='sum')" in text or "ReduceScatter(axis='tp'" in text
    assert "nothing to do" in plan(Layout(GRID), Layout(GRID), (8, 8), F32).explain()


class TestReplicateToPartial:
    """The value stays at index 0 and the others hold the identity: nothing is divided, so nothing is rounded."""

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


def test_a_plan_stays_on_one_mesh():
    with pytest.raises(LayoutError, match="a plan stays on one mesh"):
        plan(Layout(LINE), Layout(ProcessMesh.grid(tp=2, first_rank=2)), (4,), F32)


@pytest.mark.parametrize("lost", ["missing", "shape"])
def test_simulate_refuses_parts_that_do_not_fit(lost):
    parts = split(whole_of((5,)), Layout(LINE, "tp: S(0)"))
    parts = {0: parts[0]} if lost == "missing" else {0: parts[1], 1: parts[1]}
    with pytest.raises(LayoutError, match=r"rank [01] brings"):
        simulate(plan(Layout(LINE, "tp: S(0)"), Layout(LINE), (5,), torch.int64), parts)


def test_simulate_leaves_its_input_alone():
    parts = split(whole_of((4,)), Layout(LINE, "tp: P"))
    before = {rank: part.clone() for rank, part in parts.items()}
    for dst in ("tp: P", "tp: R"):
        for result in simulate(plan(Layout(LINE, "tp: P"), Layout(LINE, dst), (4,), torch.int64), parts).values():
            result.add_(1)
    assert all(torch.equal(parts[rank], before[rank]) for rank in parts)


def test_a_search_gives_up_with_a_layout_error_only():
    """Every pair that passes the checks has a plan."""
    for op in OPS:
        for src, dst in itertools.product(every_layout(GRID, 1, [Partial(op)]), repeat=2):
            cheapest(src, dst, (4,))
    assert cheapest(Layout(LINE, [Shard(0)]), Layout(LINE, [Replicate()]), (4,)) == (AllGather("tp", 0),)
