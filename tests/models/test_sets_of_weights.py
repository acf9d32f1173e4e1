"""Folders are refused if their config or another tensor contradicts a tensor, or if they hold two sets of weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.models import from_pretrained
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.tensors import INDEX_FILE

from tests.models.folders import CLASSES, close, their_model, their_saved, tokens_for


def change(folder, config=None, **tensors):
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))


def frequencies(theta=10000.0, head_dim=8):
    return 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)


def mask(size=64, dtype=torch.bool):
    return torch.ones(size, size).tril().to(dtype)[None, None]


TABLES = {kind: "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight" for kind in CLASSES}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "read", [from_pretrained, lambda folder: convert(folder, folder / "out")], ids=["read", "convert"]
)
@pytest.mark.parametrize("kind", CLASSES)
def test_a_head_that_differs_from_the_tied_table_is_refused_and_kept_untied(kind, read, tmp_path):
    """The heads differ in the last row alone; the vocabulary is compared in several pieces, or in a single piece."""
    theirs = their_model(kind, tie_word_embeddings=True)
    theirs.save_pretrained(tmp_path / "model")
    head = load_file(tmp_path / "model/model.safetensors")[TABLES[kind]].clone()
    change(tmp_path / "model", **{"lm_head.weight": head})
    read(tmp_path / "model")
    shutil.rmtree(tmp_path / "model/out", ignore_errors=True)
    head[-1, -1] += 1
    change(tmp_path / "model", **{"lm_head.weight": head})
    with pytest.raises(ValueError, match=f"lm_head.weight is not {TABLES[kind]}, .*set tie_word_embeddings to false"):
        read(tmp_path / "model")
    change(tmp_path / "model", {"tie_word_embeddings": False})
    tokens = tokens_for(theirs)
    close(from_pretrained(tmp_path / "model").eval()(tokens), their_saved(tmp_path / "model")(tokens).logits)


def test_a_head_in_another_dtype_is_compared_by_its_values(tmp_path):
    theirs = their_model("llama", tie_word_embeddings=True).bfloat16()
    theirs.save_pretrained(tmp_path / "model")
    table = load_file(tmp_path / "model/model.safetensors")[TABLES["llama"]]
    change(tmp_path / "model", **{"lm_head.weight": table.float()})
    from_pretrained(tmp_path / "model")
    change(tmp_path / "model", **{"lm_head.weight": table.float() * 1.001})
    with pytest.raises(ValueError, match=r"lm_head\.weight is not"):
        from_pretrained(tmp_path / "model")


INV = "model.layers.1.self_attn.rotary_emb.inv_freq"
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}


@pytest.mark.parametrize(
    ("options", "tensor", "fits"),
    [
        pytest.param({}, frequencies(), True, id="as-config"),
        pytest.param({}, frequencies().half(), True, id="rounded-half"),
        pytest.param({}, frequencies().bfloat16(), True, id="rounded-bfloat16"),
        pytest.param({}, frequencies(5e5), False, id="another-base"),
        pytest.param({}, frequencies(1.1e4), False, id="a-base-near-it"),
        pytest.param({}, frequencies(head_dim=16), False, id="another-width"),
        pytest.param({"rope_theta": 5e5}, frequencies(5e5), True, id="theta"),
        pytest.param({"rope_theta": 5e5}, frequencies(), False, id="theta-of-the-default"),
        pytest.param(LINEAR, frequencies() / 4, True, id="stretched"),
        pytest.param(LINEAR, frequencies(), True, id="not-yet-stretched"),
        pytest.param(LINEAR, frequencies() / 2, False, id="otherwise-stretched"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_stored_rotary_frequencies_are_the_configs(kind, options, tensor, fits, tmp_path):
    their_model(kind, **options).save_pretrained(tmp_path / "model")
    change(tmp_path / "model", **{INV: tensor})
    if fits:
        from_pretrained(tmp_path / "model")
    else:
        with pytest.raises(ValueError, match=r"inv_freq is not the rotary frequencies of config\.json; set rope_theta"):
            from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "tensor", "fits"),
    [
        pytest.param("bias", mask(), True, id="mask"),
        pytest.param("bias", mask(dtype=torch.uint8), True, id="mask-of-bytes"),
        pytest.param("bias", mask(dtype=torch.float32), True, id="mask-of-floats"),
        pytest.param("bias", torch.ones(1, 1, 64, 64), False, id="sees-all"),
        pytest.param("bias", mask().mT.contiguous(), False, id="sees-what-follows"),
        pytest.param("bias", mask() & ~mask().roll(4, 2), False, id="sees-the-last-four"),
        pytest.param("masked_bias", torch.tensor(-1e4), True, id="score"),
        pytest.param("masked_bias", torch.tensor(-1e9), True, id="lower-score"),
        pytest.param("masked_bias", torch.tensor(-1.0), False, id="score-that-is-seen"),
    ],
)
def test_stored_masks_of_gpt_are_causal(name, tensor, fits, tmp_path):
    their_model("gpt2").save_pretrained(tmp_path / "model")
    change(tmp_path / "model", **{f"transformer.h.0.attn.{name}": tensor})
    if fits:
        from_pretrained(tmp_path / "model")
    else:
        with pytest.raises(ValueError, match=f"transformer.h.0.attn.{name} is not .* is not supported here"):
            from_pretrained(tmp_path / "model")


# Two sets of weights


def sharded(folder, seed):
    their_model("llama", seed=seed).save_pretrained(folder, max_shard_size="20KB")


def whole(folder, seed):
    their_model("llama", seed=seed).save_pretrained(folder)


def test_a_file_beside_an_index_of_others_is_refused(tmp_path):
    sharded(tmp_path / "model", 0)
    whole(tmp_path / "new", 1)
    shutil.copy(tmp_path / "new/model.safetensors", tmp_path / "model")
    for read in (from_pretrained, lambda folder: convert(folder, tmp_path / "out")):
        with pytest.raises(
            ValueError, match=r"two sets of weights: model.safetensors, and model-00001-of-.*remove model"
        ):
            read(tmp_path / "model")
    (tmp_path / "model" / INDEX_FILE).unlink()
    tokens = tokens_for(their_model("llama"))
    ours = from_pretrained(tmp_path / "model").eval()(tokens)
    close(ours, their_saved(tmp_path / "model")(tokens).logits)
    close(ours, their_model("llama", seed=1)(tokens).logits)


def test_an_index_of_the_one_file_is_one_set(tmp_path):
    whole(tmp_path / "model", 0)
    names = load_file(tmp_path / "model/model.safetensors")
    (tmp_path / "model" / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    tokens = tokens_for(their_model("llama"))
    close(from_pretrained(tmp_path / "model").eval()(tokens), their_model("llama")(tokens).logits)


@pytest.mark.parametrize(
    "extra", ["consolidated.safetensors", "model-00001-of-00099.safetensors", "adapter_model.safetensors"]
)
@pytest.mark.parametrize("save", [sharded, whole], ids=["sharded", "whole"])
def test_files_that_are_not_of_the_model_are_passed_by_as_in_transformers(save, extra, tmp_path):
    save(tmp_path / "model", 0)
    whole(tmp_path / "new", 1)
    shutil.copy(tmp_path / "new/model.safetensors", tmp_path / "model" / extra)
    tokens = tokens_for(their_model("llama"))
    ours = from_pretrained(tmp_path / "model").eval()(tokens)
    close(ours, their_saved(tmp_path / "model")(tokens).logits)
    close(ours, their_model("llama")(tokens).logits)


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path):
    sharded(tmp_path / "model", 0)
    first, second, *_ = sorted((tmp_path / "model").glob("model-*.safetensors"))
    tensors, name = load_file(first), min(load_file(second))
    save_file({**tensors, name: load_file(second)[name] + 1}, first)
    with pytest.raises(ValueError, match=f"holds {name} twice, in {first.name} and in {second.name}"):
        from_pretrained(tmp_path / "model")
