"""The sizes of published models: as many parameters as their authors' files have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from weft.models.config import MixtureConfig
from weft.models.published import PUBLISHED
from weft.models.train.measure import flops_per_token
from weft.models.train.recipes import RECIPES

# huggingface.co's parameter counts of each model's safetensors, with a tied table counted once.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
ACTIVE = {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9}  # as their authors say


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_were_published(name: str) -> None:
    assert PUBLISHED[name].num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_as_many_active_parameters_as_were_published(name: str) -> None:
    model = PUBLISHED[name]
    assert isinstance(model, MixtureConfig)
    assert model.num_active_parameters == pytest.approx(ACTIVE[name], rel=0.02)


def test_tiny_models_with_and_without_experts_take_as_many_operations_a_token() -> None:
    dense, mixture = RECIPES["qwen3-tiny"], RECIPES["qwen3-moe-tiny"]
    assert isinstance(mixture.model, MixtureConfig)
    assert 0.98 <= flops_per_token(mixture.model, 128) / flops_per_token(dense.model, 128) <= 1
    assert replace(mixture, model=dense.model) == dense, "the same data, steps and optimizer"
