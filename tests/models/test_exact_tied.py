"""With `exact`, a tied table's uses are summed over the ranks each by itself: on one stage as on two."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPTConfig,
    LlamaConfig,
    PipelinePlan,
    clip_gradients,
    forward_backward,
    initialize,
    lay_out_batch,
    parallelize,
)
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.reshard import GradientSync, exact_sums, to_global

SIZES: dict[str, Any] = {
    "vocab_size": 33, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_seq_len": 16, "intermediate_size": 48
}  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {"gpt": GPTConfig(**SIZES), "llama": LlamaConfig(**SIZES, tie_embeddings=True)}
EXACT = {"dp": 4, "tp": 2}
ROWS, LENGTH, MICROBATCHES = 16, 8, 4


def batch(number: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 33, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make(family: str, axes: dict[str, int], *, schedule: Any = "1f1b", **plan: Any) -> nn.Module:
    model = make_model(CONFIGS[family])
    initialize(model, seed=3)
    pipeline = PipelinePlan(schedule=schedule, microbatches=MICROBATCHES) if "pp" in axes else None
    plan = {"exact": EXACT, **plan, "pipeline": pipeline}
    return parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan))


def table_of(model: Any) -> Any:
    """The first parameter of both families."""
    return next(model.parameters())


def gradients(family: str, axes: dict[str, int], plan: dict[str, Any]) -> list[Tensor]:
    """The norm, and the table's gradient, of three steps, whose gradients are added to the earlier ones."""
    model, found = make(family, axes, **plan), []
    for step in range(3):
        forward_backward(model, cross_entropy, *batch(step), microbatches=MICROBATCHES)
        found += [clip_gradients(model, 0.0), to_global(table_of(model).grad)]
    return found


