"""Modules computed on local tensors where a mesh divides rows alone: when they are, and with unchanged results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.kernels import cross_entropy
from weft.mesh import Layout, Partial, ProcessMesh
from weft.models import Llama, LlamaConfig, ParallelPlan, forward_backward, initialize, lay_out_batch, lora, parallelize
from weft.models.parallel import local_modules
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, distribute, layout_of, reshard, to_global

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32
)
PLAN = Llama(CONFIG).parallel_plan()
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def batch(seed: int = 0, rows: int = 5) -> tuple[Tensor, Tensor]:
    """Tokens and targets [5, 9]: uneven over two ranks."""
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, 10), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def made(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


class OwnNorm(nn.Module):
    """A user's module in a block, which computes with all rows."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        return self.norm(input, residual)


def put_own(model: Any) -> None:
    model.layers[0].post_attention_layernorm = OwnNorm(model.layers[0].post_attention_layernorm)


def hook(model: Any) -> None:
    model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)


def wrap_forward(model: Any) -> None:
    norm = model.layers[0].mlp
    forward = norm.forward
    norm.forward = lambda x: forward(x)


def adapt(model: Any) -> None:
    lora(model, 2, 4.0, ["layers.*.self_attn.q_proj"])


def freeze(model: Any) -> None:
    model.layers[0].mlp.requires_grad_(False)


def nothing(model: Any) -> None:
    pass


# By name: the plan's options, a change to the laid-out model, a bucket's most bytes, and the types that blocks see.
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Any], None], int, set[str]]] = {
    "whole": ({}, nothing, 1 << 20, {"plain"}),
    "by-block": ({}, nothing, 1, {"plain"}),
    "zero1": ({"zero": 1}, nothing, 1 << 20, {"plain"}),
    "zero3": ({"zero": 3}, nothing, 1 << 20, {"plain"}),
    "recomputed": ({"recompute": "full"}, nothing, 1 << 20, {"plain"}),
    "recomputed-selectively": ({"recompute": "selective"}, nothing, 1 << 20, {"plain"}),
    "frozen": ({}, freeze, 1 << 20, {"plain"}),
    "hooked": ({}, hook, 1 << 20, {"DTensor"}),
    "hooked-by-block": ({}, hook, 1, {"DTensor", "plain"}),
    "own-module": ({}, put_own, 1, {"DTensor", "plain"}),
    "own-forward": ({}, wrap_forward, 1, {"DTensor", "plain"}),
    "adapted": ({}, adapt, 1, {"DTensor"}),
}


@contextmanager
def seeing() -> Iterator[set[str]]:
    """The types of input that norms within blocks get inside this context."""
    seen: set[str] = set()
    norm = kernels.add_rms_norm

    def told(x: Tensor, *more: Any) -> Any:
        seen.add("DTensor" if isinstance(x, DTensor) else "plain")
        return norm(x, *more)

    with patch.object(kernels, "add_rms_norm", told):
        yield seen


def stepped(name: str) -> tuple[set[str], float, dict[str, Tensor | None], list[int]]:
    """The types of the norms' inputs, the loss, the whole gradients, and the bytes of each collective."""
    options, change, bucket, _ = VARIANTS[name]
    model = made()
    with patch.object(local_modules, "BUCKET_BYTES", bucket):
        parallelize(model, ProcessMesh.grid(dp=2), replace(PLAN, **options))
    change(model)
    with seeing() as seen, CollectiveCount() as count:
        loss = forward_backward(model, cross_entropy, *batch())
        issued = [each.nbytes for each in count.take_each()]
    return seen, loss.item(), whole_gradients(model), issued


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if each.grad is None else to_global(each.grad) if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_compute_on_local_tensors_where_only_rows_are_divided(name: str, pool: Any) -> None:
    _, change, _, sees = VARIANTS[name]
    model = made()
    change(model)
    loss = forward_backward(model, cross_entropy, *batch()).item()
    truth = whole_gradients(model)
    for seen, found, gradients, _ in pool.run(stepped, name, ranks=2):
        assert seen == sees
        assert found == pytest.approx(loss, rel=1e-5)
        assert gradients.keys() == truth.keys()
        for each, right in truth.items():
            assert (gradients[each] is None) == (right is None), each
            if right is not None:
                torch.testing.assert_close(gradients[each], right, **TOLERANCE, msg=each)


def test_nothing_more_is_communicated(pool: Any) -> None:
    """A single bucket for all gradients, and a collective for the loss."""
    nbytes = sum(each.nbytes for each in made().parameters())
    for name in ("whole", "hooked"):
        (_, _, _, issued), _ = pool.run(stepped, name, ranks=2)
        assert sorted(issued) == [4, nbytes], name


