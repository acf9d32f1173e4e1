"""Qwen's config, and the table of families; against transformers the options stand in test_families.py."""

import dataclasses

import pytest
import torch
import weft.models
from weft.models import DynamicRopeScaling, LinearRopeScaling, QwenConfig, YarnRopeScaling
from weft.models.config import ModelConfig
from weft.models.families import FAMILIES, family_of, make_model

SMALL = QwenConfig(vocab_size=61, hidden_size=32, intermediate_size=44, num_layers=3, num_heads=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "QwenConfig: version is 1; it must be one of 2, 3"),
        (
            {"version": 2, "attention_bias": True},
            "attention_bias is an option of version 3; version 2 has biases for q, k",
        ),
        ({"sliding_window": -1}, "sliding_window is -1; it must be an int >= 1"),
        ({"sliding_window": 4}, r"sliding_window is 4 and sliding_layers \(\); give both, or neither"),
        ({"sliding_layers": (1,)}, r"sliding_window is 0 and sliding_layers \(1,\); give both"),
        (
            {"sliding_window": 4, "sliding_layers": (1, 3)},
            r"sliding_layers is \(1, 3\); give each layer once, in order, of 0 to 2",
        ),
        ({"sliding_window": 4, "sliding_layers": (1, 0)}, "give each layer once, in order"),
        ({"num_kv_heads": 3}, "QwenConfig: num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 2, "rope_scaling": DynamicRopeScaling(factor=2.0)}, "head_dim 2 is too small for dynamic rope"),
        (
            {"rope_scaling": "yarn"},
            "rope_scaling is 'yarn'; give a Llama3RopeScaling or another scaling of weft.models, or None",
        ),
    ],
    ids=str,
)
def test_config_names_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (LinearRopeScaling, {"factor": 0}, "LinearRopeScaling: factor is 0"),
        (DynamicRopeScaling, {"factor": 0.5}, "DynamicRopeScaling: factor is 0.5; it must be >= 1"),
        (YarnRopeScaling, {"factor": 2, "original_max_seq_len": 0}, "original_max_seq_len is 0"),
        (YarnRopeScaling, {"factor": 2, "original_max_seq_len": 8, "beta_fast": 0.5}, "beta_fast 0.5 must be at least"),
        (YarnRopeScaling, {"factor": 2, "original_max_seq_len": 8, "attention_factor": 0}, "attention_factor is 0"),
    ],
)
def test_rope_scaling_names_what_does_not_fit(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_the_table_is_what_the_package_exports():
    for family in FAMILIES.values():
        for name in (family.model, f"{family.model}Config"):
            assert name in weft.models.__all__
        assert getattr(weft.models, family.model) is family.model_class
        assert getattr(weft.models, f"{family.model}Config") is family.config_class


def test_a_model_is_made_of_its_config_and_known_again():
    with torch.device("meta"):
        model = make_model(SMALL)
    assert isinstance(model, weft.models.Qwen)
    assert model.config is SMALL
    assert family_of(model) is FAMILIES["qwen3"]
    assert family_of(torch.nn.Linear(1, 1)) is None
    other = ModelConfig(vocab_size=1, hidden_size=1, num_layers=1, num_heads=1)
    with pytest.raises(
        ValueError,
        match="a ModelConfig is the config of no model; give one of LlamaConfig, MixtralConfig, QwenConfig, ",
    ):
        make_model(other)
