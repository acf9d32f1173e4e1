"""Models in 16 bits: autocast, bfloat16 parameters with float32 gradients, and float16 with a scaler."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import Llama, parallelize
from weft.models.llama.weights import stored
from weft.reshard import GradientSync, distribute, reshard

from tests.models.cases import SMALL, make, some_tokens, theirs, whole

LOWER = pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
CONFIG = replace(SMALL, attention_bias=True)
TOKENS = some_tokens(SMALL, 4, 9)
Found = dict[str, Tensor]


def torch_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def laid_out(dp: int, tp: int, model: Llama, **plan: Any) -> tuple[Llama, Tensor, Tensor]:
    """The model on a mesh, its tokens and its targets."""
    tokens, target = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
    if dp * tp == 1:
        return model, tokens, target
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    rows = Layout(mesh, {"dp": Shard(0)})
    return model, distribute(tokens, rows), distribute(target, rows)


def found(model: torch.nn.Module, loss: Tensor) -> Found:
    return {"loss": whole(loss)} | {
        name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def under_autocast(dp: int, tp: int, lower: torch.dtype, fused: bool, plan: dict[str, bool]) -> Found:
    """fused: whether the loss takes the hidden states and the head's weight."""
    model, tokens, target = laid_out(dp, tp, make(CONFIG), **plan)
    sync = GradientSync(model)
    with torch.autocast("cpu", dtype=lower):
        if fused:
            head, model.lm_head = model.lm_head, torch.nn.Identity()
            hidden = model(tokens)
            if isinstance(hidden, DTensor):  # where the head is column-parallel
                hidden = reshard(hidden, placements={"dp": Shard(0)})
            loss = linear_cross_entropy(hidden, head.weight, target)
            model.lm_head = head
        else:
            loss = cross_entropy(model(tokens), target)
    loss = reshard(loss) if isinstance(loss, DTensor) else loss
    loss.backward()
    sync.wait()
    return found(model, loss)


@functools.cache
def of_transformers(lower: torch.dtype | None) -> Found:
    """Loss and gradients of transformers' model, by torch's ops: under autocast to `lower`, or in float64."""
    model = make(CONFIG)
    other = theirs(model)
    if lower is None:
        other = other.double()
    with torch.autocast("cpu", dtype=lower or torch.bfloat16, enabled=lower is not None):
        loss = torch_loss(other(TOKENS).logits)
    loss.backward()
    gradients = dict(other.named_parameters())
    return {"loss": loss.detach()} | {name: gradients[stored(name).name].grad for name, _ in model.named_parameters()}


def error(found: Found, truth: Found) -> float:
    """The norm of the error over all gradients together: the error of a single small gradient is chance."""
    return float(torch.stack([(found[name] - true).norm() for name, true in truth.items() if name != "loss"]).norm())


def compare(ours: Found, lower: torch.dtype) -> None:
    truth, eager = of_transformers(None), of_transformers(lower)
    assert {name: each.dtype for name, each in ours.items()} == dict.fromkeys(truth, torch.float32)
    assert float(ours["loss"]) == pytest.approx(float(truth["loss"]), rel=torch.finfo(lower).eps / 2)
    assert error(ours, truth) <= 1.5 * error(eager, truth)


FUSED = pytest.mark.parametrize("fused", [False, True], ids=["logits", "fused"])


@LOWER
@FUSED
def test_a_model_under_autocast(lower: torch.dtype, fused: bool) -> None:
    compare(under_autocast(1, 1, lower, fused, {}), lower)


@LOWER
@FUSED
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sequence"])
def test_a_parallel_model_under_autocast(pool: Any, lower: torch.dtype, fused: bool, sequence: bool) -> None:
    for ours in pool.run(under_autocast, 2, 2, lower, fused, {"sequence": sequence}, ranks=4):
        compare(ours, lower)


def sixteen_bit(dp: int, tp: int, dtype: torch.dtype, scale: float) -> Found:
    """Parameters in 16 bits whose gradients are float32, unscaled by hand."""
    model, tokens, target = laid_out(dp, tp, make(CONFIG).to(dtype))
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    sync = GradientSync(model)
    loss = cross_entropy(model(tokens), target)
    loss = reshard(loss) if isinstance(loss, DTensor) else loss
    (loss * scale).backward()
    sync.wait()
    made = found(model, loss)
    return {name: each if name == "loss" else each / scale for name, each in made.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1024.0)], ids=["bf16", "fp16-scaled"]
)
def test_parameters_in_16_bits_get_gradients_in_float32(pool: Any, dtype: torch.dtype, scale: float) -> None:
    truth, alone = of_transformers(None), sixteen_bit(1, 1, dtype, scale)
    for ours in pool.run(sixteen_bit, 2, 2, dtype, scale, ranks=4):
        assert {name: each.dtype for name, each in ours.items()} == dict.fromkeys(truth, torch.float32)
        assert error(ours, truth) <= 1.5 * error(alone, truth)