def in_other_ways() -> dict[str, set[str]]:
    found = {}
    tokens, targets = batch()
    documents = torch.zeros_like(tokens)
    documents[:, 5:] = 1
    positions = torch.arange(9).expand(5, 9) % 5
    for name, axes, config, inputs in (
        ("packed", {"dp": 2}, CONFIG, {"documents": documents, "positions": positions}),
        ("axes of size 1", {"dp": 2, "tp": 1}, CONFIG, {}),
        ("two axes", {"dp_replica": 2, "dp_shard": 1}, CONFIG, {}),
        ("dropout", {"dp": 2}, replace(CONFIG, dropout=0.1), {"dropout_key": 7}),
        ("no dropout", {"dp": 2}, CONFIG, {"dropout_key": 7}),
        ("tp", {"tp": 2}, CONFIG, {}),
        ("cp", {"cp": 2}, CONFIG, {}),
    ):
        plan = replace(PLAN, context="ulysses") if "cp" in axes else PLAN
        model, alone = (made(config) for _ in range(2))
        parallelize(model, ProcessMesh.grid(**axes), plan)
        with seeing() as seen:
            loss = forward_backward(model, cross_entropy, tokens, targets, **inputs)
        if name != "dropout":  # dropout masks have tests of their own
            torch.testing.assert_close(loss, forward_backward(alone, cross_entropy, tokens, targets, **inputs).detach())
        found[name] = seen
    return found


@pytest.mark.exhaustive
def test_documents_axes_and_dropout_decide_between_local_and_dtensor_blocks(pool: Any) -> None:
    for found in pool.run(in_other_ways, ranks=2):
        assert found == {
            "packed": {"plain"},
            "axes of size 1": {"plain"},
            "two axes": {"plain"},
            "dropout": set(),  # two ops
            "no dropout": {"plain"},
            "tp": {"DTensor"},
            "cp": {"DTensor"},
        }


def without_sync() -> None:
    """`.grad` is the same as with each op computed on DTensors; for replicated tokens it is whole."""
    tokens, targets = batch()
    alone, model = made(), made()
    cross_entropy(alone(tokens), targets).backward()
    mesh = ProcessMesh.grid(dp=2)
    parallelize(model, mesh)
    laid_out = lay_out_batch(mesh, PLAN, tokens, targets)
    for given, target, placement in (
        (laid_out.tokens, laid_out.targets, Partial()),
        (distribute(tokens, Layout(mesh)), distribute(targets, Layout(mesh)), None),
    ):
        model.zero_grad()
        logits = model(given)
        assert layout_of(logits) == layout_of(given) and logits.shape == (5, 9, CONFIG.vocab_size)
        cross_entropy(logits, target).backward()
        for (name, parameter), right in zip(model.named_parameters(), alone.parameters(), strict=True):
            wanted = Layout(mesh, {} if placement is None else {"dp": placement})
            assert layout_of(parameter.grad) == wanted, name
            torch.testing.assert_close(to_global(reshard(parameter.grad)), right.grad, **TOLERANCE)


def test_without_a_gradient_sync_gradients_are_partial(pool: Any) -> None:
    pool.run(without_sync, ranks=2)


def weight_of(model: Any) -> Any:
    return model.layers[1].mlp.down_proj.weight


