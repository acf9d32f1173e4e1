"""Mistral: a Llama with a sliding window in every layer; its folders, and its window on a mesh."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.models import LlamaConfig, from_pretrained, initialize, load_checkpoint, save_checkpoint, save_pretrained
from weft.models.checkpoint.configs import config_of
from weft.models.families import make_model

from tests.models.folders import check_agreement
from tests.models.test_context import CONFIG, MESHES, batch, check
from tests.support.pool import Pool

SMALL = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=44, num_layers=2, num_heads=4, num_kv_heads=2)
WINDOWED = replace(SMALL, sliding_window=4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sliding_window": 5}, id="window"),
        pytest.param({"sliding_window": 5, "head_dim": 12, "num_key_value_heads": 1}, id="window-wide-heads"),
        pytest.param({"sliding_window": 64}, id="window-above-the-row"),
        pytest.param({"sliding_window": None}, id="no-window"),
        pytest.param({"sliding_window": None, "head_dim": 12, "num_key_value_heads": 4}, id="no-window-wide-heads"),
        pytest.param({"head_dim": None, "tie_word_embeddings": True}, id="window-of-4096-tied"),
    ],
)
def test_logits_and_gradients_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    check_agreement("mistral", (), tmp_path, **options)


def written(config: Any, folder: Path) -> dict[str, Any]:
    """config.json of a folder with a model of the config."""
    model = make_model(config)
    initialize(model, 0)
    save_pretrained(model, folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        pytest.param(SMALL, "llama", id="no-window"),
        pytest.param(WINDOWED, "mistral", id="window"),
        pytest.param(replace(SMALL, mistral=True), "mistral", id="mistral-without-window"),
        pytest.param(replace(WINDOWED, sliding_window=0), "mistral", id="window-turned-off"),
        pytest.param(replace(WINDOWED, sliding_window=0, mistral=False), "llama", id="made-a-llama"),
    ],
)
def test_the_folder_has_the_model_type_of_the_config(config: LlamaConfig, kind: str, tmp_path: Path) -> None:
    found = written(config, tmp_path / "first")
    assert found["model_type"] == kind
    assert found["architectures"] == [f"{kind.capitalize()}ForCausalLM"]
    assert found.get("sliding_window", "none") == (config.sliding_window or None if kind == "mistral" else "none")
    model: Any = from_pretrained(tmp_path / "first")
    assert model.config == config == config_of(tmp_path / "first")
    save_pretrained(model, tmp_path / "second")
    assert json.loads((tmp_path / "second/config.json").read_text()) == found


def test_weights_fit_a_llama_of_the_same_function_alone(tmp_path: Path) -> None:
    """The model_type is no difference; the window is one."""
    model = make_model(replace(SMALL, mistral=True))
    initialize(model, 0)
    save_checkpoint(model, tmp_path / "saved")
    load_checkpoint(make_model(SMALL).to_empty(device="cpu"), tmp_path / "saved")
    with pytest.raises(ValueError, match="sliding_window is 0 in the folder, and 4 here"):
        load_checkpoint(make_model(WINDOWED), tmp_path / "saved")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": -1}, "LlamaConfig: sliding_window is -1; it must be an int >= 1"),
        ({"sliding_window": 1.5}, "sliding_window is 1.5"),
        (
            {"sliding_window": 4, "mlp_bias": True},
            "LlamaConfig: mlp_bias is True with sliding_window 4 and mistral True, and a Mistral has no biases; leave "
            "out mlp_bias, or both of sliding_window and mistral",
        ),
        ({"mistral": True, "attention_bias": True, "mlp_bias": True}, "leave out attention_bias and mlp_bias, or both"),
    ],
    ids=str,
)
def test_config_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "plan", "packed"),
    [
        pytest.param("cp2", {"context": "all_gather"}, False, id="cp2-gather"),
        pytest.param("cp2", {"context": "ulysses"}, True, id="cp2-ulysses-packed"),
        pytest.param("dp2-cp2", {"context": "all_gather", "zero": 3}, True, id="dp2-cp2-zero3-packed"),
        pytest.param("cp2-tp2", {"context": "all_gather", "sequence": True}, False, id="cp2-tp2-sequence"),
    ],
)
def test_a_window_of_every_layer_under_context_parallelism(
    mesh: str, plan: dict[str, Any], packed: bool, pool: Pool
) -> None:
    """The window of 5 ends within a rank's tokens and on another's."""
    check(pool, MESHES[mesh], replace(CONFIG, head_dim=6, sliding_window=5), plan, batch(19, packed))
