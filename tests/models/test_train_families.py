"""The line of `weft train` on step 1 holds for every family and kind of plan.

It has the prediction, and the check against one process.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models import GPTConfig, LlamaConfig, MixtralConfig, QwenConfig, QwenMoeConfig
from weft.models.config import ModelConfig
from weft.models.data.text import find_corpus
from weft.models.families import FAMILIES
from weft.models.train.config import DataConfig, PlanConfig, TrainConfig
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.support.pool import Pool

SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 24, "num_layers": 2, "num_heads": 8}
SHARED: dict[str, Any] = {**SIZES, "dropout": 0.1, "attention_dropout": 0.1}
EXPERTS: dict[str, Any] = {**SHARED, "num_kv_heads": 4, "num_experts": 4, "experts_per_token": 2}
MODELS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SHARED, num_kv_heads=4),
    "mistral": LlamaConfig(**SHARED, num_kv_heads=4, sliding_window=5),
    "mixtral": MixtralConfig(**EXPERTS, sliding_window=5),
    "qwen2": QwenConfig(**SHARED, num_kv_heads=4, version=2, sliding_window=5, sliding_layers=(1,)),
    "qwen3": QwenConfig(**SHARED, num_kv_heads=4, tie_embeddings=True),
    "qwen3_moe": QwenMoeConfig(**EXPERTS, moe_intermediate_size=16, mlp_only_layers=(0,)),
    "weft_moe": QwenMoeConfig(
        **EXPERTS,
        moe_intermediate_size=16,
        router_score="sigmoid",
        router_bias_rate=0.01,
        shared_expert_size=16,
        shared_expert_gate=True,
        router_z_loss_coef=0.01,
    ),
    "gpt2": GPTConfig(**SHARED),
}  # named as in the table of families
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tensor": ({"dp": 2, "tp": 2}, {}),
    "sequence-recomputed-zero2": ({"dp": 2, "tp": 2}, {"sequence": True, "recompute": "full", "zero": 2}),
    "context-sequence-zero3": (
        {"dp": 1, "cp": 2, "tp": 2},
        {"context": "all_gather", "sequence": True, "recompute": "selective", "zero": 3},
    ),
    "ulysses-sequence": ({"dp": 1, "cp": 2, "tp": 2}, {"context": "ulysses", "sequence": True}),
    "stages": ({"pp": 2, "dp": 2, "tp": 1}, {"schedule": "1f1b", "microbatches": 2, "split": "layers", "zero": 1}),
}
EACH = [  # tests of the trainer have Llama under these plans
    pytest.param(family, marks=pytest.mark.exhaustive if family in ("llama", "mistral") else ()) for family in FAMILIES
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("what is said beforehand, and what is done " * 20)
    return str(path)


def first_step(text: str, model: ModelConfig, axes: dict[str, int], plan: dict[str, Any]) -> list[str]:
    """The lines on step 1, from rank 0."""
    data = DataConfig(batch_size=4, sequence_length=8)
    config = TrainConfig(model=model, data=data, plan=PlanConfig(**plan))
    run = Run(recipe="small", config=config, corpus=find_corpus(Path(text)), folder=Path(text).parent, **axes)
    made, said = Trainer(run, torch.device("cpu")), list[str]()
    made.report.print_line = said.append  # type: ignore[method-assign]
    made.first_step()
    return said if made.rank == 0 else []


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", EACH)
def test_step_1_is_as_predicted_and_has_the_loss_of_one_process(family: str, plan: str, text: str, pool: Pool) -> None:
    axes, changes = PLANS[plan]
    said = pool.run(first_step, text, MODELS[family], axes, changes, ranks=math.prod(axes.values()))[0]
    phases = [line for line in said if line.endswith("as predicted")]
    assert len(phases) == 3
    assert not [line for line in phases if line.endswith("NOT as predicted")]
    (check,) = [line for line in said if line.startswith("check ")]
    assert " on one: within 1e-06, as float32 rounds" in check
