"""A step of an optimizer before `sync.wait()` would leave parameters as they are: it is an error. What else may come between."""

import gc

import pytest
import torch
from torch import nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, clip_grad_norm_, to_global

from tests.reshard.test_gradients import Model, backward, expected, inputs

DATA = ProcessMesh.grid(dp=2)
BATCH = "dp: S(0)"


def forward(model, seed):
    return model(inputs(Layout(DATA, BATCH), seed))


def made(count=2, bucket_bytes=2**20, optimizer=torch.optim.SGD):
    model = Model(Layout(DATA), count)
    return model, GradientSync(model, bucket_bytes=bucket_bytes), optimizer(model.parameters(), lr=1.0)


def refused(optimizer):
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def steps_without_wait(optimizer):
    """In buckets that have left and in such that have not; and the step that was refused changed nothing."""
    said = []
    for bucket_bytes in (1, 2**20):
        model, sync, steps = made(2, bucket_bytes, optimizer)
        before = [to_global(weight).clone() for weight in model.weights]
        backward(forward(model, 0), 0)
        said.append(refused(steps))
        assert all(torch.equal(to_global(weight), was) for weight, was in zip(model.weights, before, strict=True))
        sync.wait()
        steps.step()
        assert not any(torch.equal(to_global(weight), was) for weight, was in zip(model.weights, before, strict=True))
    return said


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_before_wait_is_refused(pool, optimizer):
    for messages in pool.run(steps_without_wait, optimizer, ranks=2):
        for message in messages:
            assert "weights.0 and 1 other" in message
            assert "call sync.wait() between loss.backward() and optimizer.step()" in message


def norm_without_wait():
    """Of gradients that are on their way there is none: without them it would be 0."""
    for bucket_bytes in (1, 2**20):
        model, sync, _ = made(2, bucket_bytes)
        backward(forward(model, 0), 0)
        with pytest.raises(
            RuntimeError, match=r"clip_grad_norm_\(\) before sync.wait\(\): .* weights.0 and 1 other are still"
        ):
            clip_grad_norm_(model.parameters(), 1.0)
        clip_grad_norm_(torch.ones(2, requires_grad=True), 1.0)  # of another model
        sync.wait()
        assert clip_grad_norm_(model.parameters(), 1.0) > 0


def scaler_without_wait():
    """It finds no gradients, and does not come to the optimizer's step: no scale and no parameter changes, and it is an error."""
    model, sync, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(sum(output.to_local().sum() for output in forward(model, 0))).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    sync.wait()
    optimizer.step()


def paused_and_never_waited_for():
    """Gradients that were only added up are addends: a step would move them, unasked, or take them for whole."""
    model, sync, optimizer = made()
    with sync.paused():
        backward(forward(model, 0), 0)
    refused(optimizer)
    sync.wait()
    optimizer.step()


def accumulation():
    """Passes add up until `wait()`, paused or not, and the step after it is taken."""
    for pause in (False, True):
        model, sync, optimizer = made()
        if pause:
            with sync.paused():
                backward(forward(model, 0), 0)
        else:
            backward(forward(model, 0), 0)
        backward(forward(model, 10), 10)
        refused(optimizer)
        sync.wait()
        optimizer.step()
        for i, weight in enumerate(model.weights):
            assert torch.equal(to_global(weight.grad), expected(0, i) + expected(10, i))


def evaluation():
    """Forward passes without gradients may come at any time."""
    model, sync, optimizer = made()
    backward(forward(model, 0), 0)
    with torch.no_grad():
        forward(model, 5)
    sync.wait()
    optimizer.step()
    with torch.no_grad():
        forward(model, 5)
    optimizer.step()  # of gradients that were waited for


def given_up():
    """A step that is given up is waited for, then zeroed: nothing of it is in the next one."""
    for set_to_none in (True, False):
        model, sync, optimizer = made()
        backward(forward(model, 0), 0)
        sync.wait()
        optimizer.zero_grad(set_to_none=set_to_none)
        backward(forward(model, 10), 10)
        sync.wait()
        optimizer.step()
        for i, weight in enumerate(model.weights):
            assert torch.equal(to_global(weight.grad), expected(10, i))


def another_model():
    """An optimizer of other parameters steps as it likes."""
    model, sync, optimizer = made()
    other = nn.Linear(2, 2)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    backward(forward(model, 0), 0)
    other(torch.ones(2)).sum().backward()
    other_optimizer.step()
    refused(optimizer)
    sync.wait()
    optimizer.step()


def closed():
    """Without its sync, a module's gradients are its owner's concern."""
    model, sync, optimizer = made()
    backward(forward(model, 0), 0)
    sync.close()
    optimizer.step()


def hooks_are_taken_off():
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    gc.collect()  # of what other tests left
    before = len(_global_optimizer_pre_hooks)
    model, sync, optimizer = made()
    assert len(_global_optimizer_pre_hooks) == before + 1
    sync.close()
    assert len(_global_optimizer_pre_hooks) == before
    model, sync, optimizer = made()
    del model, sync, optimizer
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before


@pytest.mark.parametrize(
    "function",
    [
        norm_without_wait,
        scaler_without_wait,
        paused_and_never_waited_for,
        accumulation,
        evaluation,
        given_up,
        another_model,
        closed,
        hooks_are_taken_off,
    ],
)
def test_what_comes_between(pool, function):
    pool.run(function, ranks=2)
