"""Models cut into stages: the loss and every gradient of one process, under every schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    ParallelPlan,
    PipelinePlan,
    Qwen,
    QwenConfig,
    forward_backward,
    initialize,
    parallelize,
)
from weft.models.parallel.parallelize import pipeline_of

from tests.models.cases import whole

SIZES = {"vocab_size": 31, "hidden_size": 32, "num_layers": 6, "num_heads": 4, "max_seq_len": 32}
GATED = {"intermediate_size": 48, "num_kv_heads": 4}
MODELS = {
    "llama": lambda: Llama(LlamaConfig(**SIZES, **GATED)),
    "tied": lambda: Llama(LlamaConfig(**SIZES, **GATED, tie_embeddings=True)),
    "dropout": lambda: Llama(LlamaConfig(**SIZES, **GATED, dropout=0.2, attention_dropout=0.1)),
    "qwen": lambda: Qwen(QwenConfig(**SIZES, **GATED)),
    "gpt": lambda: GPT(GPTConfig(**SIZES)),
}
KEY = 77
ROWS, MICROBATCHES = 8, 4


def make(name: str) -> nn.Module:
    model = MODELS[name]()
    initialize(model, seed=3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets, of which some do not count, more in some microbatches than in others."""
    tokens = torch.randint(0, 31, (ROWS, 10), generator=torch.Generator().manual_seed(0))
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    targets[0, 1:] = targets[5, :3] = -100
    return tokens, targets


def one_step(axes: dict[str, int], name: str, plan: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Any]:
    """What this rank has after a step: the loss, its own gradients, whole, its bytes and its pipeline's numbers."""
    mesh = ProcessMesh.grid(**axes)
    model = make(name)
    own = replace(model.parallel_plan(), **plan, pipeline=PipelinePlan(microbatches=MICROBATCHES, **pipeline))
    parallelize(model, mesh, own)
    tokens, targets = batch()
    loss = forward_backward(model, cross_entropy, tokens, targets, dropout_key=KEY if name == "dropout" else None)
    ran = pipeline_of(model)
    return {
        "loss": loss.item(),
        "gradients": {name: whole(p.grad) for name, p in model.named_parameters()},
        "bytes": sum(_local(p).nbytes for p in model.parameters()),
        "in_flight": ran.in_flight,
        "ran": ran.ran,
        "planned": ran.schedule.actions[mesh.coordinate(torch.distributed.get_rank())["pp"]],
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expected(name: str, microbatches: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process; with dropout of one that takes the same microbatches, else of the whole batch."""
    model = make(name)
    tokens, targets = batch()
    if name == "dropout":
        loss = forward_backward(
            model, cross_entropy, tokens, targets, microbatches=microbatches, dropout_key=KEY
        )
    else:
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


SCHEDULES = [
    pytest.param({"schedule": "gpipe"}, id="gpipe"),
    pytest.param({}, id="1f1b"),
    pytest.param({"schedule": "interleaved"}, id="interleaved"),
    pytest.param({"schedule": "zero_bubble"}, id="zero-bubble"),
]
MESHES = [
    pytest.param({"pp": 2}, {}, id="pp2"),
    pytest.param({"pp": 3}, {}, id="pp3"),
    pytest.param({"pp": 2, "dp": 2}, {}, id="pp2-dp2"),
    pytest.param({"dp": 2, "pp": 2}, {}, id="dp2-pp2"),
    pytest.param({"pp": 2, "tp": 2}, {}, id="pp2-tp2"),
    pytest.param({"pp": 2, "tp": 2}, {"sequence": True}, id="pp2-tp2-sequence"),
    pytest.param({"pp": 2, "cp": 2}, {"context": "all_gather"}, id="pp2-cp2"),
    pytest.param({"pp": 2, "dp": 2, "tp": 2}, {"sequence": True}, id="pp2-dp2-tp2"),
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pipeline", SCHEDULES)
@pytest.mark.parametrize(("axes", "plan"), MESHES)
def test_loss_and_gradients_are_those_of_one_process(
    axes: dict[str, int], plan: dict[str, Any], pipeline: dict[str, Any], name: str, pool
) -> None:
    loss, gradients = expected(name, MICROBATCHES)
    ranks = torch.Size(axes.values()).numel()
    seen: set[str] = set()
    for found in pool.run(one_step, axes, name, plan, pipeline, ranks=ranks):
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert tuple(found["ran"]) == found["planned"]
        for each, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, gradients[each], rtol=1e-4, atol=1e-6, msg=each)
        seen |= found["gradients"].keys()
    assert seen == gradients.keys()