MESHES: list[dict[str, int]] = [
    {"dp": 2, "tp": 1}, {"dp": 1, "tp": 2}, {"pp": 2, "dp": 1, "tp": 1}, {"pp": 2, "dp": 2, "tp": 1}
]  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": "full"},
    "zero-1": {"zero": 1},
    # Inside a pipeline, the gradients of microbatches wait for their turn.
    "zero-2": {"zero": 2, "schedule": "interleaved"},
    "zero-3": {"zero": 3, "schedule": "zero_bubble"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("axes", MESHES, ids=["dp-2", "tp-2", "pp-2", "pp-2-dp-2"])
def test_gradients_of_a_tied_table_have_the_same_bits(pool: Any, family: str, axes: dict[str, int], plan: str) -> None:
    zero = {"zero": min(PLANS[plan]["zero"], 2)} if "zero" in PLANS[plan] else {}
    (truth,) = pool.run(gradients, family, {"dp": 1, "tp": 1}, zero, ranks=1)
    for found in pool.run(gradients, family, axes, PLANS[plan], ranks=math.prod(axes.values())):
        for number, (expected, value) in enumerate(zip(truth, found, strict=True)):
            assert torch.equal(expected, value), f"value {number}"


def in_own_loops() -> list[Tensor]:
    """The table's gradient under a GradientSync, after it is closed, of copied models, and of a plain one."""
    model, plain = make("gpt", {"dp": 1, "tp": 1}), make_model(CONFIGS["gpt"])
    initialize(plain, seed=3)
    sync = GradientSync(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    tokens, targets = batch(0)
    found = []

    def backward(model: nn.Module) -> None:
        cross_entropy(model(tokens), targets).sum().backward()

    for each, ends in ((model, [sync.wait]), (model, []), (copied, []), (pickled, [])):
        with exact_sums({"dp": 1, "tp": 2}):
            backward(each)
            for end in ends:
                end()
        found.append(to_global(table_of(each).grad))
        each.zero_grad()
        sync.close()
    backward(plain)
    return [table_of(plain).grad, *found]


def test_a_table_gets_the_gradients_of_both_uses(pool: Any) -> None:
    """Also where no GradientSync adds: closed, or not made yet."""
    (truth, *found), *_ = pool.run(in_own_loops, ranks=1)
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, truth)


def copied(zero: int, exact: bool) -> list[list[Tensor]]:
    """The weights after two steps: of a model, of copies before and after the first step, and of a pickled copy."""
    model = make("gpt", {"dp": 2, "tp": 1}, zero=zero, **({} if exact else {"exact": None}))
    models = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    def step(each: nn.Module, number: int) -> None:
        forward_backward(each, cross_entropy, *batch(number))
        torch.optim.SGD(each.parameters(), lr=0.1).step()

    for each in models:
        step(each, 0)
        each.zero_grad()
    models.append(copy.deepcopy(model))
    for each in models:
        step(each, 1)
    models.append(copy.deepcopy(model))  # with gradients
    for expected, found in zip(model.parameters(), models[-1].parameters(), strict=True):
        assert torch.equal(to_global(expected.grad), to_global(found.grad))
    return [[to_global(each.detach()) for each in copy.parameters()] for copy in models]


@pytest.mark.exhaustive
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "ordinary"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_copied_model_trains_by_itself(pool: Any, zero: int, exact: bool) -> None:
    for truth, *found in pool.run(copied, zero, exact, ranks=2):
        for each in found:
            assert all(torch.equal(a, b) for a, b in zip(truth, each, strict=True))


def backward(model: nn.Module, between: Any = lambda: None) -> None:
    tokens, targets = batch(0)
    loss = cross_entropy(model(tokens), targets).sum()
    between()
    loss.backward()


def closed_between() -> tuple[Tensor, Tensor]:
    """The table's gradient of a pass whose GradientSync is closed before backward, and the true gradient."""
    model, plain = make("gpt", {"dp": 1, "tp": 1}), make_model(CONFIGS["gpt"])
    initialize(plain, seed=3)
    backward(plain)
    with exact_sums({"dp": 1, "tp": 2}):
        backward(model, GradientSync(model).close)
    return table_of(plain).grad, to_global(table_of(model).grad)


def test_a_closed_synchronization_loses_no_use(pool: Any) -> None:
    ((truth, found),) = pool.run(closed_between, ranks=1)
    torch.testing.assert_close(found, truth)


def closed_under_zero(zero: int, is_closed: bool) -> list[Tensor]:
    """All gradients of two passes. is_closed: the first GradientSync is closed before backward, and a second waits."""
    model, found = make("gpt", {"dp": 2, "tp": 1}, zero=zero), []
    for number in range(2):
        sync = GradientSync(model)
        with exact_sums(EXACT):
            laid_out = lay_out_batch(ProcessMesh.grid(dp=2, tp=1), model.parallel_plan(), *batch(number))
            loss = cross_entropy(model(laid_out.tokens), laid_out.targets).sum()
            if is_closed:
                sync.close()
            loss.backward()
            if is_closed:
                with pytest.raises(RuntimeError, match="keep a GradientSync"):
                    torch.optim.SGD(model.parameters(), lr=0.1).step()
                sync = GradientSync(model)
            sync.wait()
        sync.close()
        found += [to_global(each.grad) for each in model.parameters()]
        model.zero_grad()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_another_synchronization_finishes_what_a_closed_one_leaves(pool: Any, zero: int) -> None:
    truth, *_ = pool.run(closed_under_zero, zero, False, ranks=2)
    for found in pool.run(closed_under_zero, zero, True, ranks=2):
        for i, (a, b) in enumerate(zip(found, truth, strict=True)):
            if i % (len(truth) // 2):
                assert torch.equal(a, b)
            else:  # the table, whose uses autograd has added before the ranks' sum
                torch.testing.assert_close(a, b)


def two_of_a_frozen_table(first_waits: bool) -> list[Tensor]:
    """The table's gradients in two steps. Another GradientSync was made while the table was frozen."""
    model = make("gpt", {"dp": 2, "tp": 1})
    model.requires_grad_(False)
    syncs = [GradientSync(model), GradientSync(model)]
    model.requires_grad_(True)
    found = []
    for number in range(2):
        for sync in syncs[:: 1 if first_waits else -1][:1] if number else syncs:
            sync.wait()
        forward_backward(model, cross_entropy, *batch(number), sync=syncs[0])
        found.append(to_global(table_of(model).grad))
        model.zero_grad()
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("first_waits", [True, False])
def test_a_frozen_table_of_two_synchronizations_gets_both_uses(pool: Any, first_waits: bool) -> None:
    truths = [pool.run(one_step, number, ranks=1)[0] for number in range(2)]
    for found in pool.run(two_of_a_frozen_table, first_waits, ranks=2):
        assert [torch.equal(a, b) for a, b in zip(found, truths, strict=True)] == [True, True]


def one_step(number: int) -> Tensor:
    model = make("gpt", {"dp": 1, "tp": 1})
    forward_backward(model, cross_entropy, *batch(number))
    return to_global(table_of(model).grad)


def wide_gradients(zero: int) -> list[torch.dtype]:
    model = make("gpt", {"dp": 2, "tp": 1}, zero=zero).bfloat16()
    table_of(model).grad_dtype = torch.float32
    forward_backward(model, cross_entropy, *batch(0))
    (stand_in,) = [each.parameter for each in vars(model)["_gradient_sync"]._uses.leaves]
    return [table_of(model).grad.dtype, stand_in.grad_dtype]


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@pytest.mark.parametrize("zero", [0, 3])
def test_a_use_has_the_gradient_dtype_of_its_parameter(pool: Any, zero: int) -> None:
    for dtypes in pool.run(wide_gradients, zero, ranks=2):
        assert dtypes == [torch.float32, torch.float32]


def hooked() -> str:
    model = make("gpt", {"dp": 1, "tp": 1})
    table_of(model).register_hook(lambda grad: grad / 2)
    with pytest.raises(RuntimeError) as error:
        forward_backward(model, cross_entropy, *batch(0))
    return str(error.value)


def test_a_hook_that_would_see_one_use_is_refused(pool: Any) -> None:
    (message,) = pool.run(hooked, ranks=1)
    assert "1 hooks are on weight" in message
    assert "change .grad after wait()" in message


def unfrozen(ranks: int, zero: int, late: bool) -> Tensor:
    """The table's gradient in a second step. late: in the first step the table is frozen."""
    model = make("gpt", {"dp": ranks, "tp": 1}, zero=zero)
    table_of(model).requires_grad_(not late)
    for number in range(2):
        model.zero_grad()
        forward_backward(model, cross_entropy, *batch(number))
        table_of(model).requires_grad_(True)
    return to_global(table_of(model).grad)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_table_that_begins_to_learn_late_gets_the_gradients_of_both_uses(pool: Any, zero: int) -> None:
    (truth,) = pool.run(unfrozen, 1, 0, False, ranks=1)
    for found in pool.run(unfrozen, 2, zero, True, ranks=2):
        assert torch.equal(found, truth)


def three(pp: int) -> str:
    model: Any = make_model(replace(CONFIGS["llama"], tie_embeddings=False))
    for layer in model.layers[1:]:
        layer.mlp.up_proj.weight = model.layers[0].mlp.up_proj.weight
    plan = replace(model.parallel_plan(), exact={"dp": 2}, pipeline=PipelinePlan(microbatches=2))
    with pytest.raises(ValueError) as error:
        parallelize(model, ProcessMesh.grid(pp=pp, dp=1), plan)
    return str(error.value)


def test_a_parameter_of_several_layers_on_several_stages_is_refused(pool: Any) -> None:
    for message in pool.run(three, 2, ranks=2):
        assert "layers.0.mlp.up_proj.weight on the stages 0 and 0 and 1 and 1" in message
