"""Prepared folders of examples: the same bytes whatever happens on the way, and hostile folders refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.models.data.examples.example import Task
from weft.models.data.examples.source import open_prepared
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.examples.records import write_records
from tests.models.test_hostile_data import refused
from tests.models.test_interrupted import killed
from tests.models.texts import contents

MANIFEST = Path("out/manifest.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    write_records(Path("in.jsonl"), "kto", 40)


def make(output: str, task: Task = "kto", **options: Any) -> None:
    prepare([Path("in.jsonl")], Path(output), tokenizer=byte_tokenizer(), task=task, part_bytes=700, **options)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["tokens-", "documents-", "masks-", "labels-", "part-", "manifest"])
def test_an_interrupted_preparation_continues_to_the_same_bytes(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("whole")
    assert {file.name.partition("-")[0] for file in Path("whole").glob("*.bin")} == {
        *("tokens", "documents", "masks", "labels")
    }
    with killed(monkeypatch, name, 0 if name == "manifest" else 2):
        make("out")
    make("out", workers=workers)
    assert contents(Path("out")) == contents(Path("whole"))


def test_a_begun_folder_of_another_task_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with killed(monkeypatch, "manifest"):
        make("out")
    with pytest.raises(ValueError, match="out holds the beginning of another preparation"):
        make("out", task="sft")
    make("out")
    with pytest.raises(ValueError, match="out holds other data"):
        make("out", task="sft")


def test_shards_are_written_as_the_guide_says() -> None:
    """Tokens of both segments of each example, their ends, a mask a token, a label an example."""
    write_records(Path("in.jsonl"), "kto", 2)
    make("out")
    tokens = np.fromfile("out/tokens-00000.bin", dtype="<u2").tolist()
    first, second = [*b"since 0", 256], [*b"since 1.", 256]
    texts = [[*b"0? ", *first], [*b"0? ", *second], [*b"1? why ", *second], [*b"1? why ", *first]]
    assert tokens == [token for text in texts for token in text]
    assert np.fromfile("out/documents-00000.bin", dtype="<u8").tolist() == np.cumsum([*map(len, texts)]).tolist()
    prompts = [3, 3, 7, 7]
    masks = [bytes(count) + b"\1" * (len(text) - count) for count, text in zip(prompts, texts, strict=True)]
    assert Path("out/masks-00000.bin").read_bytes() == b"".join(masks)
    assert Path("out/labels-00000.bin").read_bytes() == bytes([0, 1])
    assert read_manifest(Path("out")).task == "kto"


def signed(change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest, with a valid checksum."""
    content = json.loads(MANIFEST.read_text())
    change(content)
    content.pop("sha256", None)
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    MANIFEST.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda manifest: manifest.update(task="sft"), "4 checksums, and a shard of sft has 3", id="task"),
        pytest.param(lambda manifest: manifest.update(task="pretrain"), "and a shard of pretrain has 2", id="pretrain"),
        pytest.param(lambda manifest: manifest.pop("task"), "and a shard of pretrain has 2 files", id="no-task"),
        pytest.param(
            lambda manifest: manifest.update(task="rlhf"),
            "task is 'rlhf', and pretrain, sft, ",
            id="unknown-task",
        ),
        pytest.param(lambda manifest: manifest.update(task=["kto"]), "manifest.task is a list", id="list"),
        pytest.param(lambda manifest: manifest["request"].update(template=3), "template is 3", id="template"),
        pytest.param(
            lambda manifest: (
                manifest["shards"][0].update(documents=manifest["shards"][0]["documents"] - 1),
                manifest.update(documents=manifest["documents"] - 1),
            ),
            "documents, and an example of kto has 2",
            id="half-an-example",
        ),
        pytest.param(lambda manifest: manifest["shards"][0]["sha256"].pop(), "has 3 checksums", id="no-labels"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "show"])
def test_a_manifest_that_contradicts_its_task_is_refused(
    change: Callable[[dict[str, Any]], None], says: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make("out")
    signed(change)
    assert says in refused(capsys, "data", command, "out")


@pytest.mark.parametrize(
    ("name", "number", "says"),
    [
        pytest.param("masks", 2, "out/masks-00000.bin is not what was prepared: it has a byte 7", id="mask"),
        pytest.param("labels", 3, "out/labels-00000.bin is not what was prepared: it has a byte 7", id="label"),
    ],
)
def test_a_byte_that_is_neither_0_nor_1_is_refused(
    name: str, number: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make("out")
    file = Path(f"out/{name}-00000.bin")
    content = file.read_bytes()[:-1] + b"\x07"
    file.write_bytes(content)
    assert "its SHA-256 differs" in refused(capsys, "data", "verify", "out")
    signed(lambda manifest: manifest["shards"][0]["sha256"].__setitem__(number, hashlib.sha256(content).hexdigest()))
    assert says in refused(capsys, "data", "verify", "out")


def test_files_of_other_sizes_and_examples_without_learned_tokens_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make("out")
    masks = Path("out/masks-00000.bin")
    content = masks.read_bytes()
    masks.write_bytes(content[:-1])
    assert "out/masks-00000.bin has " in refused(capsys, "data", "show", "out")
    masks.write_bytes(bytes(len(content)))
    assert "out: example 1 has no token to learn" in refused(capsys, "data", "show", "out")
    masks.write_bytes(content)
    tokens = Path("out/tokens-00000.bin")
    tokens.write_bytes(b"\xff\xff" + tokens.read_bytes()[2:])
    with pytest.raises(ValueError, match="it has the token 65535 in a vocabulary of 257"):
        open_prepared(Path("out"), "kto").read(0)
    Path("out/labels-00000.bin").unlink()
    assert "out/labels-00000.bin is missing" in refused(capsys, "data", "show", "out")
