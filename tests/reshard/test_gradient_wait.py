"""Before `sync.wait()`: reads of gradients and optimizer steps are errors; which calls are allowed."""

import copy
import gc
import re
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, clip_grad_norm_, to_global
from weft.reshard.training.full_parameters import ModelGathering

from tests.reshard.test_gradients import Model, backward, expected, inputs

DATA = ProcessMesh.grid(dp=2)
BATCH = "dp: S(0)"
ON_ITS_WAY = r".*the gradient of weights\.0 is still on its way; call sync\.wait\(\) between loss\.backward\(\)"


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
    """Refused with buckets sent and with buckets not yet sent; the refused step changes nothing."""
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
    """A norm is refused while gradients are being reduced: the norm of placeholders would be 0."""
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


def scaler_without_wait(unscales):
    """The scaler's step is refused before the scale or a parameter changes, and can go on afterwards."""
    model, sync, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(sum(output.to_local().sum() for output in forward(model, 0))).backward()
    with pytest.raises(RuntimeError, match=ON_ITS_WAY):
        scaler.unscale_(optimizer) if unscales else scaler.step(optimizer)
    sync.wait()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


UPDATES = {
    "in-place": lambda p: p.sub_(p.grad),
    "scaled": lambda p: p.sub_(0.1 * p.grad),
    "foreach": lambda p: torch._foreach_add_([p], [p.grad], alpha=-1.0),
    "local": lambda p: p.to_local().sub_(p.grad.to_local()),
    "data": lambda p: p.data.sub_(p.grad.data),
    "norm-of-torch": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0),
    "value-of-torch": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0),
    "number": lambda p: p.grad.abs().max().item(),
    "added": lambda p: p.grad.add_(1.0),
    "zeroed": lambda p: p.grad.zero_(),
}


def by_hand_without_wait():
    """Refused with buckets sent and with buckets not yet sent; the refused call changes nothing."""
    for bucket_bytes in (1, 2**20):
        model, sync, _ = made(2, bucket_bytes)
        backward(forward(model, 0), 0)
        before = [to_global(weight).clone() for weight in model.weights]
        for name, update in UPDATES.items():
            with torch.no_grad(), pytest.raises((RuntimeError, AttributeError), match=ON_ITS_WAY):
                update(model.weights[0])
                raise AssertionError(name)
        assert all(torch.equal(to_global(weight), was) for weight, was in zip(model.weights, before, strict=True))
        sync.wait()
        with torch.no_grad():
            for weight in model.weights:
                weight.sub_(weight.grad)
        for i, weight in enumerate(model.weights):
            assert torch.equal(to_global(weight), before[i] - expected(0, i))


def what_may_be_asked():
    """Metadata and existence of a pending gradient may be read; a copy of the model has no gradients."""
    model, sync, _ = made()
    backward(forward(model, 0), 0)
    weight = model.weights[0]
    grad = weight.grad
    assert (grad.shape, grad.dtype, grad.device) == (weight.shape, weight.dtype, weight.device)
    assert grad.untyped_storage().nbytes() == 0
    assert re.match(f"<{ON_ITS_WAY}", repr(grad))
    assert not hasattr(grad, "to_local")
    assert copy.deepcopy(model).weights[0].grad is None
    model.zero_grad()  # pending gradients are not given up
    assert weight.grad is None
    sync.wait()
    assert torch.equal(to_global(weight.grad), expected(0, 0))


def another_dtype():
    """Gradients may be asked for in another dtype after a step."""
    model, sync, _ = made()
    for dtype in (torch.float64, torch.float32):
        for weight in model.weights:
            weight.grad_dtype = dtype
        backward(forward(model, 0), 0)
        assert model.weights[0].grad.dtype == dtype
        sync.wait()
        assert model.weights[0].grad.dtype == dtype
        model.zero_grad()


def compiled():
    """A graph may be built while gradients wait, and passes accumulate."""
    model, sync, _ = made()
    backward(forward(model, 0), 0)
    scaled = torch.compile(lambda weight: weight * 2, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(to_global(scaled(model.weights[0])), 2 * to_global(model.weights[0]))
    backward(forward(model, 10), 10)
    sync.wait()
    assert torch.equal(to_global(model.weights[0].grad), expected(0, 0) + expected(10, 0))


def paused_and_never_waited_for():
    """After paused passes alone a step is refused: the gradients are addends, not yet summed over ranks."""
    model, sync, optimizer = made()
    with sync.paused():
        backward(forward(model, 0), 0)
    refused(optimizer)
    sync.wait()
    optimizer.step()


def accumulation():
    """Passes accumulate until `wait()`, paused or not; the step after `wait()` is taken."""
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
    """Forward passes without gradients are allowed at any time."""
    model, sync, optimizer = made()
    backward(forward(model, 0), 0)
    with torch.no_grad():
        forward(model, 5)
    sync.wait()
    optimizer.step()
    with torch.no_grad():
        forward(model, 5)
    optimizer.step()  # with the gradients of the last `wait()`


def given_up():
    """The gradients of an abandoned step are waited for and zeroed: the next step has new gradients alone."""
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
    """An optimizer of unrelated parameters may step at any time."""
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
    """After `sync.close()` gradients are no longer summed: the caller has to sum them."""
    model, sync, optimizer = made()
    backward(forward(model, 0), 0)
    sync.close()
    assert all(weight.grad is None for weight in model.weights)
    optimizer.step()


class Cycle:
    """An object that only the garbage collector ends, with the two objects whose methods are called at each step."""

    def __init__(self):
        self.itself = self
        self.model, self.sync, _ = made()
        self.gathering = ModelGathering()
        self.weak = [weakref.ref(each) for each in (self.model, self.sync, self.gathering)]


def methods_called_at_steps_keep_no_object_alive():
    weak = Cycle().weak
    assert all(each() is not None for each in weak)
    gc.collect()
    assert all(each() is None for each in weak)


def models_collected_in_a_step():
    """The garbage collector may end a model while torch loops over the hooks of another model's step."""
    handles = [register_optimizer_step_pre_hook(collect), register_optimizer_step_post_hook(collect)]
    try:
        model, sync, optimizer = made()
        for number in range(2):
            backward(forward(model, 0), 0)
            sync.wait()
            with without_collections():
                weak = Cycle().weak
                assert all(each() is not None for each in weak)
                optimizer.step()
            assert all(each() is None for each in weak), f"in step {number}"
            optimizer.zero_grad()
    finally:
        for handle in handles:
            handle.remove()


def collect(*_):
    gc.collect()


@contextmanager
def without_collections():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "function",
    [
        norm_without_wait,
        pytest.param(partial(scaler_without_wait, False), id="scaler-steps"),
        pytest.param(partial(scaler_without_wait, True), id="scaler-unscales"),
        by_hand_without_wait,
        what_may_be_asked,
        another_dtype,
        compiled,
        paused_and_never_waited_for,
        accumulation,
        evaluation,
        given_up,
        another_model,
        closed,
        methods_called_at_steps_keep_no_object_alive,
        models_collected_in_a_step,
    ],
)
def test_calls_between_backward_and_wait(pool, function):
    pool.run(function, ranks=2)
