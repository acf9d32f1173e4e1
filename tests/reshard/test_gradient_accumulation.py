"""Gradients of several backward passes: added up in whatever layouts they have, and each reduced once."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, clip_grad_norm_, layout_of, to_global
from weft.reshard.moving.dtensor import wrap
from weft.reshard.training.pending_gradient import GradPlaceholder

from tests.reshard.test_gradients import (
    DATA,
    GRID,
    LARGE,
    NBYTES,
    H,
    Model,
    Scale,
    backward,
    expected,
    inputs,
    whole_of,
)
from tests.support.collectives import Collectives

THREE = ProcessMesh([2, 0, 1], ["dp"])  # a third has no exact fraction: nothing may be divided in between


class Sent(Collectives):
    """Records in `sent` the kind of each collective, and the bytes that this rank contributed."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.kinds)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.kinds) > before:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.sent.append((self.kinds[-1], max(tensor.nbytes for tensor in tensors)))
        return result


def paused_after():
    """A paused pass is not lost after a pass whose gradients are pending, whether or not their reduction has begun."""
    for bucket_bytes in (1, LARGE):
        model = Model(Layout(DATA), 2)
        sync = GradientSync(model, bucket_bytes=bucket_bytes)
        x = Layout(DATA, "dp: S(0)")
        with Sent() as seen:
            backward(model(inputs(x, 0)), 0)
            with sync.paused():
                backward(model(inputs(x, 10)), 10)
            sync.wait()
        assert seen.sent == ([("all-reduce", NBYTES)] * 4 if bucket_bytes == 1 else [("all-reduce", 2 * NBYTES)])
        for i, parameter in enumerate(model.weights):
            assert torch.equal(to_global(parameter.grad), expected(0, i) + expected(10, i)), (bucket_bytes, i)


def several_passes(mesh, bucket_bytes, wait_between, sent):
    """Passes without zeroing the gradients add up, and each is reduced once."""
    model = Model(Layout(mesh), 2)
    sync = GradientSync(model, bucket_bytes=bucket_bytes)
    with Sent() as seen:
        for seed in (0, 10):
            backward(model(inputs(Layout(mesh, "dp: S(0)"), seed)), seed)
            if wait_between:
                sync.wait()
        sync.wait()
    assert seen.sent == [("all-reduce", nbytes) for nbytes in sent]
    for i, parameter in enumerate(model.weights):
        assert layout_of(parameter.grad) == Layout(mesh)
        assert torch.equal(to_global(parameter.grad), expected(0, i) + expected(10, i)), i


def other_layouts():
    """Passes with differently sharded inputs: their gradients differ in layout, and are reduced separately."""
    for pause in (False, True):
        model = Model(Layout(GRID), 1)
        sync = GradientSync(model)
        with Sent() as seen:
            for seed, x in ((0, "dp: S(0)"), (10, "dp: S(0), cp: S(1)"), (20, ""), (30, "dp: S(1)")):
                with sync.paused() if pause else nullcontext():
                    backward(model(inputs(Layout(GRID, x), seed)), seed)
            assert seen.sent == []
            sync.wait()
        # over dp for two passes together; over dp and cp for the third
        assert seen.sent == [("all-reduce", NBYTES)] * 2
        total = sum(expected(seed, 0) for seed in (0, 10, 20, 30))
        assert torch.equal(to_global(model.weights[0].grad), total)


def zeroed_in_place():
    """Gradients that the optimizer zeroes keep their layout; DTensor does not add the next gradients to them."""
    model = Model(Layout(THREE), 2)
    sync = GradientSync(model)
    for seed in (0, 10):
        model.zero_grad(set_to_none=False)
        with Sent() as seen:
            backward(model(inputs(Layout(THREE, "dp: S(0)"), seed)), seed)
            sync.wait()
        assert seen.sent == [("all-reduce", 2 * NBYTES)]
        for i, parameter in enumerate(model.weights):
            assert torch.equal(to_global(parameter.grad), expected(seed, i))


