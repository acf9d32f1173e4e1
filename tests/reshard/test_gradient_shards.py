"""Gradients reduced to shards of their parameters' layouts, and gradients accumulated over several passes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from weft.mesh import Layout, ProcessMesh, Shard
from weft.reshard import GradientSync, distribute, layout_of, to_global
from weft.reshard.training.pending_gradient import GradPlaceholder

from tests.reshard.test_gradients import DATA, GRID, Model, Scale, backward, expected, inputs, whole_of
from tests.support.collectives import Collectives

TURNED = ProcessMesh([2, 0, 1], ["dp"])


def sharded(mesh, x, weight, shard_over, size, layout, kinds):
    """Checks a step: the gradients' layout, their values, and the collectives."""
    model = Model(Layout(mesh, weight), 3, size)
    sync = GradientSync(model, shard_over=shard_over)
    with Collectives() as seen:
        backward(model(inputs(Layout(mesh, x), 0, size)), 0)
        sync.wait()
    assert seen.kinds == kinds
    for i, parameter in enumerate(model.weights):
        found = layout_of(parameter.grad)  # on a mesh with permuted axes, where these express the shard order
        assert str(found) == str(Layout(found.mesh, layout))
        assert torch.equal(to_global(parameter.grad), expected(0, i, size))
        assert layout_of(parameter) == Layout(mesh, weight)


SCATTER, REDUCE = "reduce-scatter", "all-reduce"


@pytest.mark.parametrize(
    "mesh, x, weight, shard_over, size, layout, kinds",
    [
        pytest.param(DATA, "dp: S(0)", "", "dp", 4, "dp: S(0)", [SCATTER], id="data"),
        pytest.param(DATA, "dp: S(0)", "", "dp", 5, "dp: S(0)", [SCATTER], id="uneven"),
        pytest.param(DATA, "dp: S(0)", "", "dp", 1, "dp: S(0)", [SCATTER], id="empty-shard"),
        pytest.param(DATA, "", "", "dp", 4, "dp: S(0)", [], id="nothing-to-reduce"),
        pytest.param(TURNED, "dp: S(0)", "", "dp", 7, "dp: S(0)", [SCATTER], id="ranks-in-any-order"),
        pytest.param(GRID, "dp: S(0), cp: S(1)", "", "dp", 4, "dp: S(0)", [SCATTER, REDUCE], id="one-of-two"),
        pytest.param(
            GRID, "dp: S(0), cp: S(1)", "", ("dp", "cp"), 4, "dp: S(0), cp: S(0)", [SCATTER], id="both-in-one"
        ),
        pytest.param(
            GRID, "dp: S(0), cp: S(1)", "", ("cp", "dp"), 4, "cp: S(0), dp: S(0)", [SCATTER], id="both-the-other-way"
        ),
        pytest.param(
            GRID, "dp: S(0), cp: S(2)", "cp: S(0)", "dp", 4, "cp: S(0), dp: S(0)", [SCATTER], id="a-shard-cut"
        ),
    ],
)
def test_paddle_59057_a_shard_of_the_gradient(pool, mesh, x, weight, shard_over, size, layout, kinds):
    pool.run(sharded, mesh, x, weight, shard_over, size, layout, kinds, ranks=mesh.size)


def two_dims():
    """The first dim that divides evenly is cut; a scalar is not."""
    values = {"wide": torch.ones(3, 4), "odd": torch.ones(3, 5), "scalar": torch.ones(())}
    module = nn.ParameterDict({n: nn.Parameter(distribute(v, Layout(DATA))) for n, v in values.items()})
    sync = GradientSync(module, shard_over="dp")
    for name, parameter in module.items():
        parameter.backward(distribute(values[name] * 2, Layout(DATA, "dp: P")))
    sync.wait()
    assert layout_of(module["wide"].grad) == Layout(DATA, {"dp": Shard(1)})
    assert layout_of(module["odd"].grad) == Layout(DATA, {"dp": Shard(0)})
    assert layout_of(module["scalar"].grad) == Layout(DATA)
    for name, parameter in module.items():
        assert torch.equal(to_global(parameter.grad), values[name] * 2)


