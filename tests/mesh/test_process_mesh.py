"""Meshes: coordinates, meshes made from meshes, identity by content, and errors for bad input."""

import itertools
import math
import os
import pickle
import subprocess
import sys
import tracemalloc

import pytest
import torch
from hypothesis import strategies as st
from weft.mesh import Layout, ProcessMesh

from tests.support.search import searched

MESHES = [
    pytest.param(ProcessMesh([5], ["dp"]), id="one-rank"),
    pytest.param(ProcessMesh.grid(dp=4), id="one-axis"),
    pytest.param(ProcessMesh([7, 0, 3], ["tp"]), id="any-ranks"),
    pytest.param(ProcessMesh.grid(dp=2, tp=3), id="two-axes"),
    pytest.param(ProcessMesh.grid(pp=2, dp=1, tp=3, first_rank=4), id="three-axes-one-trivial"),
]


@st.composite
def grids(draw: st.DrawFn) -> torch.Tensor:
    """Ranks as a tensor: of a grid, some of it turned and cut, or in any order."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    size = math.prod(sizes)
    if draw(st.booleans()):
        return torch.tensor(draw(st.permutations(range(size + 2)))[:size]).reshape(sizes)
    grid = torch.arange(size).reshape(sizes) * draw(st.integers(1, 3)) + draw(st.integers(0, 3))
    turned = draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    return grid.flip(turned).permute(draw(st.permutations(range(len(sizes)))))


@st.composite
def meshes(draw: st.DrawFn) -> ProcessMesh:
    grid = draw(grids())
    return ProcessMesh(grid, ["pp", "dp", "cp", "tp"][: grid.ndim])


def test_nested_ranks_and_a_grid_are_row_major():
    mesh = ProcessMesh([[0, 1, 2], [3, 4, 5]], ["dp", "tp"])
    assert mesh == ProcessMesh.grid(dp=2, tp=3)
    assert (mesh.shape, mesh.axis_names, mesh.ranks) == ((2, 3), ("dp", "tp"), (0, 1, 2, 3, 4, 5))
    assert (mesh.ndim, mesh.size, mesh.axis_size("tp")) == (2, 6, 3)
    assert ProcessMesh.grid(dp=2, tp=3, first_rank=6).ranks == (6, 7, 8, 9, 10, 11)


def test_ranks_come_from_a_tensor_or_a_tuple():
    assert ProcessMesh(torch.arange(4).reshape(2, 2), ("dp", "tp")) == ProcessMesh.grid(dp=2, tp=2)
    assert ProcessMesh(((0, 1), (2, 3)), ("dp", "tp")) == ProcessMesh.grid(dp=2, tp=2)


@pytest.mark.parametrize("mesh", MESHES)
def test_coordinate_and_rank_at_are_inverse(mesh):
    assert [mesh.rank_at(**mesh.coordinate(rank)) for rank in mesh.ranks] == list(mesh.ranks)
    coordinates = [tuple(mesh.coordinate(rank).values()) for rank in mesh.ranks]
    assert coordinates == list(itertools.product(*map(range, mesh.shape)))
    assert [mesh.rank_at(*coordinate) for coordinate in coordinates] == list(mesh.ranks)
    assert mesh.rank_at(*(-1 for _ in mesh.shape)) == mesh.ranks[-1]
    assert mesh.coordinate(99) is None
    assert 99 not in mesh
    assert all(rank in mesh for rank in mesh.ranks)


def test_select_drops_an_axis_by_int_and_keeps_it_by_slice():
    mesh = ProcessMesh.grid(pp=2, dp=2, tp=2)
    assert mesh.select(pp=1) == ProcessMesh([[4, 5], [6, 7]], ["dp", "tp"])
    assert mesh.select(pp=slice(1, 2)) == ProcessMesh([[[4, 5], [6, 7]]], ["pp", "dp", "tp"])
    assert mesh.select(dp=0, tp=1) == ProcessMesh([1, 5], ["pp"])
    assert mesh.select() == mesh


@searched(grids(), st.data())
def test_meshes_made_from_a_mesh_hold_the_ranks_that_torch_indexes(grid, data):
    """A chain of views: after each, the mesh equals a mesh made from the same ranks, in hash and digest, too."""
    mesh = ProcessMesh(grid, ["pp", "dp", "cp", "tp"][: grid.ndim])
    for turn in range(data.draw(st.integers(1, 4))):
        axis = data.draw(st.integers(0, mesh.ndim - 1))
        name, size = mesh.axis_names[axis], mesh.shape[axis]
        match data.draw(st.sampled_from(["permute", "int", "slice", "flatten", "unflatten"])):
            case "permute":
                order = data.draw(st.permutations(range(mesh.ndim)))
                mesh, grid = mesh.permute(*(mesh.axis_names[a] for a in order)), grid.permute(*order)
            case "int" if mesh.ndim > 1:
                index = data.draw(st.integers(0, size - 1))
                mesh, grid = mesh.select(**{name: index}), grid.select(axis, index)
            case "slice":
                start, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 2))
                mesh = mesh.select(**{name: slice(start, None, step)})
                grid = grid[(slice(None),) * axis + (slice(start, None, step),)]
            case "flatten":
                end = data.draw(st.integers(axis + 1, mesh.ndim))
                mesh, grid = mesh.flatten(mesh.axis_names[axis:end], into=name), grid.flatten(axis, end - 1)
            case "unflatten":
                major = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
                sizes = {f"major{turn}": major, f"minor{turn}": size // major}
                mesh, grid = mesh.unflatten(name, **sizes), grid.unflatten(axis, tuple(sizes.values()))
        again = ProcessMesh(grid, mesh.axis_names)
        assert (mesh.shape, mesh.ranks) == (tuple(grid.shape), tuple(grid.flatten().tolist()))
        assert mesh == again == pickle.loads(pickle.dumps(mesh))
        assert (hash(mesh), mesh.digest, repr(mesh)) == (hash(again), again.digest, repr(again))
        assert tuple(mesh) == mesh.ranks
        where = dict(zip(mesh.ranks, itertools.product(*map(range, mesh.shape)), strict=True))
        for rank in range(-1, max(mesh.ranks) + 3):
            expected = dict(zip(mesh.axis_names, where[rank], strict=True)) if rank in where else None
            assert mesh.coordinate(rank) == expected
            assert (rank in mesh) == (rank in where)


@searched(meshes(), st.data())
def test_permute_flatten_and_unflatten_go_back(mesh, data):
    order = data.draw(st.permutations(mesh.axis_names))
    assert mesh.permute(*order).permute(*mesh.axis_names) == mesh
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    assert mesh.flatten(mesh.axis_names, into="all").unflatten("all", **sizes) == mesh


@searched(meshes(), st.data())
def test_groups_tile_the_mesh(mesh, data):
    kept = data.draw(st.lists(st.sampled_from(mesh.axis_names), min_size=1, unique=True))
    groups = mesh.groups(*kept)
    assert sorted(rank for group in groups for rank in group.ranks) == sorted(mesh.ranks)
    for group in groups:
        assert group.axis_names == tuple(kept)
        assert all(mesh.submesh(rank, *kept) == group for rank in group.ranks)


def test_indices_pick_as_of_an_array():
    mesh, ranks = ProcessMesh.grid(pp=2, dp=3, tp=2), torch.arange(12).reshape(2, 3, 2)
    for index in (0, -1, slice(1, None), (0, 1), (1, slice(None), -1), (slice(None), slice(0, 3, 2)), (-1, -1)):
        assert mesh[index].ranks == tuple(ranks[index].flatten().tolist())
    assert mesh[0] == mesh.select(pp=0)
    assert mesh[:, -1] == mesh.select(dp=-1) == mesh.get_mesh_with_dim("dp", -1)
    assert mesh.rank_at(pp=-1, dp=0, tp=-2) == 6


def test_one_int_for_each_axis_gives_the_mesh_of_that_process():
    assert ProcessMesh.grid(dp=2, tp=2)[1, 0] == ProcessMesh(2) == ProcessMesh([2])
    assert ProcessMesh.grid(dp=2)[-1] == ProcessMesh(1)


def test_a_mesh_without_names_has_numbered_ones():
    mesh = ProcessMesh([[0, 1], [2, 3]])
    assert mesh == ProcessMesh.grid(axis0=2, axis1=2)
    assert ProcessMesh(torch.tensor(3)) == ProcessMesh(3) == ProcessMesh.grid(axis0=1, first_rank=3)
    assert ProcessMesh(3, ["dp"]) == ProcessMesh.grid(dp=1, first_rank=3)


def test_an_axis_may_be_given_by_its_position():
    mesh = ProcessMesh.grid(pp=2, dp=3, tp=4)
    assert (mesh.axis(-1), mesh.axis_name(0), mesh.axis_size(1, -1)) == (2, "pp", 12)
    assert mesh.submesh(5, 1) == mesh.submesh(5, "dp")
    assert mesh.groups(-1, 0) == mesh.groups("tp", "pp")
    assert mesh.get_mesh_with_dim(1, -1) == mesh.select(dp=2)
    assert mesh.get_mesh_with_dim(-1) == mesh.permute(2, 0, 1) == mesh.permute("tp", "pp", "dp")
    assert mesh.flatten((0, 1), into="batch") == mesh.flatten(("pp", "dp"), into="batch")
    assert mesh.unflatten(-1, cp=2, tp=2) == mesh.unflatten("tp", cp=2, tp=2)


@pytest.mark.parametrize("names", [["tp"], ["dp", "tp"], [1]])
def test_a_rank_outside_has_no_submesh(names):
    assert ProcessMesh.grid(dp=2, tp=3).submesh(6, *names) is None


def test_a_name_alone_needs_a_process(monkeypatch):
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialized; call mesh.submesh\(rank, 'tp'\)"):
        GRID["tp"]
    monkeypatch.delitem(sys.modules, "torch.distributed")
    with pytest.raises(RuntimeError, match=r"mesh\['dp', 'tp'\] is the part of the mesh that holds this process"):
        GRID["dp", "tp"]


def of_this_process() -> tuple[ProcessMesh | None, ...]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    return mesh["tp"], mesh["tp", "dp"], mesh["dp"]


def test_a_name_alone_gives_this_processs_submesh(pool):
    mesh = ProcessMesh.grid(dp=2, tp=2)
    *inside, outside = pool.run(of_this_process, ranks=5)
    assert inside == [(mesh.submesh(r, "tp"), mesh.permute("tp", "dp"), mesh.submesh(r, "dp")) for r in range(4)]
    assert outside == (None, None, None)


def test_groups_are_in_row_major_order():
    mesh = ProcessMesh.grid(dp=2, tp=3)
    assert [group.ranks for group in mesh.groups("tp")] == [(0, 1, 2), (3, 4, 5)]
    assert [group.ranks for group in mesh.groups("dp")] == [(0, 3), (1, 4), (2, 5)]
    assert [group.ranks for group in mesh.groups("tp", "dp")] == [(0, 3, 1, 4, 2, 5)]


def test_flatten_and_unflatten_are_inverse():
    mesh = ProcessMesh.grid(pp=2, dp=2, cp=3)
    flat = mesh.flatten(("dp", "cp"), into="batch")
    assert flat == ProcessMesh.grid(pp=2, batch=6)
    assert flat.unflatten("batch", dp=2, cp=3) == mesh
    assert mesh.flatten(["dp"], into="data") == mesh.rename(dp="data")


def test_axes_may_be_called_as_arguments_are():
    mesh = ProcessMesh([[0, 1], [2, 3]], ["self", "name"])
    assert mesh == ProcessMesh.grid(self=2, name=2)
    assert mesh.rank_at(**mesh.coordinate(2)) == 2
    assert mesh.submesh(2, "self").ranks == (0, 2)
    assert mesh.unflatten("self", cls=1, name_=2).axis_size("name_", "name") == 4
    assert Layout(mesh).replace(self="S(0)").explain()


def test_rename_swaps_names_in_one_call():
    assert ProcessMesh.grid(dp=2, tp=3).rename(dp="tp", tp="dp") == ProcessMesh.grid(tp=2, dp=3)


class TestPaddle62125:
    """get_mesh_with_dim: a sub-mesh along any axis in one call; meshes made before have no influence."""

    def test_paddle_62125_get_mesh_with_dim_takes_that_slice(self):
        mesh = ProcessMesh.grid(dp=2, pp=2, tp=2)
        assert mesh.get_mesh_with_dim("pp", 1) == ProcessMesh([[2, 3], [6, 7]], ["dp", "tp"])

    def test_without_index_the_axis_comes_first(self):
        mesh = ProcessMesh.grid(dp=2, pp=3, tp=2)
        assert mesh.get_mesh_with_dim("pp") == mesh.permute("pp", "dp", "tp")
        assert mesh.get_mesh_with_dim("dp") == mesh

    @pytest.mark.parametrize("index", [None, 0, 1])
    def test_no_mesh_is_created_in_between(self, monkeypatch, index):
        mesh = ProcessMesh.grid(dp=2, pp=2, tp=2)
        made = []
        initialize = ProcessMesh._set
        monkeypatch.setattr(
            ProcessMesh, "_set", lambda self, *content: (made.append(content), initialize(self, *content))
        )
        result = mesh.get_mesh_with_dim("pp", index)
        assert made == [(result.axis_names, result._ranks)]

    def test_identity_is_content(self):
        first = ProcessMesh.grid(dp=2, tp=2)
        for size in range(1, 20):
            ProcessMesh.grid(dp=size)
        again = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
        assert first == again
        assert hash(first) == hash(again)
        assert first.digest == again.digest
        assert first == first.permute("tp", "dp").permute("dp", "tp") == pickle.loads(pickle.dumps(first))

    def test_other_content_is_another_mesh(self):
        mesh = ProcessMesh.grid(dp=2, tp=2)
        others = [
            mesh.permute("tp", "dp"),
            mesh.rename(dp="pp"),
            ProcessMesh.grid(dp=4),
            ProcessMesh.grid(dp=2, tp=2, first_rank=1),
        ]
        assert len({mesh, *others}) == 5
        assert len({other.digest for other in (mesh, *others)}) == 5
        assert mesh != "ProcessMesh.grid(dp=2, tp=2)"

    @pytest.mark.parametrize("seed", ["0", "1"])
    def test_the_digest_is_the_same_in_every_process(self, seed):
        """Also after unrelated meshes were made, and from one version to the next."""
        texts = ["grid(dp=2, tp=4)", "grid(dp=2, tp=4).permute('tp', 'dp')", "([3, 1, 2], ['dp'])"]
        made = f"from weft.mesh import ProcessMesh; ProcessMesh.grid(x=7)\nfor text in {texts}:\n"
        made += "    print(eval('ProcessMesh' + '.' * (text[0] == 'g') + text).digest)"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", made], env=environment, capture_output=True, text=True, check=True)
        grid = ProcessMesh.grid(dp=2, tp=4)
        meshes = [grid, grid.permute("tp", "dp"), ProcessMesh([3, 1, 2], ["dp"])]
        assert run.stdout.split() == [mesh.digest for mesh in meshes]
        assert meshes[0].digest == "b46552251c05831f7aa4eed02d9132bd"


def test_a_mesh_is_immutable():
    mesh = ProcessMesh.grid(dp=2)
    with pytest.raises(AttributeError, match="immutable"):
        mesh.ranks = (1, 0)


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_repr_of_consecutive_ranks_evaluates_to_the_mesh(mesh):
    assert eval(repr(mesh)) == mesh


def test_a_mesh_of_131_072_ranks_holds_nothing_for_each_rank():
    tracemalloc.start()
    mesh = ProcessMesh.grid(pp=16, dp=64, cp=8, tp=16)
    stage = mesh.get_mesh_with_dim("pp", 3)
    turned = mesh.permute("tp", "cp", "dp", "pp").select(dp=slice(1, None, 2)).unflatten("tp", node=2, core=8)
    flat = stage.flatten(("dp", "cp"), into="batch")
    assert len({mesh, stage, turned, flat, mesh.get_mesh_with_dim("cp")}) == 5
    assert len({mesh.digest, stage.digest, turned.digest, flat.digest}) == 4
    assert mesh.coordinate(131_071) == {"pp": 15, "dp": 63, "cp": 7, "tp": 15}
    assert mesh.submesh(12_345, "dp") == ProcessMesh(range(12_345 % 128 + 8192, 16_384, 128), ["dp"])
    assert 131_072 not in mesh
    assert len(repr(turned)) < 100
    assert len(repr(ProcessMesh.grid(tp=10**7))) < 100
    assert Layout(ProcessMesh.grid(tp=10**7), "tp: S(0)").largest_local_shape((10**7,)) == (1,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000  # bytes; the ranks alone would be 4 MB


@pytest.mark.parametrize(
    "ranks, names, message",
    [
        pytest.param([0, 1, 0], ["dp"], "rank 0 appears twice", id="duplicate"),
        pytest.param([0, -1], ["dp"], "rank -1 is not an int >= 0", id="negative"),
        pytest.param([0, 1.0], ["dp"], "rank 1.0 is not an int >= 0", id="float"),
        pytest.param([0, True], ["dp"], "rank True is not an int >= 0", id="bool"),
        pytest.param([0, "1"], ["dp"], "ranks are '1'; give nested lists of ints", id="text"),
        pytest.param([0, None], ["dp"], "ranks are None; give nested lists of ints", id="none"),
        pytest.param({0, 1}, ["dp"], r"ranks are \{0, 1\}; give nested lists", id="set"),
        pytest.param(iter([0, 1]), ["dp"], "ranks are <list_iterator", id="iterator"),
        pytest.param([0, 1], "dp", "axis_names is 'dp'; give a sequence of names", id="names-in-one-text"),
        pytest.param([0, 1], 2, "axis_names is 2; give a sequence of names", id="names-a-number"),
        pytest.param(-1, None, "rank -1 is not an int >= 0", id="int-negative"),
        pytest.param(True, None, "rank True is not an int >= 0", id="int-bool"),
        pytest.param([0, 1], ["first_rank"], "is an argument of ProcessMesh.grid", id="first-rank"),
        pytest.param(
            [[0, 1], [2]], ["dp", "tp"], r"ragged: part 0 has shape \(2,\), part 1 has shape \(1,\)", id="ragged"
        ),
        pytest.param([[0, 1], 2], ["dp", "tp"], r"ragged: part 0 has shape \(2,\), part 1 has shape \(\)", id="levels"),
        pytest.param([], ["dp"], "hold no rank", id="empty"),
        pytest.param([[], []], ["dp", "tp"], "hold no rank", id="empty-parts"),
        pytest.param(0, [], r"0 axis names \(\) for ranks of shape \(1,\)", id="no-axis"),
        pytest.param([0, 1], ["dp", "tp"], "2 axis names .* give one per level", id="too-many-names"),
        pytest.param([[0], [1]], ["dp"], "1 axis names .* give one per level", id="too-few-names"),
        pytest.param([[0], [1]], ["dp", "dp"], "repeat a name", id="repeated-name"),
        pytest.param([0], ["d p"], "'d p' is not an identifier", id="not-an-identifier"),
        pytest.param([0], [0], "0 is not an identifier", id="not-text"),
    ],
)
def test_a_bad_mesh_says_what_is_wrong(ranks, names, message):
    with pytest.raises(ValueError, match=message):
        ProcessMesh(ranks, names)


GRID = ProcessMesh.grid(dp=2, tp=3)


@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param(lambda: ProcessMesh.grid(dp=0), "axis 'dp' has size 0", id="grid-size-zero"),
        pytest.param(lambda: ProcessMesh.grid(dp=2.0), "axis 'dp' has size 2.0", id="grid-size-float"),
        pytest.param(lambda: ProcessMesh.grid(), "at least one axis", id="grid-of-nothing"),
        pytest.param(lambda: ProcessMesh.grid(dp=2, first_rank=-1), "rank -1 is not", id="grid-first-rank"),
        pytest.param(lambda: GRID.axis_size("pp"), "no axis 'pp'; its axes are dp, tp", id="axis-size"),
        pytest.param(lambda: GRID.rank_at(dp=0), "one index for each of dp, tp", id="rank-at-too-few"),
        pytest.param(lambda: GRID.rank_at(dp=0, tp=0, pp=0), "one index for each of dp, tp", id="rank-at-unknown"),
        pytest.param(
            lambda: GRID.rank_at(dp=0, tp=3), "index 3 is outside axis 'tp' of size 3; use 0 to 2", id="rank-at"
        ),
        pytest.param(
            lambda: GRID.rank_at(dp=-3, tp=0), "index -3 is outside axis 'dp' .* or -2 to -1", id="rank-at-negative"
        ),
        pytest.param(lambda: GRID[2], "index 2 is outside axis 'dp' of size 2", id="index"),
        pytest.param(lambda: GRID[0, 0, 0], "3 indices for the 2 axes", id="index-too-many"),
        pytest.param(lambda: GRID["dp", "dp"], r"mesh\('dp', 'dp'\) must name .* each once", id="names-twice"),
        pytest.param(lambda: GRID["pp"], "no axis 'pp'", id="name-unknown"),
        pytest.param(lambda: GRID.axis_size(2), "no axis 2; its axes are dp, tp", id="position"),
        pytest.param(lambda: GRID.axis_size(-3), "no axis -3", id="position-negative"),
        pytest.param(lambda: GRID.axis_size(True), "no axis True", id="position-bool"),
        pytest.param(lambda: GRID.select(tp=3), "index 3 is outside axis 'tp'", id="select"),
        pytest.param(
            lambda: GRID.rank_at(0), "got 1 indices by position; give one for each of dp, tp", id="rank-at-too-few"
        ),
        pytest.param(lambda: GRID.rank_at(0, tp=0), "by position and some by name", id="rank-at-both"),
        pytest.param(lambda: GRID.rank_at(0, 3), "index 3 is outside axis 'tp'", id="rank-at-position"),
        pytest.param(lambda: GRID.select(pp=0), "no axis 'pp'", id="select-unknown"),
        pytest.param(lambda: GRID.select(tp=1.0), "along axis 'tp' is 1.0, which is not an int", id="select-float"),
        pytest.param(lambda: GRID.select(tp=slice(0, 2.0)), "has a bound that is not an int", id="select-float-bound"),
        pytest.param(
            lambda: GRID.submesh(0), r"submesh\(\) must name one axis or more of dp, tp", id="submesh-of-none"
        ),
        pytest.param(lambda: GRID.groups("tp", "tp"), r"must name .* each once", id="groups-twice"),
        pytest.param(lambda: GRID.select(dp=0, tp=0), "drops every axis; use rank_at", id="select-everything"),
        pytest.param(lambda: GRID.select(dp=slice(2, 2)), "of axis 'dp' of size 2 holds no rank", id="select-nothing"),
        pytest.param(lambda: GRID.get_mesh_with_dim("pp"), "no axis 'pp'", id="with-dim-unknown"),
        pytest.param(lambda: GRID.get_mesh_with_dim("dp", 2), "index 2 is outside axis 'dp'", id="with-dim-index"),
        pytest.param(lambda: GRID.submesh(0, "pp"), "no axis 'pp'", id="submesh-unknown"),
        pytest.param(lambda: GRID.groups("pp"), "no axis 'pp'", id="groups-unknown"),
        pytest.param(lambda: GRID.permute("tp"), "must name each of dp, tp once", id="permute-too-few"),
        pytest.param(lambda: GRID.permute("tp", "tp"), "must name each of dp, tp once", id="permute-twice"),
        pytest.param(lambda: GRID.rename(pp="x"), "no axis 'pp'", id="rename-unknown"),
        pytest.param(lambda: GRID.rename(dp="tp"), "repeat a name", id="rename-collides"),
        pytest.param(lambda: GRID.flatten(("tp", "dp"), into="x"), "not neighbours", id="flatten-backwards"),
        pytest.param(lambda: GRID.flatten((), into="x"), "not neighbours", id="flatten-nothing"),
        pytest.param(lambda: GRID.unflatten("tp", a=2, b=2), "size 3 cannot be unflattened", id="unflatten-product"),
        pytest.param(lambda: GRID.unflatten("tp", a=-1, b=-3), "axis 'a' has size -1", id="unflatten-negative"),
    ],
)
def test_a_bad_call_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
