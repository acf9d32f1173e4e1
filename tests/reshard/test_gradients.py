"""GradientSync: every Partial gradient is reduced once to the parameter's layout, in buckets (Paddle 59057)."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from weft.mesh import Layout, Partial, ProcessMesh, Replicate, Shard
from weft.reshard import GradientSync, distribute, layout_of, reshard, to_global
from weft.reshard.moving.dtensor import wrap

from tests.support.collectives import Collectives

DATA = ProcessMesh.grid(dp=2)
GRID = ProcessMesh.grid(dp=2, cp=2)
B, T, H = 3, 5, 4  # uneven over 2
NBYTES = H * 8  # bytes of a float64 parameter


class Scale(torch.autograd.Function):
    """`x * weight` on local parts. x: [B, T, H]. weight: [H]; the gradient is Partial over axes that shard B or T."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return wrap(x.to_local() * weight.to_local(), layout_of(x), x.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        own = layout_of(x)
        placements = {}
        for axis in own.mesh.axis_names:
            if own[axis] in (Shard(0), Shard(1)):
                placements[axis] = Partial()
            elif own[axis] == Shard(2):
                placements[axis] = Shard(0)
        local = grad.to_local() * x.to_local()
        if local.ndim == 3:  # else this rank is outside the mesh
            local = local.sum((0, 1))
        weight_grad = wrap(local, Layout(own.mesh, placements), weight.shape)
        return wrap(grad.to_local() * weight.to_local(), own, x.shape), weight_grad


class Model(nn.Module):
    def __init__(self, layout, count, size=H):
        super().__init__()
        values = (distribute(torch.arange(size, dtype=torch.float64) + i, layout) for i in range(count))
        self.weights = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self, x):
        return [Scale.apply(x, weight) for weight in self.weights]


def whole_of(seed, size=H):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, (B, T, size), generator=generator).double()


def backward(outputs, seed):
    """Backward from all outputs, with a different gradient for each."""
    grads = [distribute(whole_of(seed + 1 + i, y.shape[-1]), layout_of(y)) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, grads)


def expected(seed, i, size=H):
    return (whole_of(seed, size) * whole_of(seed + 1 + i, size)).sum((0, 1))


def inputs(layout, seed, size=H):
    return distribute(whole_of(seed, size), layout)


def synchronized(mesh, x, weight, count, bucket_bytes, size=H):
    """Takes a step; returns the collectives started by this rank."""
    model = Model(Layout(mesh, weight), count, size)
    sync = GradientSync(model, bucket_bytes=bucket_bytes)
    with Collectives() as seen:
        backward(model(inputs(Layout(mesh, x), 0, size)), 0)
        sync.wait()
    with Collectives() as again:
        sync.wait()
    assert again.kinds == []
    for i, parameter in enumerate(model.weights):
        assert layout_of(parameter.grad) == layout_of(parameter)
        assert torch.equal(to_global(parameter.grad), expected(0, i, size)), i
    return seen.kinds


LARGE = 2**20


@pytest.mark.parametrize(
    "mesh, x, weight, count, bucket_bytes, all_reduces",
    [
        pytest.param(GRID, "dp: S(0)", "", 3, LARGE, 1, id="data"),
        pytest.param(GRID, "cp: S(1)", "", 3, LARGE, 1, id="sequence"),
        pytest.param(GRID, "dp: S(1), cp: S(0)", "", 3, LARGE, 1, id="whichever-axis-cuts-whichever-dim"),
        pytest.param(GRID, "dp: S(0), cp: S(1)", "", 3, LARGE, 1, id="both"),
        pytest.param(GRID, "dp: S(0), cp: S(0)", "", 3, LARGE, 1, id="both-on-one-dim"),
        pytest.param(GRID, "", "", 3, LARGE, 0, id="neither"),
        pytest.param(GRID, "dp: S(0), cp: S(2)", "cp: S(0)", 3, LARGE, 1, id="sharded-parameter"),
        pytest.param(DATA, "dp: S(0)", "", 5, NBYTES, 5, id="a-bucket-each"),
        pytest.param(DATA, "dp: S(0)", "", 5, 2 * NBYTES, 3, id="two-in-a-bucket"),
        pytest.param(DATA, "dp: S(0)", "", 5, 2 * NBYTES + 1, 2, id="a-bucket-closes-when-full"),
        pytest.param(DATA, "dp: S(0)", "", 4, 1, 4, id="smallest-buckets"),
    ],
)
def test_paddle_59057_gradients_are_reduced_once_whichever_dim_was_cut(
    pool, mesh, x, weight, count, bucket_bytes, all_reduces
):
    for kinds in pool.run(synchronized, mesh, x, weight, count, bucket_bytes, ranks=mesh.size):
        assert kinds == ["all-reduce"] * all_reduces


