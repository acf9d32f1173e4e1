"""The named runs of `weft train RECIPE`: tiny models for a test of a minute, and published models."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from ..config import MixtureConfig, ModelConfig
from ..data.byte_tokens import BYTE_VOCAB_SIZE
from ..gpt.config import GPTConfig
from ..llama.config import LlamaConfig
from ..mixtral.config import MixtralConfig
from ..published import PUBLISHED
from ..qwen.config import QwenConfig
from ..qwen_moe.config import QwenMoeConfig
from .config import DataConfig, OptimizerConfig, TrainConfig
from .model_class import parameters_of

# Near 1 / sqrt(hidden_size). At 0.02, which is meant for widths above 1000, the residual stream starts very small and
# every norm multiplies gradients by 50: gradients spike, and rounding errors grow to percents of the loss within 40
# steps.
_INITIALIZER_RANGE = 0.06

_SIZES: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB_SIZE,
    "hidden_size": 128,
    "num_layers": 4,
    "num_heads": 8,
    "max_seq_len": 256,
    "initializer_range": _INITIALIZER_RANGE,
}
_GATED: dict[str, Any] = {**_SIZES, "intermediate_size": 384, "num_kv_heads": 4}

# At lr 4e-3 and beta2 0.95 the gradient's norm, otherwise below 3, jumps to 6 at single steps; also for Qwen 2, whose
# keys have no norm.
_LLAMA = OptimizerConfig(lr=3e-3, beta2=0.98)

# Runs of about a minute. Their losses are the same on every mesh.
TINY = {
    "llama-tiny": TrainConfig(model=LlamaConfig(**_GATED), optimizer=_LLAMA),
    # With 20 steps of warmup the gradient's norm jumps to 3.6 at single steps later in the run.
    "llama-tiny-tied": TrainConfig(
        model=LlamaConfig(**_GATED, tie_embeddings=True), optimizer=replace(_LLAMA, warmup_steps=40)
    ),
    "qwen2-tiny": TrainConfig(model=QwenConfig(version=2, **_GATED), optimizer=_LLAMA),
    "qwen3-tiny": TrainConfig(model=QwenConfig(version=3, **_GATED)),
    # 1 % fewer operations a token than qwen3-tiny: 2 experts of 188 and 8 rows of the router have 145,408 elements, the
    # MLP of 384 has 147,456. With more experts, each learns from fewer tokens: the loss on held-out text, after 200
    # steps, was 1.97 with 6 experts, 1.98 with 12, and 2.03 with 24.
    "qwen3-moe-tiny": TrainConfig(
        model=QwenMoeConfig(
            **_GATED, moe_intermediate_size=188, num_experts=8, experts_per_token=2, router_aux_loss_coef=0.005
        )
    ),
    "mixtral-tiny": TrainConfig(
        model=MixtralConfig(**{**_GATED, "intermediate_size": 192}, router_aux_loss_coef=0.01), optimizer=_LLAMA
    ),
    # With lr 4e-3 and 20 steps of warmup, the gradient's norm jumped to 4.3 right after the warmup for one of two
    # orders of the samples. With the values below, the norm stays low for both orders.
    "gpt-tiny": TrainConfig(model=GPTConfig(**_SIZES), optimizer=OptimizerConfig(lr=3e-3, warmup_steps=40)),
}

# Peak learning rates. Llama 2: table 1 and section 2.2 of Touvron et al. 2023; Llama 3: table 3 of Grattafiori et al.
# 2024.
_RATES = {"llama2-7b": 3e-4, "llama2-70b": 1.5e-4, "llama3-8b": 3e-4, "llama3-70b": 1.5e-4, "llama3.1-405b": 8e-5}
_LONGEST = 8192  # tokens per sequence; the published models saw longer ones only at the end of training


def _published(name: str, model: ModelConfig) -> TrainConfig:
    """The recipe of a published model: bfloat16, and the published peak learning rate or 3e-4."""
    return TrainConfig(
        model=model,
        dtype="bfloat16",
        data=DataConfig(sequence_length=min(model.max_seq_len, _LONGEST)),
        optimizer=OptimizerConfig(lr=_RATES.get(name, 3e-4)),
    )


RECIPES = {**TINY, **{name: _published(name, model) for name, model in PUBLISHED.items()}}

# The base of runs without a recipe. `base_configuration` in cli/settings.py replaces the model by that of --from or
# --model and, for --model without --from, the optimizer by the default one. The learning rate here is meant for
# trained weights: from fine-tuning Llama 2, section 3.1 of Touvron et al. 2023.
WITHOUT_RECIPE = TrainConfig(model=TINY["llama-tiny"].model, optimizer=OptimizerConfig(lr=2e-5))


def recipe(name: str) -> TrainConfig:
    """The recipe called `name`. Raises ValueError for an unknown name, with the names of all recipes."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"unknown recipe {name!r}; {hint}the recipes are {', '.join(RECIPES)}")
    return RECIPES[name]


def size_in_words(model: ModelConfig, name: str | None = None) -> str:
    """The model's kind, number of parameters and number of layers, for people.

    name: MODULE:CLASS for a model class of the user; None for a model of Weft.
    """
    title = model.title if name is None else name.partition(":")[2]
    tied = ", one table for embedding and output" if model.tie_embeddings else ""
    count, _ = parameters_of(model, name)
    active = ""
    if isinstance(model, MixtureConfig):
        active = f" ({_in_millions(model.num_active_parameters)} active)"
    layers = f"{model.num_layers} layer{'s' if model.num_layers > 1 else ''}"
    return f"{title}, {_in_millions(count)} parameters{active}, {layers}{tied}"


def _in_millions(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"
