"""Every family on a mesh: one process's loss and gradients, and the plan's collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard, derive_key
from weft.models import (
    DynamicRopeScaling,
    GPTConfig,
    LlamaConfig,
    QwenConfig,
    YarnRopeScaling,
    from_pretrained,
    initialize,
    parallelize,
    save_pretrained,
)
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, distribute, reshard

from tests.models.cases import whole

SIZES: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 32}
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_kv_heads": 4}
CONFIGS = {
    "llama-yarn-biases": LlamaConfig(
        **GATED,
        attention_bias=True,
        mlp_bias=True,
        rope_scaling=YarnRopeScaling(factor=4.0, original_max_seq_len=8),
    ),
    "mistral-window": LlamaConfig(**GATED, head_dim=12, sliding_window=3),
    "qwen2-window": QwenConfig(**GATED, version=2, sliding_window=3, sliding_layers=(1,), tie_embeddings=True),
    "qwen3": QwenConfig(**GATED, head_dim=12),
    "qwen3-biases-window": QwenConfig(**GATED, attention_bias=True, sliding_window=4, sliding_layers=(0,)),
    "gpt": GPTConfig(**SIZES, scale_attention_by_layer=True),
    "gpt-untied": GPTConfig(**SIZES, tie_embeddings=False, activation="gelu"),
}
DROPOUT = {"dropout": 0.2, "attention_dropout": 0.1}
KEY = derive_key(3, "dropout", 0)
MESHES = [
    pytest.param(1, 2, id="1x2"),
    pytest.param(2, 2, id="2x2"),
    pytest.param(4, 1, id="4x1", marks=pytest.mark.exhaustive),
    pytest.param(1, 4, id="1x4", marks=pytest.mark.exhaustive),
]
PLANS = [
    pytest.param({}, {}, id="tensor"),
    pytest.param({"sequence": True}, {}, id="sequence"),
    pytest.param({"sequence": True}, DROPOUT, id="sequence-dropout"),
]


def make(config: ModelConfig) -> Any:
    """A model whose biases and norms are random too."""
    model = make_model(config)
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch(rows: int = 5, length: int = 9) -> tuple[Tensor, Tensor]:
    """Tokens and targets [rows, length]: rows and length are uneven on purpose."""
    tokens = torch.randint(0, 31, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def stepped(model: nn.Module, tokens: Tensor, target: Tensor, **given: Any) -> Tensor:
    """The loss after a backward."""
    loss = cross_entropy(model(tokens, dropout_key=KEY, **given), target, denominator=float(target.numel()))
    loss = reshard(loss) if isinstance(loss, DTensor) else loss
    loss.backward()
    return whole(loss)


def one_step(dp: int, tp: int, config: ModelConfig, plan: dict[str, bool]) -> dict[str, Any]:
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    model = make(config)
    parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    sync = GradientSync(model)
    with CollectiveCount() as count:
        loss = stepped(model, *(distribute(part, Layout(mesh, {"dp": Shard(0)})) for part in batch()))
        issued = count.take()
        sync.wait()
    return {"loss": loss, "issued": issued, "gradients": {n: whole(p.grad) for n, p in model.named_parameters()}}


def check_same(found: dict[str, Tensor], model: nn.Module) -> None:
    """Each gradient is the model's, within 1e-5 of its largest element."""
    for name, parameter in model.named_parameters():
        wanted = parameter.grad
        assert wanted is not None, name
        assert (found[name] - wanted).abs().max() <= 1e-5 * wanted.abs().max() + 1e-7, name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("plan", "change"), PLANS)
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_loss_gradients_and_collectives(
    dp: int, tp: int, plan: dict[str, bool], change: dict[str, float], name: str, pool: Any
) -> None:
    config = replace(CONFIGS[name], **change)
    alone = make(config)
    loss = stepped(alone, *batch())
    blocks = 2 * config.num_layers
    reduced = "reduce-scatter" if plan else "all-reduce"
    wanted = Counter({reduced: 2 * blocks + 2}) if tp > 1 else Counter()  # embedding and head, each one way
    wanted["all-gather"] += 1 + (2 * blocks + 2) * bool(plan) if tp > 1 else 0  # the loss's statistics
    wanted["all-reduce"] += dp > 1
    for found in pool.run(one_step, dp, tp, config, plan, ranks=dp * tp):
        torch.testing.assert_close(found["loss"], loss, rtol=1e-6, atol=0)
        check_same(found["gradients"], alone)
        assert found["issued"] == +wanted


def packed(config: ModelConfig, plan: dict[str, bool]) -> dict[str, Any]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = make(config)
    parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    sync = GradientSync(model)
    tokens, target, positions, documents = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in packed_batch())
    loss = stepped(model, tokens, target, positions=positions, documents=documents)
    sync.wait()
    return {"loss": loss, "gradients": {n: whole(p.grad) for n, p in model.named_parameters()}}


def packed_batch() -> tuple[Tensor, ...]:
    """Rows of two documents each, cut in another place: so the highest position is on some ranks alone."""
    tokens, target = batch()
    rows, length = tokens.shape
    cut = torch.arange(1, rows + 1).unsqueeze(1)
    places = torch.arange(length).expand(rows, -1)
    documents = (places >= cut).long()
    return tokens, target, places - cut * documents, documents


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", [{}, {"sequence": True}], ids=["tensor", "sequence"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIGS["gpt"], id="gpt"),
        pytest.param(
            replace(CONFIGS["qwen3"], rope_scaling=DynamicRopeScaling(factor=4.0), max_seq_len=4), id="dynamic"
        ),
    ],
)
def test_positions_and_documents_from_outside(config: ModelConfig, plan: dict[str, bool], pool: Any) -> None:
    tokens, target, positions, documents = packed_batch()
    alone = make(config)
    loss = stepped(alone, tokens, target, positions=positions, documents=documents)
    for found in pool.run(packed, config, plan, ranks=4):
        torch.testing.assert_close(found["loss"], loss, rtol=1e-6, atol=0)
        check_same(found["gradients"], alone)


def saved_and_read(folder: str, config: ModelConfig) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = make(config)
    parallelize(model, mesh)
    save_pretrained(model, f"{folder}/model", shard_bytes=10_000)
    again = from_pretrained(f"{folder}/model", ProcessMesh.grid(dp=1, tp=4))
    assert again.config == config
    return {name: whole(parameter) for name, parameter in again.named_parameters()}


@pytest.mark.parametrize("name", ["mistral-window", "qwen3", "gpt", "gpt-untied"])
def test_a_parallel_model_is_saved_and_read_on_another_mesh(name: str, pool: Any, tmp_path: Any) -> None:
    wanted = dict(make(CONFIGS[name]).named_parameters())
    for found in pool.run(saved_and_read, str(tmp_path), CONFIGS[name], ranks=4):
        assert found.keys() == wanted.keys()
        for parameter, value in found.items():
            assert torch.equal(value, wanted[parameter]), parameter
