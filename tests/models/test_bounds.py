"""Config numbers that would break a run's training are refused; a clip_norm of 0 clips nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import GPT, GPTConfig, Llama, LlamaConfig, clip_gradients, forward_backward, initialize, parallelize
from weft.models.train.config import (
    OPTIMIZERS,
    DataConfig,
    MeshConfig,
    MuonConfig,
    OptimizerConfig,
    PlanConfig,
    TrainConfig,
)
from weft.models.train.optimizer import make_optimizer
from weft.models.train.task_config import LoRAConfig

from tests.support.pool import Pool

SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
LLAMA = LlamaConfig(**SMALL, intermediate_size=24)
TOKENS = torch.arange(22).reshape(2, 11) % 61


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    forward_backward(model, cross_entropy, TOKENS[:, :-1], TOKENS[:, 1:])
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("limit", [0, 0.0, -0.0, math.inf])
@pytest.mark.parametrize(
    "model", [pytest.param(LLAMA, id="llama"), pytest.param(GPTConfig(**SMALL, max_seq_len=16), id="gpt")]
)
def test_a_limit_of_0_leaves_the_gradients_and_gives_their_norm(model: Any, limit: float) -> None:
    made = (Llama if isinstance(model, LlamaConfig) else GPT)(model)
    initialize(made, 0)
    before = gradients(made)
    norm = clip_gradients(made, OptimizerConfig(clip_norm=limit).clip_norm)
    assert norm.item() == pytest.approx(math.sqrt(sum(each.double().square().sum().item() for each in before.values())))
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name]), name
        assert parameter.grad.abs().max() > 0, name


def norms(limit: float) -> tuple[float, float]:
    """Before and after clipping, on a mesh."""
    model = Llama(LLAMA)
    initialize(model, 0)
    parallelize(model, ProcessMesh.grid(dp=1, tp=2))
    forward_backward(model, cross_entropy, TOKENS[:, :-1], TOKENS[:, 1:])
    return clip_gradients(model, limit).item(), clip_gradients(model, math.inf).item()


@pytest.mark.parametrize(
    ("limit", "share"), [pytest.param(0.0, 1.0, id="none"), pytest.param(1e-3, None, id="clipped")]
)
def test_a_limit_on_a_mesh(limit: float, share: float | None, pool: Pool) -> None:
    for before, after in pool.run(norms, limit, ranks=2):
        assert after == pytest.approx(before * share if share else limit, rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_accepted_edge_trains(name: str) -> None:
    """The least that each bound lets through still moves every weight."""
    model = Llama(LLAMA)
    initialize(model, 0)
    before = {key: each.detach().clone() for key, each in model.named_parameters()}
    config = OptimizerConfig(name=name, lr=0.5, beta1=0.0, beta2=0.0, clip_norm=0, weight_decay=0)
    gradients(model)
    clip_gradients(model, config.clip_norm)
    make_optimizer(model, config).step()
    assert all(not torch.equal(each, before[key]) for key, each in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        pytest.param(OptimizerConfig, {"lr": 0}, "optimizer.lr is 0; it must be above 0", id="rate-0"),
        pytest.param(OptimizerConfig, {"lr": -1e-3}, "optimizer.lr is -0.001; it must be above 0", id="rate-below-0"),
        pytest.param(OptimizerConfig, {"lr": math.nan}, "optimizer.lr is nan; it must be above 0", id="rate-nan"),
        pytest.param(OptimizerConfig, {"lr": math.inf}, "optimizer.lr is inf; it must be above 0", id="rate-inf"),
        pytest.param(
            OptimizerConfig, {"beta1": 1.0}, "optimizer.beta1 is 1.0; it must be 0 or more, and below 1", id="beta1"
        ),
        pytest.param(
            OptimizerConfig, {"beta2": 1}, "optimizer.beta2 is 1; it must be 0 or more, and below 1", id="beta2"
        ),
        pytest.param(
            OptimizerConfig, {"beta2": -0.1}, "optimizer.beta2 is -0.1; it must be 0 or more", id="beta2-below-0"
        ),
        pytest.param(
            OptimizerConfig, {"clip_norm": -1}, "optimizer.clip_norm is -1; it must be 0 or more", id="clip-below-0"
        ),
        pytest.param(OptimizerConfig, {"clip_norm": math.nan}, "optimizer.clip_norm is nan; it must", id="clip-nan"),
        pytest.param(
            OptimizerConfig, {"weight_decay": math.inf}, "optimizer.weight_decay is inf; it must", id="decay-inf"
        ),
        pytest.param(
            OptimizerConfig, {"final_share": math.nan}, "optimizer.final_share is nan; it must", id="share-nan"
        ),
        pytest.param(OptimizerConfig, {"warmup_steps": -1}, "optimizer.warmup_steps is -1; it must", id="warmup"),
        pytest.param(DataConfig, {"batch_size": 0}, "data.batch_size is 0; it must be 1 or more", id="batch"),
        pytest.param(
            DataConfig, {"sequence_length": 0}, "data.sequence_length is 0; it must be 1 or more", id="sequence"
        ),
        pytest.param(
            TrainConfig, {"model": LLAMA, "timeout": 0}, "train.timeout is 0; it must be above 0", id="timeout"
        ),
        pytest.param(
            TrainConfig, {"model": LLAMA, "timeout": math.inf}, "train.timeout is inf; it must", id="timeout-inf"
        ),
        pytest.param(TrainConfig, {"model": LLAMA, "steps": 0}, "train.steps is 0; it must be 1 or more", id="steps"),
    ],
)  # fmt: skip
def test_what_would_stop_the_training_is_refused(kind: type, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        kind(**options)
    assert said in str(refused.value)


NAN, INF = float("nan"), float("inf")
WRONG: dict[type, tuple[Any, ...]] = {
    int: ("2", True, 2.0, 1.5, NAN, INF, [2]), float: ("0.5", True, NAN, [0.5], 1j), bool: ("no", 1, 0.5, NAN, [], None)
}  # fmt: skip
OF_KINDS = [
    (OptimizerConfig, "optimizer", float, ("lr", "final_share", "weight_decay", "beta1", "beta2", "clip_norm")),
    (OptimizerConfig, "optimizer", int, ("warmup_steps", "decay_steps")),
    (MuonConfig, "optimizer.muon", float, ("momentum",)),
    (MuonConfig, "optimizer.muon", int, ("ns_steps",)),
    (MuonConfig, "optimizer.muon", bool, ("nesterov", "split_heads")),
    (DataConfig, "data", int, ("batch_size", "sequence_length")),
    (DataConfig, "data", bool, ("pack", "verify")),
    (MeshConfig, "mesh", int, ("pp", "dp", "cp", "tp", "ep")),
    (PlanConfig, "plan", int, ("microbatches", "zero")),
    (PlanConfig, "plan", bool, ("sequence", "experts_over_tp")),
    (LoRAConfig, "lora", float, ("alpha", "dropout")),
]


@pytest.mark.parametrize(
    ("config", "where", "kind", "names"), OF_KINDS, ids=[f"{where}-{kind.__name__}" for _, where, kind, _ in OF_KINDS]
)
def test_values_of_another_kind_are_refused(config: Any, where: str, kind: type, names: tuple[str, ...]) -> None:
    """Of configurations made in Python: on the command line and in a file, tyro makes the values."""
    for name in names:
        for value in WRONG[kind]:
            with pytest.raises(ValueError, match=rf"^{where}\.{name} is .*; it must be "):
                config(**{name: value})