def accumulating(shard_over):
    """Passes after a wait, and two passes before one: each gradient is moved once, and DTensor moves none unasked."""
    model = Model(Layout(DATA), 2)
    sync = GradientSync(model, shard_over=shard_over)
    x = inputs(Layout(DATA, "dp: S(0)"), 0)
    kind = SCATTER if shard_over else REDUCE
    with Collectives() as seen:
        backward(model(x), 0)
        sync.wait()
        backward(model(x), 10)
        sync.wait()
    assert seen.kinds == [kind] * 2
    two = [expected_of(0, 1 + i) + expected_of(0, 11 + i) for i in range(2)]
    for parameter, value in zip(model.weights, two, strict=True):
        assert torch.equal(to_global(parameter.grad), value)
    with Collectives() as seen:
        with sync.paused():
            backward(model(x), 20)
        backward(model(x), 30)
        sync.wait()
    assert seen.kinds == [kind]
    four = [value + expected_of(0, 21 + i) + expected_of(0, 31 + i) for i, value in enumerate(two)]
    for parameter, value in zip(model.weights, four, strict=True):
        assert torch.equal(to_global(parameter.grad), value)


def expected_of(x, grad):
    return (whole_of(x) * whole_of(grad)).sum((0, 1))


def sent_before_the_next_pass():
    """Buckets of a gradient are being reduced when the next pass adds to the gradient: both sums arrive, each once."""
    model = Model(Layout(DATA), 2)
    sync = GradientSync(model, bucket_bytes=1)
    x = inputs(Layout(DATA, "dp: S(0)"), 0)
    with Collectives() as seen:
        backward(model(x), 0)
        assert seen.kinds == [REDUCE] * 2
        assert isinstance(model.weights[0].grad, GradPlaceholder)
        backward(model(x), 10)
        sync.wait()
    assert seen.kinds == [REDUCE] * 4
    for i, parameter in enumerate(model.weights):
        assert torch.equal(to_global(parameter.grad), expected_of(0, 1 + i) + expected_of(0, 11 + i))


def one_sync_for_a_parameter():
    model = Model(Layout(DATA), 1)
    sync = GradientSync(model)
    with pytest.raises(ValueError, match=r"parameter weights\.0 has a GradientSync already.*close\(\) that one first"):
        GradientSync(model)
    sync.close()
    with Collectives() as seen:
        backward(model(inputs(Layout(DATA, "dp: S(0)"), 0)), 0)
    assert seen.kinds == []
    assert layout_of(model.weights[0].grad) == Layout(DATA, "dp: P")
    again = GradientSync(model)
    again.wait()
    assert torch.equal(to_global(model.weights[0].grad), expected(0, 0))


def unknown_axis():
    with pytest.raises(ValueError, match="shard_over names axis 'data'; the parameters' meshes have dp"):
        GradientSync(Model(Layout(DATA), 1), shard_over="data")


def buckets_close_alike():
    """Rank 1 holds less of an uneven shard: it closes its buckets together with rank 0, not by its own sizes."""
    model = Model(Layout(GRID, "cp: S(0)"), 4, 3)
    sync = GradientSync(model, bucket_bytes=2 * 2 * 8)
    x = inputs(Layout(GRID, "dp: S(0), cp: S(2)"), 0, 3)
    with Collectives() as seen:
        backward([Scale.apply(x, weight) for weight in model.weights], 0)
        sync.wait()
    assert seen.kinds == [REDUCE] * 2
    for i, parameter in enumerate(model.weights):
        assert torch.equal(to_global(parameter.grad), expected(0, i, 3))
    return dist.get_rank()


@pytest.mark.parametrize(
    "function, arguments, ranks",
    [
        pytest.param(two_dims, (), 2, id="which-dim"),
        pytest.param(accumulating, (None,), 2, id="accumulating"),
        pytest.param(accumulating, ("dp",), 2, id="accumulating-shards"),
        pytest.param(sent_before_the_next_pass, (), 2, id="sent-before-the-next-pass"),
        pytest.param(one_sync_for_a_parameter, (), 2, id="one-sync-for-a-parameter"),
        pytest.param(unknown_axis, (), 2, id="unknown-axis"),
        pytest.param(buckets_close_alike, (), 4, id="buckets-close-alike"),
    ],
)
def test_paddle_59057_accumulation(pool, function, arguments, ranks):
    pool.run(function, *arguments, ranks=ranks)
