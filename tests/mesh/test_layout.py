"""Layouts: each rank's part (torch.chunk, nested); printing, parsing and comparing; errors for bad input."""

import enum
import itertools
import math
import pickle

import numpy
import pytest
import torch
import torch.distributed.tensor as torch_tensor
from hypothesis import strategies as st
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh, Replicate, Shard, infer

from tests.support.search import searched
from tests.support.shards import every_layout, rebuild, split

LINE = ProcessMesh.grid(tp=3)
GRID = ProcessMesh.grid(dp=2, tp=3)
CUBE = ProcessMesh.grid(pp=2, dp=2, tp=2)


@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("parts", range(1, 8))
def test_one_axis_cuts_as_torch_chunk_does(size, parts):
    layout = Layout(ProcessMesh.grid(tp=parts), "tp: S(0)")
    whole = torch.arange(size)
    pieces = [whole[layout.local_slices((size,), rank)] for rank in range(parts)]
    assert [len(piece) for piece in pieces] == [layout.local_shape((size,), rank)[0] for rank in range(parts)]
    filled = [piece.tolist() for piece in pieces if len(piece)]
    assert filled == [piece.tolist() for piece in torch.chunk(whole, parts) if len(piece)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(
    "mesh, shapes",
    [
        pytest.param(GRID, [(n,) for n in range(10)], id="grid-vector"),
        pytest.param(GRID, list(itertools.product((0, 1, 5, 7), (0, 3, 4))), id="grid-matrix"),
        pytest.param(CUBE, [(n,) for n in range(10)], id="cube-vector"),
        pytest.param(CUBE, [(5, 9), (1, 3)], id="cube-matrix"),
        pytest.param(GRID.permute("tp", "dp"), [(7, 5)], id="permuted-mesh"),
    ],
)
def test_every_layout_holds_the_nested_chunks(mesh, shapes):
    for shape in shapes:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for layout in every_layout(mesh, len(shape), partials=()):
            parts = {rank: whole[layout.local_slices(shape, rank)] for rank in mesh.ranks}
            for rank, expected in split(whole, layout).items():
                assert layout.local_shape(shape, rank) == tuple(expected.shape), (str(layout), shape, rank)
                assert torch.equal(parts[rank], expected), (str(layout), shape, rank)
            assert torch.equal(rebuild(parts, layout, shape), whole)  # nothing missing, replicas equal


@searched(st.data())
def test_the_parts_of_all_ranks_tile_the_tensor(data):
    """Each element is held once for every coordinate along the axes that do not shard; text parses back."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = data.draw(st.permutations(range(math.prod(sizes) + 2)))[: math.prod(sizes)]
    mesh = ProcessMesh(torch.tensor(ranks).reshape(sizes), list("abcd")[: len(sizes)])
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    placement = st.sampled_from([*map(Shard, range(len(shape))), Replicate(), Partial("avg")])
    placements = {axis: data.draw(placement) for axis in data.draw(st.permutations(mesh.axis_names))}
    layout = Layout.in_order(mesh, placements)
    times_held = torch.zeros(shape, dtype=torch.int64)
    for rank in mesh.ranks:
        part = layout.local_slices(shape, rank)
        assert layout.local_shape(shape, rank) == tuple(times_held[part].shape)
        assert all(
            mine <= most for mine, most in zip(times_held[part].shape, layout.largest_local_shape(shape), strict=True)
        )
        times_held[part] += 1
    replicas = math.prod(mesh.axis_size(axis) for axis, p in placements.items() if not isinstance(p, Shard))
    assert bool((times_held == replicas).all())
    assert Layout(mesh, str(layout)) == layout == pickle.loads(pickle.dumps(layout))


def test_the_major_axis_cuts_first():
    dp_major, tp_major = Layout(GRID, "dp: S(0), tp: S(0)"), Layout(GRID, "tp: S(0), dp: S(0)")
    assert [dp_major.local_slices((6,), rank)[0].start for rank in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [tp_major.local_slices((6,), rank)[0].start for rank in range(6)] == [0, 2, 4, 1, 3, 5]
    assert dp_major != tp_major
    assert dp_major.placements == tp_major.placements == (Shard(0), Shard(0))


@pytest.mark.parametrize("sizes", [(2, 2, 2, -1)])
def test_paddle_balanced_split_of_5_over_4_has_no_negative_part(sizes):
    layout = Layout(ProcessMesh.grid(tp=4), "tp: S(0)")
    held = tuple(layout.local_shape((5,), rank)[0] for rank in range(4))
    assert held == (2, 2, 1, 0) != sizes


def test_a_rank_outside_the_mesh_holds_nothing():
    layout = Layout(LINE, "tp: S(0)")
    assert layout.local_shape((6, 2), 3) == (0,)
    assert layout.local_slices((6, 2), 3) == (slice(0, 0), slice(0, 0))


def test_a_scalar_is_whole_on_every_rank():
    layout = Layout(GRID, "dp: P(sum)")
    assert [layout.local_shape((), rank) for rank in range(6)] == [()] * 6


@pytest.mark.parametrize(
    "mesh", [pytest.param(LINE, id="line"), pytest.param(GRID, id="grid"), pytest.param(CUBE, id="cube")]
)
def test_text_parses_back(mesh):
    layouts = every_layout(mesh, 2, [Partial("sum"), Partial("max")])
    assert len({str(layout) for layout in layouts}) == len(layouts) == len(set(layouts))
    for layout in layouts:
        assert Layout(mesh, str(layout)) == layout
        assert hash(Layout(mesh, str(layout))) == hash(layout)
        if not layout.is_partial():
            assert Layout.from_spec(mesh, layout.spec) == layout
    again = pickle.loads(pickle.dumps(layouts))
    assert again == layouts


def test_the_forms_of_one_layout_are_equal():
    same = [
        Layout(GRID, {"tp": Shard(1)}),
        Layout(GRID, {"tp": "S(1)", "dp": "R"}),
        Layout(GRID, [Replicate(), Shard(1)]),
        Layout(GRID, (torch_tensor.Replicate(), torch_tensor.Shard(1))),
        Layout(GRID, {"tp": torch_tensor.Shard(1)}),
        Layout(GRID, "tp: S(1)"),
        Layout(GRID, " dp:R ,tp :S(1) "),
        Layout.from_spec(GRID, [None, "tp"]),
        Layout.from_spec(GRID, [(), ("tp",)]),
    ]
    assert len(set(same)) == 1
    assert same[0]["tp"] == Shard(1)
    assert str(same[0]) == "dp: R, tp: S(1)"
    assert Layout(GRID) == Layout(GRID, "") == Layout(GRID, []) == Layout(GRID, "dp: R, tp: R")


def test_from_spec_takes_the_axes_major_first():
    layout = Layout.from_spec(GRID, [("tp", "dp"), None])
    assert layout == Layout(GRID, "tp: S(0), dp: S(0)")
    assert layout.spec == (("tp", "dp"),)
    assert layout.shard_order == {0: ("tp", "dp")}
    assert Layout.from_spec(GRID, [None, "tp"]).spec == ((), ("tp",))


def test_a_mapping_is_in_the_order_of_the_mesh_and_text_as_written():
    assert Layout(GRID, {"tp": Shard(0), "dp": Shard(0)}).shard_order == {0: ("dp", "tp")}
    assert Layout(GRID, "tp: S(0), dp: S(0)").shard_order == {0: ("tp", "dp")}
    assert Layout.in_order(GRID, {"tp": Shard(0), "dp": Shard(0)}).shard_order == {0: ("tp", "dp")}


def test_replace_puts_a_newly_sharding_axis_last_and_keeps_the_others():
    layout = Layout(CUBE, "tp: S(0), pp: S(0)")
    assert layout.replace(dp=Shard(0)).spec == (("tp", "pp", "dp"),)
    assert layout.replace(tp=Shard(0)) == layout  # it shards dim 0 already
    assert layout.replace() == layout
    assert layout.replace(tp=Replicate()).spec == (("pp",),)
    assert layout.replace(tp="S(1)").spec == (("pp",), ("tp",))
    assert layout.replace(pp=Partial("max"))["pp"] == Partial("max")
    with pytest.raises(ValueError, match="no axis 'cp'"):
        layout.replace(cp=Replicate())


def test_a_layout_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        Layout(LINE).mesh = GRID


@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param(lambda: Layout(GRID, {"cp": Shard(0)}), "no axis 'cp'; its axes are dp, tp", id="unknown-axis"),
        pytest.param(lambda: Layout(GRID, "cp: R"), "no axis 'cp'", id="unknown-axis-in-text"),
        pytest.param(lambda: Layout(GRID, [Shard(0)]), "1 placements for the 2 axes", id="too-few"),
        pytest.param(lambda: Layout(GRID, "dp: R, dp: R"), "axis 'dp' appears twice", id="twice-in-text"),
        pytest.param(lambda: Layout(GRID, "dp S(0)"), "is not 'axis: placement'", id="no-colon"),
        pytest.param(lambda: Layout.from_spec(GRID, ["dp", "dp"]), "uses axis 'dp' twice", id="spec-repeats"),
        pytest.param(
            lambda: Layout.from_spec(GRID, [("tp", "tp")]), "uses axis 'tp' twice", id="spec-repeats-in-a-dim"
        ),
        pytest.param(lambda: Layout.from_spec(GRID, ["cp"]), "no axis 'cp'", id="spec-unknown"),
        pytest.param(
            lambda: Layout(GRID, "tp: S(2)").local_shape((4, 4), 0),
            r"axis 'tp' shards dim 2 of a tensor of shape \(4, 4\), which has 2 dims",
            id="no-such-dim",
        ),
        pytest.param(lambda: Layout(GRID, "tp: S(0)").local_slices((), 0), "which has 0 dims", id="scalar"),
    ],
)
def test_a_bad_layout_says_what_is_wrong(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


@pytest.mark.parametrize("text", ["dp: X", "dp: S", "dp:", "dp: S(--1)", "dp: P(mean)"])
def test_bad_placement_text_says_what_is_wrong(text):
    with pytest.raises(ValueError, match=r"is not a placement|has no op 'mean'"):
        Layout(GRID, text)


class TestPlainArguments:
    """numpy's and torch's integers are accepted; other types are refused, though a cache may find 7.0 equal to 7."""

    def test_a_value_that_equals_an_int_is_refused(self):
        mesh = ProcessMesh.grid(dp=3, tp=5)
        layout = Layout(mesh, "tp: S(0)")
        for bad in (7.0, "7", None, [7], True):
            with pytest.raises(ValueError, match="not an int"):
                mesh.coordinate(bad)
            with pytest.raises(ValueError, match="not an int"):
                layout.local_slices((7,), bad)
        for shape in ((7.0,), ("7",), (True,)):
            with pytest.raises(ValueError, match="not an int"):
                layout.local_shape(shape, 0)
        coordinate = mesh.coordinate(numpy.int64(7))
        assert [type(index) for index in coordinate.values()] == [int, int]
        assert mesh.rank_at(**mesh.coordinate(7)) == 7
        assert layout.local_shape((numpy.int64(7),), torch.tensor(1)) == layout.local_shape((7,), 1) == (2,)
        assert numpy.int64(7) in mesh
        assert "7" not in mesh

    @pytest.mark.parametrize(
        "shape, message", [((-4,), "below 0"), (6, "not a sequence of sizes"), (None, "not a sequence")]
    )
    def test_a_bad_shape(self, shape, message):
        with pytest.raises(ValueError, match=message):
            Layout(LINE, "tp: S(0)").local_shape(shape, 0)

    def test_members_of_enums_are_their_values(self):
        class Axis(str, enum.Enum):  # noqa: UP042 - it prints as no name
            DP = "dp"
            TP = "tp"

        class Size(enum.IntEnum):
            TWO = 2

        mesh = ProcessMesh([[0, 1], [Size.TWO, 3]], list(Axis))
        grid = ProcessMesh.grid(dp=2, tp=2)
        assert (mesh, mesh.digest, repr(mesh)) == (grid, grid.digest, repr(grid))
        assert str(Layout(mesh, {Axis.TP: "S(0)"})) == "dp: R, tp: S(0)"
        assert Layout(mesh, "tp: S(0)") == Layout.from_spec(grid, [Axis.TP])

    @pytest.mark.parametrize(
        "call, message",
        [
            pytest.param(
                lambda: Layout(GRID, {Shard(0), Replicate()}), "give a mapping of axes, a sequence or text", id="set"
            ),
            pytest.param(lambda: Layout(GRID, None), "placements are None", id="none"),
            pytest.param(lambda: Layout.from_spec(GRID, [0]), "has 0 for dim 0; give the name of an axis", id="spec"),
            pytest.param(lambda: Layout.from_spec(GRID, ["dp: R, tp"]), "no axis 'dp: R, tp'", id="text-in-a-name"),
        ],
    )
    def test_no_placements(self, call, message):
        with pytest.raises(LayoutError, match=message):
            call()


def test_the_shard_order_cannot_be_changed():
    layout = Layout(GRID, "dp: S(0)")
    with pytest.raises(TypeError):
        layout.shard_order[1] = ("tp",)
    assert not hasattr(layout.shard_order, "clear")


class TestDimsCountedFromTheEnd:
    """`Shard(-1)` is the last dim of whatever tensor the layout is used with; without a tensor it is an error."""

    @pytest.mark.parametrize("shape", [(5,), (4, 6), (2, 3, 7)])
    @pytest.mark.parametrize(
        "form", ["tp: S(-1)", {"tp": torch_tensor.Shard(-1)}, [Replicate(), Shard(-1)], {-1: "S(-1)"}]
    )
    def test_dim_minus_1_is_the_last_dim(self, form, shape):
        layout, counted = Layout(GRID, form), Layout(GRID, {"tp": Shard(len(shape) - 1)})
        assert layout.resolved(shape) == counted != layout
        assert counted.resolved(shape) is counted
        for rank in range(7):
            assert layout.local_slices(shape, rank) == counted.local_slices(shape, rank)
            assert layout.local_shape(shape, rank) == counted.local_shape(shape, rank)
        assert layout.explain(shape).splitlines()[1:] == counted.explain(shape).splitlines()[1:]

    @pytest.mark.parametrize(
        "text, counted",
        [
            ("tp: S(-1), dp: S(1)", "tp: S(1), dp: S(1)"),
            ("dp: S(1), tp: S(-1)", "dp: S(1), tp: S(1)"),
            ("tp: S(-2), dp: S(-2)", "tp: S(0), dp: S(0)"),
            ("tp: S(-1), dp: S(0)", "dp: S(0), tp: S(1)"),
        ],
    )
    def test_the_axes_stay_in_their_order(self, text, counted):
        layout = Layout(GRID, text)
        assert Layout(GRID, str(layout)) == layout == pickle.loads(pickle.dumps(layout))
        assert hash(Layout(GRID, str(layout))) == hash(layout)
        assert layout.resolved((4, 6)) == Layout(GRID, counted)

    def test_an_order_that_may_matter_tells_layouts_apart(self):
        assert Layout(GRID, "tp: S(-1), dp: S(1)") != Layout(GRID, "dp: S(1), tp: S(-1)")
        assert Layout(GRID, "tp: S(-1), dp: S(-2)") == Layout(GRID, "dp: S(-2), tp: S(-1)")

    def test_replace_keeps_it(self):
        assert Layout(CUBE, "tp: S(-1), dp: S(1)").replace(pp="S(-1)").resolved((2, 8)) == Layout(
            CUBE, "tp: S(1), dp: S(1), pp: S(1)"
        )

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda layout: layout.parts(1), id="parts"),
            pytest.param(lambda layout: layout.spec, id="spec"),
            pytest.param(lambda layout: layout.explain(), id="explain"),
            pytest.param(lambda layout: infer.elementwise("gelu", False, layout), id="elementwise"),
            pytest.param(lambda layout: infer.whole("softmax", "it", layout, 0), id="whole"),
            pytest.param(lambda layout: infer.concat(0, layout), id="concat"),
            pytest.param(lambda layout: infer.split(layout, 0), id="split"),
            pytest.param(lambda layout: infer.gradient(layout, layout, layout, [layout]), id="gradient"),
        ],
    )
    def test_where_nothing_says_the_number_of_dims_it_is_refused(self, call):
        with pytest.raises(
            LayoutError, match=r"'tp' of .* shards dim -1, counted from the end .* layout.resolved\(shape"
        ):
            call(Layout(GRID, "tp: S(-1)"))

    def test_where_the_shape_is_given_it_is_taken(self):
        last, counted = Layout(GRID, "tp: S(-1)"), Layout(GRID, "tp: S(1)")
        assert infer.reduction("sum", last, (4, 6), [0]) == infer.reduction("sum", counted, (4, 6), [0])
        assert infer.reshape(last, (4, 6), (2, 2, 6)) == infer.reshape(counted, (4, 6), (2, 2, 6))

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(lambda layout: infer.einsum("mk,kn->mn", Layout(GRID), layout), id="einsum"),
            pytest.param(lambda layout: infer.einsum("mk,kn->mn", layout, Layout(GRID, "tp: S(0)")), id="contracted"),
            pytest.param(
                lambda layout: infer.elementwise("add", True, layout, layout, shapes=[(4, 6), (4, 6)]), id="elementwise"
            ),
            pytest.param(lambda layout: infer.transpose(layout, (1, 0)), id="transpose"),
            pytest.param(lambda layout: infer.embedding(Layout(GRID), layout, 1), id="embedding"),
            pytest.param(lambda layout: infer.gather(layout, layout, 0, 2), id="gather"),
        ],
    )
    def test_where_the_operation_says_the_number_of_dims_it_is_taken(self, call):
        assert call(Layout(GRID, "tp: S(-1)")) == call(Layout(GRID, "tp: S(1)"))
        with pytest.raises(LayoutError, match=r"axis 'tp' shards dim -3 of .*, which has 2 dims; reshard"):
            call(Layout(GRID, "tp: S(-3)"))

    def test_a_remedy_counts_from_the_front(self):
        with pytest.raises(LayoutError, match=r"reshard operand 1 \('kn'\) to \(dp: R, tp: S\(0\)\)") as caught:
            infer.einsum("mk,kn->mn", Layout(GRID, "tp: S(-1)"), Layout(GRID))
        assert caught.value.nearest == (Layout(GRID, "tp: S(1)"), Layout(GRID, "tp: S(0)"))

    def test_a_dim_that_there_is_not(self):
        with pytest.raises(LayoutError, match=r"shards dim -3 of a tensor of shape \(4, 6\), which has 2 dims"):
            Layout(GRID, "tp: S(-3)").resolved((4, 6))
        with pytest.raises(LayoutError, match="shards dim -1 of a tensor"):
            Layout(GRID, "tp: S(-1)").local_shape((), 0)


def test_axes_may_be_given_by_position():
    assert Layout(GRID, {0: Shard(0), -1: Partial("prod")}) == Layout(GRID, "dp: S(0), tp: P(product)")
    assert Layout(GRID, "dp: S(0)")[0] == Shard(0)
    with pytest.raises(LayoutError, match="the mesh has no axis 2; its axes are dp, tp"):
        Layout(GRID, {2: Shard(0)})
    with pytest.raises(LayoutError, match="axis 'dp' appears twice"):
        Layout(GRID, {0: Shard(0), "dp": Shard(1)})


WRONG_INTS = ("2", None, True, 2.0, 1.5, float("nan"), float("inf"), [2])


def test_parts_of_a_dim_counted_from_the_end_are_refused() -> None:
    """`parts(-1)` said 1, though the last dim was cut."""
    layout = Layout(ProcessMesh.grid(dp=2), "dp: S(1)")
    assert [layout.parts(dim) for dim in range(3)] == [1, 2, 1]
    with pytest.raises(
        LayoutError, match=r"parts\(-1\) of .*: count the dim from the front, .* parts\(tensor.ndim - 1\)"
    ):
        layout.parts(-1)


@pytest.mark.parametrize("value", WRONG_INTS, ids=repr)
def test_dims_and_widths_are_ints(value) -> None:
    """`parts` found no such dim, and said 1; `explain` drew a picture of another width."""
    layout = Layout(ProcessMesh.grid(dp=2), "dp: S(1)")
    with pytest.raises(ValueError, match=r"the dim of parts\(\) is .*, which is not an int"):
        layout.parts(value)
    with pytest.raises(ValueError, match=r"the width of explain\(\) is .*, which is not an int"):
        layout.explain(width=value)
