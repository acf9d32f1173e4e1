"""A folder's files and fields beside network and weights survive every conversion, as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import (
    from_pretrained,
    load_checkpoint,
    lora,
    parallelize,
    save_checkpoint,
    save_lora,
    save_pretrained,
)
from weft.models.checkpoint.companions import GENERATION_FILE
from weft.models.checkpoint.convert import convert
from weft.models.data.tokenizer import Tokenizer, byte_tokenizer
from weft.models.families import make_model

from tests.models.cases import SMALL, make
from tests.models.folders import CLASSES, their_model, their_saved

IDS = {"bos_token_id": 1, "eos_token_id": [7, 9], "pad_token_id": 0}
BESIDE = {
    **dict(byte_tokenizer().files),
    "chat_template.jinja": b"{% for m in messages %}{{ m.content }};{% endfor %}",
    "special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}',
    "added_tokens.json": b"{}",
}


def their_folder(kind: str, folder: Path) -> None:
    """A model of transformers with ids, settings of generation and a tokenizer."""
    theirs = their_model(kind, **IDS)
    theirs.generation_config.temperature, theirs.generation_config.do_sample = 0.5, True
    theirs.save_pretrained(folder)
    for name, content in BESIDE.items():
        (folder / name).write_bytes(content)


def check_companions(folder: Path, source: Path) -> None:
    theirs = their_saved(folder)
    for config in (theirs.config, theirs.generation_config):
        assert {name: getattr(config, name) for name in IDS} == IDS
    assert theirs.generation_config.temperature == 0.5
    assert (folder / GENERATION_FILE).read_bytes() == (source / GENERATION_FILE).read_bytes()
    for name, content in BESIDE.items():
        assert (folder / name).read_bytes() == content, name


def saved_again(source: Path, target: Path) -> None:
    save_pretrained(from_pretrained(source), target)


def by_checkpoint(source: Path, target: Path) -> None:
    """Saved as a checkpoint, and loaded into a fresh model."""
    model = from_pretrained(source)
    save_checkpoint(model, target / "checkpoint")
    fresh = make_model(model.config)
    load_checkpoint(fresh, target / "checkpoint")
    save_pretrained(fresh, target / "saved")


def by_convert(source: Path, target: Path) -> None:
    convert(source, target / "checkpoint")
    convert(target / "checkpoint", target / "saved")


def by_converted_checkpoint(source: Path, target: Path) -> None:
    convert(source, target / "checkpoint")
    save_pretrained(from_pretrained(target / "checkpoint"), target / "saved")


def by_adapters(source: Path, target: Path) -> None:
    model = from_pretrained(source)
    save_pretrained(lora(model, 2, 4.0, ["*.q_proj"]), target / "saved")


DOORS = {
    "save_pretrained": saved_again,
    "checkpoint": by_checkpoint,
    "convert": by_convert,
    "converted": by_converted_checkpoint,
    "adapters": by_adapters,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", CLASSES)
def test_ids_tokenizer_and_chat_template_go_through(kind, door, tmp_path):
    their_folder(kind, tmp_path / "theirs")
    DOORS[door](tmp_path / "theirs", tmp_path / "out")
    saved = tmp_path / "out" if (tmp_path / "out/config.json").exists() else tmp_path / "out/saved"
    check_companions(saved, tmp_path / "theirs")


@pytest.mark.parametrize("eos", [5, [7, 9], None], ids=str)
def test_an_end_may_be_one_several_or_none(eos, tmp_path):
    their_model("llama", eos_token_id=eos).save_pretrained(tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "again")
    again = their_saved(tmp_path / "again")
    assert again.config.eos_token_id == eos == again.generation_config.eos_token_id


def test_settings_of_generation_in_an_older_config_go_through(tmp_path):
    their_model("gpt2").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    old = {
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "prefix": "A",
        "top_k": 7,
    }
    path.write_text(json.dumps({**json.loads(path.read_text()), **old}))
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "again")
    assert old.items() <= json.loads((tmp_path / "again/config.json").read_text()).items()


def through_a_mesh(source, target, axes, plan):
    model = from_pretrained(source, ProcessMesh.grid(**axes))
    save_checkpoint(model, f"{target}/checkpoint")
    fresh = parallelize(make_model(model.config).to_empty(device="cpu"), ProcessMesh.grid(**axes))
    load_checkpoint(fresh, f"{target}/checkpoint")
    save_pretrained(fresh, f"{target}/saved")


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 2}], ids=str)
def test_companions_are_kept_through_load_and_save_on_a_mesh(pool, axes, tmp_path):
    their_folder("llama", tmp_path / "theirs")
    pool.run(through_a_mesh, tmp_path / "theirs", tmp_path / "out", axes, None, ranks=torch.Size(axes.values()).numel())
    check_companions(tmp_path / "out/saved", tmp_path / "theirs")


# A tokenizer that is named when the model is written


def other_tokenizer(end: int = 3) -> Tokenizer:
    return Tokenizer((("tokenizer.json", b'{"other": 1}'), ("tokenizer_config.json", b"{}")), end, 10)


@pytest.mark.parametrize("save", [save_pretrained, save_checkpoint], ids=["folder", "checkpoint"])
def test_the_end_of_a_runs_tokenizer_is_the_models_where_none_is_known(save, tmp_path):
    save(make(SMALL), tmp_path / "saved", tokenizer=other_tokenizer())
    assert json.loads((tmp_path / "saved/config.json").read_text())["eos_token_id"] == 3
    save(make(SMALL), tmp_path / "without")
    assert json.loads((tmp_path / "without/config.json").read_text())["eos_token_id"] is None


def test_the_folders_own_tokenizer_keeps_the_folders_ids(tmp_path):
    their_folder("llama", tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "again", tokenizer=byte_tokenizer())
    check_companions(tmp_path / "again", tmp_path / "theirs")


def test_nothing_of_another_tokenizer_stays(tmp_path):
    their_folder("llama", tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "again", tokenizer=other_tokenizer())
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"], config.get("pad_token_id")) == (3, None, None)
    beside = {path.name for path in (tmp_path / "again").iterdir()}
    assert beside == {"config.json", "model.safetensors", "checksums.json", "tokenizer.json", "tokenizer_config.json"}


def test_a_checkpoint_that_says_nothing_leaves_what_the_model_carries(tmp_path):
    their_folder("llama", tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    save_checkpoint(make_model(model.config).to_empty(device="cpu"), tmp_path / "plain")
    load_checkpoint(model, tmp_path / "plain")
    save_pretrained(model, tmp_path / "again")
    check_companions(tmp_path / "again", tmp_path / "theirs")


def test_adapters_are_saved_with_the_tokenizer_that_the_model_carries(tmp_path):
    their_folder("llama", tmp_path / "theirs")
    save_lora(lora(from_pretrained(tmp_path / "theirs"), 2, 4.0, ["*.q_proj"]), tmp_path / "adapters")
    for name, content in BESIDE.items():
        assert (tmp_path / "adapters" / name).read_bytes() == content, name
    source = (tmp_path / "theirs" / GENERATION_FILE).read_bytes()
    assert (tmp_path / "adapters" / GENERATION_FILE).read_bytes() == source


def test_a_changed_companion_of_a_folder_that_was_written_is_refused(tmp_path):
    their_folder("llama", tmp_path / "theirs")
    save_pretrained(from_pretrained(tmp_path / "theirs"), tmp_path / "again")
    path = tmp_path / "again" / GENERATION_FILE
    path.write_bytes(path.read_bytes().replace(b"7", b"8"))
    with pytest.raises(ValueError, match=r"generation_config\.json was changed after it was written"):
        from_pretrained(tmp_path / "again")