def test_an_empty_shard_takes_part(pool):
    for kinds in pool.run(synchronized, GRID, "dp: S(0), cp: S(2)", "cp: S(0)", 2, LARGE, 1, ranks=4):
        assert kinds == ["all-reduce"]


def tied():
    """A parameter with two names, used twice: the gradient is the sum of both uses, reduced once."""
    model = Model(Layout(DATA), 1)
    model.other = Model(Layout(DATA), 0)
    model.other.weight = model.weights[0]
    sync = GradientSync(model)
    x = inputs(Layout(DATA, "dp: S(0)"), 0)
    with Collectives() as seen:
        backward([Scale.apply(x, model.weights[0]), Scale.apply(x, model.other.weight)], 0)
        sync.wait()
    assert seen.kinds == ["all-reduce"]
    assert torch.equal(to_global(model.weights[0].grad), expected(0, 0) + expected(0, 1))


def accumulated():
    """Backward passes while paused start nothing; the sum travels once."""
    model = Model(Layout(DATA), 2)
    sync = GradientSync(model)
    x = Layout(DATA, "dp: S(0)")
    with Collectives() as seen, sync.paused():
        backward(model(inputs(x, 0)), 0)
        with sync.paused():
            backward(model(inputs(x, 10)), 10)
        backward(model(inputs(x, 20)), 20)  # still paused: the inner block has ended, not the outer
    assert seen.kinds == []
    assert all(layout_of(parameter.grad)["dp"] == Partial() for parameter in model.weights)
    with Collectives() as seen:
        backward(model(inputs(x, 30)), 30)
        sync.wait()
    assert seen.kinds == ["all-reduce"]
    for i, parameter in enumerate(model.weights):
        assert torch.equal(to_global(parameter.grad), sum(expected(seed, i) for seed in (0, 10, 20, 30)))


def paused_after():
    """A paused pass is not lost after a pass whose gradients are pending, whether or not their reduction has begun."""
    for bucket_bytes in (1, LARGE):
        model = Model(Layout(DATA), 2)
        sync = GradientSync(model, bucket_bytes=bucket_bytes)
        x = Layout(DATA, "dp: S(0)")
        backward(model(inputs(x, 0)), 0)
        with sync.paused():
            backward(model(inputs(x, 10)), 10)
        sync.wait()
        for i, parameter in enumerate(model.weights):
            assert torch.equal(to_global(parameter.grad), expected(0, i) + expected(10, i)), (bucket_bytes, i)


def several_passes(wait_between):
    """Passes without zeroing the gradients add up, waited for in between or not."""
    for bucket_bytes in (1, LARGE):
        model = Model(Layout(DATA), 2)
        sync = GradientSync(model, bucket_bytes=bucket_bytes)
        for seed in (0, 10):
            backward(model(inputs(Layout(DATA, "dp: S(0)"), seed)), seed)
            if wait_between:
                sync.wait()
        sync.wait()
        for i, parameter in enumerate(model.weights):
            assert layout_of(parameter.grad) == Layout(DATA)
            assert torch.equal(to_global(parameter.grad), expected(0, i) + expected(10, i)), (bucket_bytes, i)


def steps_are_independent():
    model = Model(Layout(DATA), 2)
    sync = GradientSync(model)
    for seed in (0, 10):
        model.zero_grad()
        backward(model(inputs(Layout(DATA, "dp: S(0)"), seed)), seed)
        sync.wait()
        for i, parameter in enumerate(model.weights):
            assert torch.equal(to_global(parameter.grad), expected(seed, i))


def paused_only():
    """The first parameter has a gradient from the paused pass, the second from the next pass, the third none."""
    model = Model(Layout(DATA), 3)
    sync = GradientSync(model)
    first, second, third = model.weights
    x = Layout(DATA, "dp: S(0)")
    with sync.paused():
        backward([Scale.apply(inputs(x, 0), first)], 0)
    with Collectives() as seen:
        backward([Scale.apply(inputs(x, 10), second)], 10)
        sync.wait()
    assert seen.kinds == ["all-reduce"]
    assert torch.equal(to_global(first.grad), expected(0, 0))
    assert torch.equal(to_global(second.grad), expected(10, 0))
    assert third.grad is None


def frozen_and_plain():
    """Frozen parameters and plain tensors are left alone."""
    model = Model(Layout(DATA), 2)
    model.weights[0].requires_grad_(False)
    model.plain = nn.Parameter(torch.ones(2))
    sync = GradientSync(model)
    with Collectives() as seen:
        model.plain.sum().backward()
        backward([Scale.apply(inputs(Layout(DATA, "dp: S(0)"), 0), model.weights[1])], 0)
        sync.wait()
    assert seen.kinds == ["all-reduce"]
    assert model.weights[0].grad is None
    assert torch.equal(model.plain.grad, torch.ones(2))