def sums(bucket: int) -> None:
    """Backward passes that accumulate; a user's hook; a block called twice; a retained graph."""
    mesh, (tokens, targets) = ProcessMesh.grid(dp=2), batch()
    laid_out = lay_out_batch(mesh, PLAN, tokens, targets)

    def laid(model: Any) -> tuple[Any, GradientSync]:
        with patch.object(local_modules, "BUCKET_BYTES", bucket):
            parallelize(model, mesh)
        return model, GradientSync(model)

    def loss_of(model: Any) -> Tensor:
        loss: Any = cross_entropy(model(laid_out.tokens), laid_out.targets)
        return reshard(loss)

    def check(model: nn.Module, times: int, alone: nn.Module | None = None) -> None:
        single = copy.deepcopy(plain if alone is None else alone)
        single.zero_grad()
        cross_entropy(single(tokens), targets).backward()
        for (name, parameter), right in zip(model.named_parameters(), single.parameters(), strict=True):
            assert layout_of(parameter.grad) == Layout(mesh), name
            assert right.grad is not None
            torch.testing.assert_close(to_global(parameter.grad), right.grad * times, **TOLERANCE, msg=name)

    plain = made()
    model, sync = laid(made())
    with sync.paused():
        loss_of(model).backward()
    assert all(isinstance(each.grad, DTensor) for each in model.parameters()), "it can be seen meanwhile"
    loss_of(model).backward()
    sync.wait()
    check(model, 2)
    model.zero_grad()
    with sync.paused():
        loss_of(model).backward()
    model.zero_grad()  # given up
    loss_of(model).backward()
    sync.wait()
    check(model, 1)
    loss_of(model).backward()  # accumulates onto the first gradients
    loss_of(model).backward()  # before wait()
    sync.wait()
    check(model, 3)
    model.zero_grad()

    kept = loss_of(model)
    kept.backward(retain_graph=True)
    kept.backward()
    sync.wait()
    check(model, 2)
    model.zero_grad()

    first, second = loss_of(model), loss_of(model)
    second.backward()
    first.backward()
    sync.wait()
    check(model, 2)
    model.zero_grad()

    loss_of(model).backward(inputs=list(model.layers.parameters()))
    sync.wait()
    assert model.norm.weight.grad is None
    asked = list(model.parameters())
    for each, right in zip(torch.autograd.grad(loss_of(model), asked), asked, strict=True):
        assert layout_of(each) == Layout(mesh, "dp: P(sum)")
        assert right.grad is None or torch.equal(to_global(reshard(each)), to_global(right.grad))
    sync.wait()
    model.zero_grad()

    cross_entropy(model(distribute(tokens, Layout(mesh))), distribute(targets, Layout(mesh))).backward()
    assert layout_of(weight_of(model).grad) == Layout(mesh), "it is there at once"
    sync.wait()
    check(model, 1)
    model.zero_grad()

    few = lay_out_batch(mesh, PLAN, tokens[:1], targets[:1])  # of which the second rank has none
    loss: Any = cross_entropy(model(few.tokens), few.targets)
    loss.backward()
    sync.wait()
    right = made()
    cross_entropy(right(tokens[:1]), targets[:1]).backward()
    torch.testing.assert_close(to_global(weight_of(model).grad), weight_of(right).grad, **TOLERANCE)
    model.zero_grad()

    told: list[Tensor] = []
    weight_of(model).register_hook(lambda grad: told.append(grad))
    loss_of(model).backward()
    sync.wait()
    check(model, 1)
    assert len(told) == 1 and isinstance(told[0], DTensor)

    twice, alone = made(), made()
    for each in (twice, alone):
        each.layers[1] = each.layers[0]
    twice, sync = laid(twice)
    with CollectiveCount() as count:
        loss_of(twice).backward()
        sync.wait()
        issued = [each.nbytes for each in count.take_each()]
    check(twice, 1, alone)
    assert sum(issued) - 8 == sum(each.to_local().nbytes for each in twice.parameters()), "once, not for each call"


@pytest.mark.exhaustive
@pytest.mark.parametrize("bucket", [pytest.param(1 << 20, id="whole"), pytest.param(1, id="by-block")])
def test_backward_passes_add_up(bucket: int, pool: Any) -> None:
    pool.run(sums, bucket, ranks=2)


def unused() -> None:
    """A parameter without a gradient holds up its bucket: until sync.wait(), using the bucket's gradients raises."""
    mesh = ProcessMesh.grid(dp=2)
    model: Any = made()
    model.unused = nn.Parameter(torch.ones(3))  # the first that backward reaches
    parallelize(model, mesh)
    sync, laid_out = GradientSync(model), lay_out_batch(mesh, PLAN, *batch())
    for _ in range(2):
        loss: Any = cross_entropy(model(laid_out.tokens), laid_out.targets)
        loss.backward()
        used = [each for name, each in model.named_parameters() if name != "unused"]
        assert all(each.grad is not None and not isinstance(each.grad, DTensor) for each in used)
        with pytest.raises(RuntimeError, match=r"sync.wait\(\)"):
            torch.nn.utils.clip_grad_norm_(used, 1.0)
        sync.wait()
        assert model.unused.grad is None and all(layout_of(each.grad) == Layout(mesh) for each in used)
        model.zero_grad()


def test_gradients_behind_a_missing_gradient_are_refused_until_wait(pool: Any) -> None:
    pool.run(unused, ranks=2)


def failing() -> None:
    mesh = ProcessMesh.grid(dp=2)
    model: Any = made()
    parallelize(model, mesh)
    before = dict(model.named_parameters())
    laid_out = lay_out_batch(mesh, PLAN, *batch())

    def fail(*_: Any) -> Any:
        assert not isinstance(model.norm.weight, DTensor), "within the call it is this rank's"
        raise KeyError("in a norm")

    with patch.object(kernels, "add_rms_norm", fail), pytest.raises(KeyError, match="in a norm"):
        model(laid_out.tokens)
    after = dict(model.named_parameters())
    assert all(after[name] is each for name, each in before.items())

    logits = model(laid_out.tokens)
    loss: Any = cross_entropy(logits, laid_out.targets)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        reshard(grads[0].sum()).backward()

    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not to_global(copied(laid_out.tokens)).any(), "a copy computes with its own"
    assert to_global(model(laid_out.tokens)).any()


def test_parameters_are_back_after_an_error_and_copies_have_their_own(pool: Any) -> None:
    pool.run(failing, ranks=2)


def test_plans_of_one_process_are_left_alone() -> None:
    model = made()
    parallelize(model, ProcessMesh.grid(dp=1), ParallelPlan())
    assert "forward" not in vars(model)
