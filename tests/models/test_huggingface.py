"""Hugging Face folders: Weft reads transformers' folders, and transformers reads Weft's."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.models.checkpoint import huggingface
from weft.models.checkpoint.huggingface import from_pretrained, save_pretrained
from weft.models.llama.weights import read_config

from tests.models.cases import SCALING, SMALL, each_variant, make, some_tokens

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def their_config(**options):
    import transformers  # here, as worker processes load this module too and have no use for it

    return transformers.LlamaConfig(
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **options,
        }
    )


def their_folder(folder, max_shard_size="5GB", dtype=torch.float32, **options):
    """A random Llama of transformers, saved; with its biases and norms random too."""
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(their_config(**options)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def change_tensors(folder, **changes):
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="grouped"),
        pytest.param({"num_key_value_heads": None}, id="as-many-kv-heads"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"rope_scaling": LLAMA3, "rope_theta": 500000.0}, id="llama3-scaling"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"head_dim": 12, "rms_norm_eps": 1e-5}, id="wide-heads"),
        pytest.param({"max_shard_size": "20KB"}, id="several-files"),
        pytest.param({"max_shard_size": "20KB", "tie_word_embeddings": True}, id="several-files-tied"),
    ],
)
def test_reads_what_transformers_writes(tmp_path, options):
    other = their_folder(tmp_path / "model", **options)
    assert (tmp_path / "model" / huggingface.INDEX_FILE).exists() == ("max_shard_size" in options)
    model = from_pretrained(tmp_path / "model")
    tokens = some_tokens(SMALL)
    torch.testing.assert_close(model(tokens), other(tokens).logits, **CLOSE)
    assert (model.lm_head.weight is model.embed_tokens.weight) == bool(options.get("tie_word_embeddings"))
    assert all(parameter.requires_grad for parameter in model.parameters())


@each_variant()
@pytest.mark.parametrize("shard_bytes", [huggingface.SHARD_BYTES, 10_000], ids=["one-file", "several-files"])
def test_transformers_reads_what_is_written(tmp_path, config, shard_bytes):
    import transformers

    model, tokens = make(config), some_tokens(config)
    save_pretrained(model, tmp_path / "new" / "model", shard_bytes=shard_bytes)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]  # nothing else is left
    other, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "new" / "model", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    torch.testing.assert_close(other(tokens).logits, model(tokens), **CLOSE)

    again = from_pretrained(tmp_path / "new" / "model")
    assert again.config == config
    assert torch.equal(again(tokens), model(tokens))


def test_files_hold_at_most_shard_bytes(tmp_path):
    model = make(SMALL)
    save_pretrained(model, tmp_path / "model", shard_bytes=10_000)
    sizes = [
        [t.numel() * t.element_size() for t in load_file(path).values()]
        for path in (tmp_path / "model").glob("*.safetensors")
    ]
    assert len(sizes) > 2
    assert all(sum(size) <= 10_000 or len(size) == 1 for size in sizes)


def test_dtype_is_as_stored_or_as_asked(tmp_path):
    import transformers

    their_folder(tmp_path / "model", dtype=torch.bfloat16)
    model = from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    wide = from_pretrained(tmp_path / "model", dtype=torch.float32)
    other = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(wide(some_tokens(SMALL)), other(some_tokens(SMALL)).logits, **CLOSE)
    save_pretrained(model, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "rope",
    [
        pytest.param({"rope_theta": 5e5, "rope_scaling": LLAMA3}, id="transformers-4"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}}, id="with-the-older-key"),
        pytest.param({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, id="transformers-5"),
    ],
)
def test_rotary_settings_under_old_and_new_keys(rope):
    config = read_config({**their_config().to_dict(), "rope_theta": None, "rope_scaling": None, **rope})
    assert (config.rope_theta, config.rope_scaling) == (5e5, SCALING)


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": {"rope_type": "default"}}, {"rope_parameters": {}}], ids=str)
def test_no_rotary_scaling(rope):
    given = {name: value for name, value in their_config().to_dict().items() if not name.startswith("rope")}
    config = read_config({**given, **rope})
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)


def test_tensors_of_old_files_that_no_one_needs_are_passed_over(tmp_path):
    their_folder(tmp_path / "model", tie_word_embeddings=True)
    change_tensors(
        tmp_path / "model", **{"lm_head.weight": torch.zeros(61, 32), "model.rotary_emb.inv_freq": torch.zeros(4)}
    )
    assert from_pretrained(tmp_path / "model").lm_head.weight.any()
