"""Hugging Face folders that cannot be read or written give an error, and leave nothing behind."""

import json
from unittest.mock import patch

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models.checkpoint import huggingface, tensors
from weft.models.checkpoint.huggingface import from_pretrained, save_pretrained

from tests.models.cases import SMALL, make
from tests.models.test_huggingface import change_tensors, their_folder


def change_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def no_index_map(folder):
    (folder / "model.safetensors").unlink()
    (folder / huggingface.INDEX_FILE).write_text("{}")


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    (folder / huggingface.INDEX_FILE).write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda f: f.rename(f.with_name("other")), "is not a folder; give one", id="no-folder"),
        pytest.param(lambda f: (f / "config.json").unlink(), "has no config.json; give a folder", id="no-config"),
        pytest.param(lambda f: (f / "config.json").write_text("{"), "is not JSON", id="config-not-json"),
        pytest.param(
            lambda f: (f / "config.json").write_text("[]"), "holds a list of 0, not an object", id="config-a-list"
        ),
        pytest.param(
            lambda f: change_config(f, model_type="bert"), "'bert' is not supported; use one of llama", id="type"
        ),
        pytest.param(lambda f: change_config(f, model_type=...), "model_type 'None'", id="no-type"),
        pytest.param(lambda f: change_config(f, hidden_size=...), "has no 'hidden_size'", id="no-hidden-size"),
        pytest.param(lambda f: change_config(f, hidden_act="gelu"), "hidden_act 'gelu' is not supported", id="act"),
        pytest.param(
            lambda f: change_config(f, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
            "rope type 'longrope' is not supported; use one of default, linear, dynamic, llama3, yarn",
            id="rope-type",
        ),
        pytest.param(
            lambda f: change_config(f, rope_scaling={"rope_type": "llama3", "factor": 2.0}),
            "has no low_freq_factor, high_freq_factor, original_max_position_embeddings",
            id="rope-incomplete",
        ),
        pytest.param(lambda f: change_config(f, partial_rotary_factor=0.5), "partial_rotary_factor 0.5", id="partial"),
        pytest.param(lambda f: change_config(f, quantization_config={"bits": 4}), "quantized", id="quantized"),
        pytest.param(lambda f: change_config(f, num_attention_heads=3), "num_heads 3 is not a multiple", id="heads"),
        pytest.param(
            lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor", id="no-weights"
        ),
        pytest.param(
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "not a safetensors file", id="corrupt"
        ),
        pytest.param(no_index_map, "has no weight_map", id="index-without-map"),
        pytest.param(missing_shard, "has no model-00001-of-00002.safetensors, which", id="missing-file"),
        pytest.param(
            lambda f: change_tensors(f, **{"model.norm.weight": None}), "lacks model.norm.weight;", id="missing-tensor"
        ),
        pytest.param(
            lambda f: change_config(f, num_hidden_layers=3),
            r"lacks model.layers.2.input_layernorm.weight, .* and 6 more tensors",
            id="missing-layer",
        ),
        pytest.param(
            lambda f: change_config(f, num_hidden_layers=1), "which config.json's model does not have", id="unexpected"
        ),
        pytest.param(
            lambda f: change_config(f, intermediate_size=45),
            r"mlp.gate_proj.weight has shape \(44, 32\), but config.json makes it \(45, 32\)",
            id="shape",
        ),
        pytest.param(
            lambda f: change_tensors(f, **{"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            "model.norm.weight is I8; save it as one of",
            id="dtype",
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_told_why(tmp_path, spoil, message):
    their_folder(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path / "model")


def test_more_ranks_than_heads_are_refused_before_a_weight_is_read(tmp_path):
    save_pretrained(make(SMALL), tmp_path / "model")
    with (
        patch.object(tensors, "read_slices", side_effect=AssertionError),
        pytest.raises(
            ValueError, match=r"q_proj has 4 heads of 8 features, .* over 'tp' of size 8 .*; sizes that work: 1, 2, 4"
        ),
    ):
        from_pretrained(tmp_path / "model", ProcessMesh.grid(tp=8))


# Models that cannot be written


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="model exists; give another folder"):
        save_pretrained(make(SMALL), tmp_path / "model")
    assert [path.name for path in tmp_path.rglob("*")] == ["model"]


def test_an_unknown_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="a Linear has no Hugging Face form; save one of llama"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError("no space left")

    monkeypatch.setattr(huggingface, "write_with_checksums", full)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(make(SMALL), tmp_path / "model")
    assert not any(tmp_path.iterdir())
