"""Folders with the fields of public models' config.json, at reduced sizes: loaded, saved, trained, generated from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from weft.models import from_pretrained
from weft.models.cli.generate import run
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.asked import TEXT
from tests.models.folders import BASES, GPT_SIZES, SIZES, check_saved, close, their_model, tokens_for
from tests.models.public_configs import PUBLISHED
from tests.models.test_from_folder import trained

# Fields that a saved folder leaves out: without effect on the network.
LEFT_OUT = {"is_llama_config", "transformers.js_config", "rope_interleaved", "pretraining_tp", "n_ctx"}
LEFT_OUT |= {"torch_dtype", "transformers_version", "use_cache"}
NAMES = ("smollm2-135m", "mistral-7b-v0.1", "mistral-7b-v0.3", "distilgpt2")
each = pytest.mark.parametrize("name", NAMES)


def reduced(name: str) -> dict[str, Any]:
    """The fields of the public config.json, with small sizes and in float32."""
    config = {**PUBLISHED[name][0], "torch_dtype": "float32"}
    sizes = GPT_SIZES if config["model_type"] == "gpt2" else SIZES
    config |= {field: size for field, size in sizes.items() if field in config} | {"vocab_size": 257}
    if config.get("sliding_window") is not None:
        config["sliding_window"] = 5
    if config["eos_token_id"] >= 257:
        config |= {"bos_token_id": 256, "eos_token_id": 256}
    return config


def saved(name: str, folder: Path) -> Any:
    """transformers' model, saved in a folder whose config.json has the public model's fields and no others."""
    config = reduced(name)
    absent = dict.fromkeys(BASES[config["model_type"]].keys() - config.keys())
    theirs = their_model(config["model_type"], **config, **absent)
    theirs.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return theirs


@pytest.mark.few(1)
@each
def test_logits_and_gradients_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_saved(saved(name, tmp_path / "theirs"), tmp_path)
    given, found = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("theirs", "ours"))
    assert {field: found[field] for field in given.keys() & found.keys()} == {
        field: value for field, value in given.items() if field in found
    }
    left_out = {field for field in given.keys() - found.keys() if not field.startswith("summary_")}
    assert left_out <= LEFT_OUT


@each
def test_a_field_that_changes_the_network_is_refused_by_name(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "model")
    path = tmp_path / "model/config.json"
    whole = json.loads(path.read_text())
    change = {"gpt2": {"add_cross_attention": True}}.get(whole["model_type"], {"rope_interleaved": True})
    path.write_text(json.dumps({**whole, **change}))
    with pytest.raises(ValueError, match=f"config.json: {next(iter(change))}"):
        from_pretrained(tmp_path / "model")


def test_the_gradient_of_the_pad_tokens_embedding_alone_is_not_that_of_transformers(tmp_path: Path) -> None:
    """As in SmolLM2-135M-Instruct, whose config.json has a pad_token_id: transformers gives that row no gradient."""
    theirs = their_model("llama", pad_token_id=2)
    theirs.save_pretrained(tmp_path / "model")
    ours: Any = from_pretrained(tmp_path / "model")
    tokens = tokens_for(theirs)
    tokens[0, 0] = 2
    ours(tokens).square().sum().backward()
    theirs(tokens).logits.square().sum().backward()
    found, wanted = ours.embed_tokens.weight.grad, theirs.model.embed_tokens.weight.grad
    assert found[2].any() and not wanted[2].any()
    found[2] = 0
    close(found / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.exhaustive), *NAMES[2:]])
def test_a_run_begins_with_it_and_generates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(name, Path("hf"))
    for file, content in byte_tokenizer().files:
        Path("hf", file).write_bytes(content)
    Path("text.txt").write_text("a folder, its tokens and its constants; " * 40)
    said = trained("--from", "hf", "--output", "run", *TEXT, "--mesh.dp", "1", "--mesh.tp", "1", "--steps", "2")
    assert "begins with the model of hf\n" in said
    began, ended = (json.loads(Path(one, "config.json").read_text()) for one in ("hf", "run/checkpoint"))
    for field in ("model_type", "sliding_window", "task_specific_params", "eos_token_id"):
        assert ended.get(field, "none") == began.get(field, "none"), field
    for folder in ("hf", "run/checkpoint"):
        assert run([folder, "--prompt", "a folder", "--tokens", "3", "--temperature", "0"]) == 0
        assert capsys.readouterr().out.startswith("a folder")