def sharded_states():
    """A parameter sharded over dp is gathered for use; backward scatters the gradient, and the sync sends nothing."""
    model = Model(Layout(DATA, "dp: S(0)"), 1, 5)
    sync = GradientSync(model)
    with Collectives() as seen:
        whole = reshard(model.weights[0], placements=[Replicate()])
        backward([Scale.apply(inputs(Layout(DATA, "dp: S(0)"), 0, 5), whole)], 0)
        sync.wait()
    assert seen.kinds == ["all-gather", "reduce-scatter"]
    assert layout_of(model.weights[0].grad) == Layout(DATA, "dp: S(0)")
    assert torch.equal(to_global(model.weights[0].grad), expected(0, 0, 5))


def another_order():
    """Ranks reach the parameters in different orders, as compiled and eager ranks may; all reduce in the same order."""
    for bucket_bytes in (1, 2 * NBYTES, LARGE):
        model = Model(Layout(DATA), 5)
        sync = GradientSync(model, bucket_bytes=bucket_bytes)
        x = inputs(Layout(DATA, "dp: S(0)"), 0)
        # After two steps without a gradient of parameter 2, no bucket waits for the parameter; then the gradient comes.
        for left_out in (2, 2, None):
            chosen = [i for i in range(5) if i != left_out]
            came = []
            hooks = [
                model.weights[i].register_post_accumulate_grad_hook(lambda _, i=i, came=came: came.append(i))
                for i in chosen
            ]
            turned = chosen[:: -1 if dist.get_rank() else 1]
            outputs = {i: Scale.apply(x, model.weights[i]) for i in turned}
            backward([outputs[i] for i in chosen], 0)
            assert came == turned[::-1]
            sync.wait()
            for i, seed in zip(chosen, range(5), strict=False):
                grad = expected(0, i) if seed == i else (whole_of(0) * whole_of(1 + seed)).sum((0, 1))
                assert torch.equal(to_global(model.weights[i].grad), grad), (bucket_bytes, left_out, i)
                model.weights[i].grad = None
            for hook in hooks:
                hook.remove()


def outside():
    """A rank outside the parameters' mesh starts no collective, and has gradients in the parameters' layout."""
    mesh = ProcessMesh([1, 2], ["dp"])
    model = Model(Layout(mesh), 2)
    sync = GradientSync(model)
    with Collectives() as seen:
        backward(model(inputs(Layout(mesh, "dp: S(0)"), 0)), 0)
        sync.wait()
    for i, parameter in enumerate(model.weights):
        assert layout_of(parameter.grad) == Layout(mesh)
        if dist.get_rank() in mesh:
            assert torch.equal(parameter.grad.to_local(), expected(0, i))
        else:
            assert parameter.grad.to_local().numel() == 0
    assert seen.kinds == (["all-reduce"] if dist.get_rank() in mesh else [])


def two_dtypes():
    """Gradients of different dtypes travel apart."""
    model = Model(Layout(DATA), 2)
    model.weights.append(nn.Parameter(model.weights[0].detach().to(torch.float32)))
    sync = GradientSync(model)
    x = inputs(Layout(DATA, "dp: S(0)"), 0)
    with Collectives() as seen:
        backward(model(x)[:2], 0)
        y = Scale.apply(x.to(torch.float32), model.weights[2])
        torch.autograd.backward([y], [distribute(whole_of(1).float(), layout_of(y))])
        sync.wait()
    assert seen.kinds == ["all-reduce"] * 2
    assert torch.equal(to_global(model.weights[2].grad), expected(0, 0).float())


@pytest.mark.parametrize(
    "function, arguments, ranks",
    [
        pytest.param(tied, (), 2, id="tied"),
        pytest.param(accumulated, (), 2, id="paused"),
        pytest.param(paused_after, (), 2, id="paused-after"),
        pytest.param(several_passes, (True,), 2, id="several-passes"),
        pytest.param(several_passes, (False,), 2, id="several-passes-one-wait"),
        pytest.param(steps_are_independent, (), 2, id="steps"),
        pytest.param(paused_only, (), 2, id="some-without-gradient"),
        pytest.param(frozen_and_plain, (), 2, id="frozen-and-plain"),
        pytest.param(sharded_states, (), 2, id="sharded"),
        pytest.param(another_order, (), 2, id="another-order-on-each-rank"),
        pytest.param(outside, (), 4, id="paddle-58126-outside"),
        pytest.param(two_dtypes, (), 2, id="two-dtypes"),
    ],
)
def test_paddle_59057(pool, function, arguments, ranks):
    pool.run(function, *arguments, ranks=ranks)


def test_a_bucket_holds_something():
    with pytest.raises(ValueError, match="bucket_bytes is 0; a bucket holds at least 1 byte"):
        GradientSync(nn.Linear(1, 1), bucket_bytes=0)