def with_masters(dp: int, tp: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Steps with parameters in `dtype`, rounded after each step from float32 masters."""
    model, tokens, target = laid_out(dp, tp, make(CONFIG))
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(dtype)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    sync, optimizer = GradientSync(model), torch.optim.AdamW(masters, lr=1e-4, fused=True)
    losses = []
    for _ in range(3):
        loss = cross_entropy(model(tokens), target)
        loss = reshard(loss) if isinstance(loss, DTensor) else loss
        loss.backward()
        sync.wait()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(float(whole(loss)))
    return losses, {name: whole(each) for (name, _), each in zip(model.named_parameters(), masters, strict=True)}


@pytest.mark.exhaustive
def test_float32_masters_of_bf16_parameters_move_alike_on_a_mesh(pool: Any) -> None:
    _, truth = with_masters(1, 1, torch.float32)
    losses, masters = with_masters(1, 1, torch.bfloat16)
    assert losses[-1] < losses[0] - 0.01
    for found_losses, found_masters in pool.run(with_masters, 2, 2, torch.bfloat16, ranks=4):
        assert found_losses == pytest.approx(losses, rel=torch.finfo(torch.bfloat16).eps / 4)
        assert {name: each.dtype for name, each in found_masters.items()} == dict.fromkeys(masters, torch.float32)
        assert error(found_masters, truth) <= 1.5 * error(masters, truth)


def steps_in(dtype: torch.dtype, dp: int, tp: int, asked: torch.dtype | None) -> list[float]:
    """Losses of five steps, with a scaler in float16. asked: the gradients' dtype; None for the parameters' own."""
    model, tokens, target = laid_out(dp, tp, make(CONFIG).to(dtype))
    for parameter in model.parameters():
        parameter.grad_dtype = asked or dtype
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    sync, optimizer = GradientSync(model), torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = cross_entropy(model(tokens), target)
        loss = reshard(loss) if isinstance(loss, DTensor) else loss
        scaler.scale(loss).backward()
        sync.wait()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(whole(loss)))
    return losses


@pytest.mark.exhaustive
def test_a_model_in_float16_with_a_scaler_trains_as_one_in_float32(pool: Any) -> None:
    truth = steps_in(torch.float32, 1, 1, None)
    assert truth[-1] < truth[0] - 0.1
    near = pytest.approx(truth, rel=2 * torch.finfo(torch.float16).eps)
    assert steps_in(torch.float16, 1, 1, torch.float32) == near
    for losses in pool.run(steps_in, torch.float16, 2, 2, torch.float32, ranks=4):
        assert losses == near
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        steps_in(torch.float16, 1, 1, None)


def scaled_steps(frozen: bool) -> list[tuple[float, float]]:
    """Two float16 steps, the first with an inf in one shard: the scale after each, and how far parameters moved."""
    model, tokens, target = laid_out(2, 2, make(CONFIG).half())
    model.embed_tokens.requires_grad_(not frozen)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    sync, scaler = GradientSync(model), ShardedGradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    steps = []
    for step in range(2):
        before = [whole(parameter) for parameter in model.parameters()]
        scaler.scale(reshard(cross_entropy(model(tokens), target))).backward()
        sync.wait()
        if step == 0 and torch.distributed.get_rank() % 2:  # the ranks with one half of the weight
            model.layers[0].mlp.up_proj.weight.grad.to_local()[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = [float((whole(after) - was).norm()) for after, was in zip(model.parameters(), before, strict=True)]
        steps.append((scaler.get_scale(), sum(moved)))
    return steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen-embedding"])
def test_a_scaler_skips_a_step_on_all_ranks_where_one_shard_has_an_inf(pool: Any, frozen: bool) -> None:
    every = pool.run(scaled_steps, frozen, ranks=4)
    for steps in every:
        assert steps == every[0]
        assert steps[0] == (512.0, 0.0)
        assert steps[1][0] == 512.0 and steps[1][1] > 0
