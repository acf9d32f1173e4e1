"""Folders that Weft writes for transformers: files are synced, and each file's checksum is compared when it is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weft.mesh import ProcessMesh
from weft.models import GPT, GPTConfig, Llama, from_pretrained, initialize, save_checkpoint, save_pretrained
from weft.models.checkpoint.convert import convert
from weft.models.checkpoint.manifest import CHECKSUMS, DamagedCheckpoint
from weft.models.checkpoint.storage import own_partial_path
from weft.models.cli import main
from weft.models.cli.generate import find_tokenizer_of
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.checkpoints.states import CONFIG, Case, make
from tests.support.pool import Pool

SHARD_BYTES = 20_000
TENSORS = [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
FILES = [
    CHECKSUMS,
    "config.json",
    *TENSORS,
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


def gpt() -> nn.Module:
    """A GPT: its files hold queries, keys and values as one transposed tensor."""
    model = GPT(GPTConfig(vocab_size=257, hidden_size=16, num_layers=1, num_heads=2, max_seq_len=16))
    initialize(model, seed=0)
    return model


@pytest.fixture(scope="module", params=["saved", "converted"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    if request.param == "saved":
        save_pretrained(gpt(), folder / "model", shard_bytes=SHARD_BYTES, tokenizer=byte_tokenizer())
    else:
        save_checkpoint(gpt(), folder / "checkpoint-4", tokenizer=byte_tokenizer())
        convert(folder / "checkpoint-4", folder / "model", shard_bytes=SHARD_BYTES)
    assert sorted(path.name for path in (folder / "model").iterdir()) == FILES
    return folder / "model"


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 4
    path.write_bytes(content)


def read_all(folder: Path) -> nn.Module:
    """Reads the folder as `weft generate` does."""
    find_tokenizer_of(folder)
    return from_pretrained(folder)


def test_an_unchanged_folder_is_read(folder: Path) -> None:
    for found, wanted in zip(read_all(folder).parameters(), gpt().parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("at", [0.0, 0.01, 0.3, 0.7, 0.9999])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found(name: str, at: float, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / name, at)
    with pytest.raises(ValueError) as refusal:
        read_all(folder)
    assert name in str(refusal.value) and "\n" not in str(refusal.value)
    with pytest.raises(SystemExit, match="2"):
        main(["convert", str(folder), str(folder.with_name("out"))])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("weft convert: ") and name in line
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("name", [*TENSORS, "tokenizer.json"])
def test_a_missing_file_is_found(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{name} is missing, which {CHECKSUMS} names"):
        read_all(folder)


def test_who_changes_the_folder_removes_the_checksums(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 0.5}))
    with pytest.raises(
        DamagedCheckpoint, match=rf"config\.json has .* where it is meant to be another, remove {CHECKSUMS}"
    ):
        read_all(folder)
    (folder / CHECKSUMS).unlink()
    assert read_all(folder).config.norm_eps == 0.5  # type: ignore[union-attr]


def test_a_newer_version_is_refused(folder: Path) -> None:
    value = json.loads((folder / CHECKSUMS).read_text())
    (folder / CHECKSUMS).write_text(json.dumps({**value, "version": 7}, indent=1) + "\n")
    with pytest.raises(ValueError, match="has version 7, and this Weft reads up to version 1; install a newer Weft"):
        read_all(folder)


def test_all_that_is_written_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_pretrained(gpt(), tmp_path / "model", shard_bytes=SHARD_BYTES, tokenizer=byte_tokenizer())
    *files, inside, beside = synced
    assert sorted(files) == FILES and files[-1] == CHECKSUMS
    assert inside.startswith(".model.partial") and beside == tmp_path.name


def test_another_processs_partial_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = own_partial_path(tmp_path / "model")
    theirs.mkdir()
    (theirs / "half").touch()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    save_pretrained(gpt(), tmp_path / "model", shard_bytes=SHARD_BYTES)
    assert {each.name for each in tmp_path.iterdir()} == {"model", theirs.name}
    assert (theirs / "half").exists()


def test_read_tensors_are_aligned_as_torchs_own(tmp_path: Path) -> None:
    save_pretrained(gpt(), tmp_path / "model", shard_bytes=SHARD_BYTES)
    for path in (tmp_path / "model").glob("*.safetensors"):
        content = path.read_bytes()
        assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0


def read_on_a_mesh(folder: Path, axes: dict[str, int]) -> Any:
    """The number of this rank's parameters, or the error of reading; None outside the mesh, where nothing is read."""
    if torch.distributed.get_rank() >= ProcessMesh.grid(**axes).size:
        return None
    try:
        model = from_pretrained(folder, ProcessMesh.grid(**axes))
    except DamagedCheckpoint as error:
        return str(error)
    return len(list(model.parameters()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("axes", "world"), [({"tp": 2}, 3), ({"dp": 2, "tp": 2}, 4)], ids=str)
def test_a_damage_read_by_one_rank_raises_on_all(axes: dict[str, int], world: int, tmp_path: Path, pool: Pool) -> None:
    """The bit is of the last row of a weight, whose rows lie over tp."""
    save_pretrained(make(Case())[0], tmp_path / "model")
    members = ProcessMesh.grid(**axes).size
    found = pool.run(read_on_a_mesh, tmp_path / "model", axes, ranks=world)
    assert found == [found[0]] * members + [None] * (world - members) and found[0] > 0
    path = tmp_path / "model/model.safetensors"
    content = bytearray(path.read_bytes())
    place = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["model.layers.0.self_attn.q_proj.weight"]
    content[8 + int.from_bytes(content[:8], "little") + place["data_offsets"][1] - 1] ^= 1
    path.write_bytes(content)
    for said in pool.run(read_on_a_mesh, tmp_path / "model", axes, ranks=world)[:members]:
        assert "model.safetensors was changed after it was written: model.layers.0.self_attn.q_proj.weight" in said


def test_a_folder_of_another_program_has_none_and_is_read(tmp_path: Path) -> None:
    save_pretrained(Llama(CONFIG), tmp_path / "model")
    (tmp_path / "model" / CHECKSUMS).unlink()
    flip(tmp_path / "model/model.safetensors", 0.7)
    assert from_pretrained(tmp_path / "model").config == CONFIG