class Nothing(torch.autograd.Function):
    """Returns no gradient for its weight."""

    @staticmethod
    def forward(ctx, x, weight):
        return wrap(x.to_local().clone(), layout_of(x), x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def no_gradient():
    """A function that returns no gradient, on the first pass or a later pass, changes nothing."""
    model = Model(Layout(DATA), 2)
    sync = GradientSync(model)
    for seed, function, buckets in ((0, Nothing, 0), (10, Scale, 1), (20, Nothing, 0)):
        x = inputs(Layout(DATA, "dp: S(0)"), seed).requires_grad_()
        with Collectives() as seen:
            backward([function.apply(x, weight) for weight in model.weights], seed)
            sync.wait()
        assert seen.kinds == ["all-reduce"] * buckets
        if function is Nothing and not seed:
            assert all(parameter.grad is None for parameter in model.weights)
    for i, parameter in enumerate(model.weights):
        assert torch.equal(to_global(parameter.grad), expected(10, i))


def used_often():
    """A parameter used three times in a pass has a single gradient, reduced once."""
    model = Model(Layout(DATA), 1)
    sync = GradientSync(model)
    y = inputs(Layout(DATA, "dp: S(0)"), 0)
    with Sent() as seen:
        for _ in range(3):
            y = Scale.apply(y, model.weights[0])
        backward([y], 0)
        sync.wait()
    assert seen.sent == [("all-reduce", NBYTES)]
    weight = torch.arange(H, dtype=torch.float64).requires_grad_()
    (whole_of(0) * weight**3).backward(whole_of(1))
    assert torch.equal(to_global(model.weights[0].grad), weight.grad)


class Watch(torch.autograd.Function):
    """An identity; its backward records the collectives started by then."""

    @staticmethod
    def forward(ctx, x, seen, noted):
        ctx.seen, ctx.noted = seen, noted
        return wrap(x.to_local().clone(), layout_of(x), x.shape)

    @staticmethod
    def backward(ctx, grad):
        ctx.noted.extend(ctx.seen.kinds)
        return grad, None, None


def overlapped():
    """The reduction of the last layer's bucket starts before backward reaches the first layer."""
    for shard_over, kind in ((None, "all-reduce"), ("dp", "reduce-scatter")):
        model = Model(Layout(DATA), 2)
        sync = GradientSync(model, shard_over=shard_over, bucket_bytes=1)
        noted = []
        with Collectives() as seen:
            hidden = Watch.apply(Scale.apply(inputs(Layout(DATA, "dp: S(0)"), 0), model.weights[0]), seen, noted)
            backward([Scale.apply(hidden, model.weights[1])], 0)
            assert noted == [kind]
            assert seen.kinds == [kind] * 2
            assert all(isinstance(parameter.grad, GradPlaceholder) for parameter in model.weights)  # on their way
            sync.wait()
        assert seen.kinds == [kind] * 2


def forgotten():
    """A sync that nobody holds is freed with its module, and keeps no parameter alive."""
    model = Model(Layout(DATA), 1)
    GradientSync(model)
    parameter = weakref.ref(model.weights[0])
    del model
    gc.collect()
    assert parameter() is None
    model = Model(Layout(DATA), 1)
    GradientSync(model)
    GradientSync(model)  # the first sync is freed, and reduces nothing


@pytest.mark.parametrize(
    ("function", "arguments", "ranks"),
    [
        pytest.param(paused_after, (), 2, id="paused-after"),
        pytest.param(several_passes, (THREE, LARGE, True, [2 * NBYTES] * 2), 3, id="several-passes"),
        pytest.param(several_passes, (THREE, 1, True, [NBYTES] * 4), 3, id="several-passes-small-buckets"),
        pytest.param(several_passes, (THREE, LARGE, False, [2 * NBYTES]), 3, id="several-passes-one-wait"),
        pytest.param(several_passes, (THREE, 1, False, [NBYTES] * 4), 3, id="several-passes-under-way"),
        pytest.param(other_layouts, (), 4, id="several-layouts"),
        pytest.param(zeroed_in_place, (), 3, id="zeroed-in-place"),
        pytest.param(no_gradient, (), 2, id="no-gradient"),
        pytest.param(used_often, (), 2, id="used-often"),
        pytest.param(overlapped, (), 2, id="overlapped"),
        pytest.param(forgotten, (), 2, id="forgotten"),
    ],
)
def test_paddle_59057_none_is_missed_and_none_is_reduced_twice(pool, function, arguments, ranks):
    pool.run(function, *arguments, ranks=ranks)


PART = ProcessMesh([[2, 1]], ["cp", "dp"])  # of four ranks
WAYS = {
    "two-passes": lambda sync, seed: nullcontext(),
    "all-paused": lambda sync, seed: sync.paused(),
    "first-paused": lambda sync, seed: nullcontext() if seed else sync.paused(),
    "second-paused": lambda sync, seed: sync.paused() if seed else nullcontext(),
}


def partly_outside(way, wait_between, layouts, options):
    """Ranks 0 and 3 are outside the mesh: they send nothing, and have empty gradients."""
    model = Model(Layout(PART), 2)
    sync = GradientSync(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.weights]
    seeds = range(0, 10 * len(layouts), 10)
    with Sent() as seen:
        for seed, x in zip(seeds, layouts, strict=True):
            with WAYS[way](sync, seed):
                backward(model(inputs(Layout(PART, x), seed)), seed)
            if wait_between:
                sync.wait()
        sync.wait()
    inside = dist.get_rank() in PART
    assert bool(seen.sent) == inside
    for i, parameter in enumerate(model.weights):
        assert layout_of(parameter.grad) == Layout(PART, "dp: S(0)" if "shard_over" in options else "")
        if inside:
            total = sum(expected(seed, i) for seed in seeds)
            assert torch.equal(to_global(parameter.grad), total), (way, i)
        else:
            assert parameter.grad.shape == parameter.shape
            assert parameter.grad.to_local().numel() == 0
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for parameter, old in zip(model.weights, before, strict=True):
        assert torch.equal(parameter.to_local(), old.to_local()) == (not inside)
    optimizer.zero_grad(set_to_none=False)
    backward(model(inputs(Layout(PART, layouts[0]), 0)), 0)
    sync.wait()
    parameter = model.weights[0]
    if inside:
        truth = whole_of(0) * whole_of(1)
        assert torch.equal(to_global(parameter.grad), truth.sum((0, 1)))
    else:
        assert parameter.grad.to_local().numel() == 0


def each_way_partly_outside():
    same, others = ["dp: S(0)"] * 2, ["dp: S(0)", "dp: S(1)", ""]
    for way in WAYS:
        for wait_between in (False, True):
            for layouts in (same, others):
                for options in ({}, {"bucket_bytes": 1}, {"shard_over": "dp"}):
                    partly_outside(way, wait_between, layouts, options)


@pytest.mark.exhaustive
def test_ranks_outside_of_the_mesh_accumulate_nothing(pool):
    pool.run(each_way_partly_outside, ranks=4)


def test_one_process_without_dtensors_has_nothing_to_shard():
    GradientSync(nn.Linear(2, 2), shard_over="dp").wait()
