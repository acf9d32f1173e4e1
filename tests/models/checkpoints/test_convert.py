"""`weft convert`: a checkpoint of a run as a folder that transformers reads, and back, a tensor in memory at a time."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from weft.models import from_pretrained, load_checkpoint, save_checkpoint, save_pretrained
from weft.models.checkpoint import convert as converting
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.storage import FolderReader
from weft.models.cli import main

from tests.models.checkpoints.states import CASES, Case, fill_state, make
from tests.models.folders import BASES, close, their_model, their_saved, tokens_for
from tests.support.pool import Pool


@pytest.mark.parametrize("kind", BASES)
def test_there_and_back_is_the_same(kind: str, tmp_path: Path) -> None:
    theirs = their_model(kind, ("tied",) if kind == "qwen2" else ())
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs/tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    convert(tmp_path / "theirs", tmp_path / "checkpoint", shard_bytes=20_000)
    assert len(list((tmp_path / "checkpoint").glob("part-*"))) > 1
    convert(tmp_path / "checkpoint", tmp_path / "again", shard_bytes=20_000)
    assert (tmp_path / "again/model.safetensors.index.json").exists()
    tokens = tokens_for(theirs)
    ours = [from_pretrained(tmp_path / name).eval()(tokens) for name in ("checkpoint", "theirs")]
    assert torch.equal(*ours)
    close(their_saved(tmp_path / "again")(tokens).logits, theirs(tokens).logits)
    for folder in ("checkpoint", "again"):
        assert json.loads((tmp_path / folder / "tokenizer.json").read_text()) == {"model": {"type": "BPE"}}


def save(case: Case, folder: Path) -> None:
    model, optimizer = make(case, seed=1)
    fill_state(model, optimizer, 1)
    save_checkpoint(model, folder, optimizer)


def test_what_many_ranks_saved_is_what_one_process_would_export(tmp_path: Path, pool: Pool) -> None:
    case = CASES["zero1-dp2-tp2"]
    pool.run(save, case, tmp_path / "run/checkpoint-3", ranks=case.ranks)
    save_pretrained(make(Case(), seed=1)[0], tmp_path / "exported")
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(tmp_path / "run"), str(tmp_path / "converted")])
    with (
        safe_open(tmp_path / "exported/model.safetensors", framework="pt") as wanted,
        safe_open(tmp_path / "converted/model.safetensors", framework="pt") as found,
    ):
        assert sorted(found.keys()) == sorted(wanted.keys())
        for name in wanted.keys():  # noqa: SIM118  it is no mapping
            assert torch.equal(found.get_tensor(name), wanted.get_tensor(name))
    ours, theirs = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("converted", "exported"))
    assert ours == theirs


def test_what_was_converted_is_a_beginning(tmp_path: Path) -> None:
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "begin")
    model = from_pretrained(tmp_path / "theirs")
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    load_checkpoint(model, tmp_path / "begin", optimizer)
    assert not optimizer.state
    tokens = tokens_for(theirs)
    close(model(tokens), theirs(tokens).logits)


def test_no_more_than_a_tensor_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for a tensor is gone when the next is asked for: counted where tensors are read."""
    their_model("gpt2", n_layer=4).save_pretrained(tmp_path / "theirs")
    alive: list[int] = [0, 0]  # bytes now, at most

    def counted(read: Any) -> Any:
        def call(*arguments: Any) -> torch.Tensor:
            tensor: torch.Tensor = read(*arguments)
            alive[0] += tensor.nbytes
            alive[1] = max(alive)
            weakref.finalize(tensor, lambda nbytes: alive.__setitem__(0, alive[0] - nbytes), tensor.nbytes)
            return tensor

        return call

    monkeypatch.setattr(converting, "read_slices", counted(converting.read_slices))
    monkeypatch.setattr(FolderReader, "read_whole", counted(FolderReader.read_whole))
    convert(tmp_path / "theirs", tmp_path / "checkpoint")
    there, alive[1] = alive[1], 0
    convert(tmp_path / "checkpoint", tmp_path / "again")
    with safe_open(tmp_path / "theirs/model.safetensors", framework="pt") as file:
        largest = max(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert 0 < there <= 2 * largest  # one is dropped as the next is there
    assert 0 < alive[1] <= 2 * largest


def test_what_cannot_be_converted_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = make(Case(), adapters=True)
    save_checkpoint(model, tmp_path / "adapted")
    save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for source, said in {
        "nowhere": "is neither a checkpoint nor a folder for transformers",
        "empty": "is neither a checkpoint nor a folder for transformers",
        "adapted": r"has layers.0.mlp.down_proj.lora.A and",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(["convert", str(tmp_path / source), str(tmp_path / "out")])
        err = capsys.readouterr().err
        assert said in err and len(err.splitlines()) == 1
        assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="of no family"):
        convert(tmp_path / "other", tmp_path / "out")
