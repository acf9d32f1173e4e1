"""Topologies: values that are checked, printed and pickled; fits recover the numbers behind their measurements."""

import math
import pickle

import pytest
import torch
import torch.distributed as dist
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Link, Topology, plan
from weft.reshard.moving.topology import _fit_link

F32 = torch.float32
GIVEN = Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)})


def test_a_topology_is_a_value():
    assert Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)}) == GIVEN
    assert hash(Topology({"dp": Link(5e-6, 50e9), "tp": Link(2e-6, 400e9)})) == hash(GIVEN)
    assert Topology({"dp": Link(5e-6, 50e9)}) != GIVEN
    assert pickle.loads(pickle.dumps(GIVEN)) == GIVEN
    assert eval(repr(GIVEN), {"Topology": Topology, "Link": Link}) == GIVEN
    with pytest.raises(AttributeError):
        GIVEN.between = Link(0, 1)


def test_time_is_latency_and_bytes():
    by_hand = 3 * 5e-6 + 1000 / 50e9 + 2e-6 + 4000 / 400e9
    assert GIVEN.seconds({"dp": (3, 1000), "tp": (1, 4000)}) == pytest.approx(by_hand, rel=1e-12)
    assert GIVEN.seconds({}) == 0
    assert GIVEN.between == Link(5e-6, 50e9)  # the slowest
    assert Topology({"tp": Link(0, 1)}, between=Link(1, 2)).between == Link(1, 2)


@pytest.mark.parametrize(
    "make, message",
    [
        pytest.param(lambda: Link(-1, 1), r"latency is -1 s; give a finite number", id="latency"),
        pytest.param(lambda: Link(math.inf, 1), "latency is inf", id="endless"),
        pytest.param(lambda: Link(0, 0), r"bandwidth is 0 bytes/s; give a number > 0", id="bandwidth"),
        pytest.param(lambda: Topology({}), "has no axes", id="empty"),
        pytest.param(lambda: Topology({"tp": 3}), r"axis 'tp' has the link 3; give Link", id="no-link"),
        pytest.param(lambda: GIVEN.link("pp"), "no link for axis 'pp'; its axes are dp, tp", id="unknown"),
        pytest.param(
            lambda: plan(Layout(ProcessMesh.grid(x=2), "x: S(0)"), Layout(ProcessMesh.grid(x=2)), (4,), F32).seconds,
            r"made without a topology.*give plan\(..., topology=",
            id="no-topology",
        ),
        pytest.param(
            lambda: plan(
                Layout(ProcessMesh.grid(x=2), "x: S(0)"), Layout(ProcessMesh.grid(x=2)), (4,), F32, topology=GIVEN
            ),
            "no link for axis 'x'",
            id="other-axes",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_fit_finds_what_the_times_were_made_from():
    sizes = [10**3, 10**5, 10**7]
    link = _fit_link(sizes, [3 * 4e-6 + n / 2e9 for n in sizes], messages=3)
    assert link.latency == pytest.approx(4e-6)
    assert link.bandwidth == pytest.approx(2e9)
    free = _fit_link(sizes, [n / 2e9 for n in sizes], messages=3)
    assert free.latency == pytest.approx(0, abs=1e-12)
    flat = _fit_link(sizes, [3e-5, 2e-5, 1e-5], messages=1)  # larger ones faster: no bandwidth explains that
    assert flat.latency > 0
    assert flat.bandwidth == math.inf
    convex = _fit_link([1000, 2000], [1e-6, 4e-6], messages=1)  # the line through them starts below 0
    assert convex.latency == 0


def measured():
    mesh = ProcessMesh.grid(dp=2, tp=2, one=1)
    topology = Topology.measure(mesh, sizes=(2**10, 2**16, 2**20))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, topology)
    assert gathered == [topology] * len(gathered)
    assert topology.link("one") == Link(0, math.inf)
    return topology


def test_measured_topologies_are_equal_on_all_ranks(pool):
    topology = pool.run(measured, ranks=5)[4]  # rank 4 is outside the mesh
    for axis in ("dp", "tp"):
        assert 0 <= topology.link(axis).latency < 1
        assert topology.link(axis).bandwidth > 1e6


def measured_badly():
    for sizes in ((5,), (5, 5), (0, 5)):
        with pytest.raises(ValueError, match="give two different numbers of bytes"):
            Topology.measure(ProcessMesh.grid(tp=2), sizes=sizes)


def test_sizes_that_fit_no_line(pool):
    pool.run(measured_badly, ranks=2)
