"""Hostile prepared data and tokenizers: claims that do not fit the files give one line and status 2."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.models.cli import train as train_command
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.sources import check_share, find_data
from weft.models.data.tokenizer import byte_tokenizer, find_tokenizer

from tests.models.test_bad_data import weft

MANIFEST, TOKENS, ENDS = Path("out/manifest.json"), Path("out/tokens-00000.bin"), Path("out/documents-00000.bin")
COUNT, DOCUMENTS = 1806, 2  # tokens of the two documents below, their ends included


@pytest.fixture(autouse=True)
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/a.txt").write_text("Call me by my layout. " * 40)
    Path("books/b.txt").write_text("Call me by my layout.\n" * 42)
    prepare([Path("books")], Path("out"), tokenizer=byte_tokenizer())
    monkeypatch.setattr(train_command, "launch", lambda run, gpus: 0)


def signed(content: dict[str, Any]) -> None:
    """Write the manifest with a valid checksum."""
    content.pop("sha256", None)
    content["sha256"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    MANIFEST.write_text(json.dumps(content))


def rewritten(path: Path, content: bytes, number: int) -> None:
    """Writes a shard's file, and its sum into the manifest. number: 0 for tokens, 1 for documents."""
    path.write_bytes(content)
    manifest = json.loads(MANIFEST.read_text())
    manifest["shards"][0]["sha256"][number] = hashlib.sha256(content).hexdigest()
    signed(manifest)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command refuses its input."""
    status, out, err = weft(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), err
    return err


DOORS = [
    pytest.param(("train", "--data.path", "out"), id="train"),
    pytest.param(("data", "verify", "out"), id="verify"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        pytest.param("dtype", "int16", "dtype is 'int16', and uint16 and uint32 are known", id="unknown-dtype"),
        pytest.param("dtype", 16, "manifest.dtype is 16, and a string is needed", id="dtype-a-number"),
        pytest.param("vocab_size", 0, "vocab_size is 0", id="no-vocabulary"),
        pytest.param("vocab_size", 2**70, "vocab_size is 1180591620717411303424", id="huge-vocabulary"),
        pytest.param("vocab_size", "257", "manifest.vocab_size is '257'", id="vocabulary-a-string"),
        pytest.param("end", -1, "token -1 stands around documents", id="negative-end"),
        pytest.param("end", 2**62, "token 4611686018427387904 stands around", id="huge-end"),
        pytest.param("end", True, "manifest.end is true", id="end-a-bool"),
        pytest.param("tokenizer", None, "manifest.tokenizer is null", id="tokenizer-null"),
        pytest.param("shards", {}, "manifest.shards is an object, and a list is needed", id="shards-an-object"),
        pytest.param("shards", [], "contradicts itself: tokens is 1806, and its shards have 0", id="no-shards"),
        pytest.param("shards", [3], "manifest.shards[0] is 3", id="shard-a-number"),
        pytest.param("request", [], "manifest.request is a list of 0", id="request-a-list"),
        pytest.param("tokens", 5, "tokens is 5, and its shards have 1806", id="sum-of-tokens"),
        pytest.param("documents", 3, "documents is 3, and its shards have 2", id="sum-of-documents"),
        pytest.param("empty", "0", "empty is '0', and its shards have 0", id="sum-a-string"),
        pytest.param("version", "1", "is of version '1'", id="version-a-string"),
        pytest.param("format", ["weft-tokens"], "is not a manifest of prepared data", id="format-a-list"),
    ],
)
def test_a_manifest_that_contradicts_its_types_or_itself(
    place: str, value: object, said: str, door: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(MANIFEST.read_text())
    signed({**content, place: value})
    assert said in refused(capsys, *door)


@pytest.mark.few(1)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"number": 1}, "shards[0] has the number 1", id="another-number"),
        pytest.param({"number": -3}, "shards[0] has the number -3", id="negative-number"),
        pytest.param({"number": "../../x"}, "shards[0].number is '../../x'", id="number-a-path"),
        pytest.param({"tokens": -1}, "shards[0] has 2 documents of -1 tokens", id="negative-tokens"),
        pytest.param({"tokens": 2**70}, "contradicts itself: tokens is 1806, and its shards have 1180", id="huge"),
        pytest.param({"tokens": 1.5}, "shards[0].tokens is 1.5", id="half-a-token"),
        pytest.param({"documents": 0}, "shards[0] has 0 documents of 1806 tokens", id="no-documents"),
        pytest.param({"documents": 1807}, "shards[0] has 1807 documents of 1806 tokens", id="more-than-tokens"),
        pytest.param({"empty": -2}, "shards[0] has -2 as empty", id="negative-empty"),
        pytest.param({"sha256": ["x"]}, "shards[0] has 1 checksums, and a shard of pretrain has 2 files", id="one-sum"),
        pytest.param({"sha256": None}, "shards[0].sha256 is null", id="no-sum"),
        pytest.param({"skipped": "abc"}, "shards[0].skipped is 'abc'", id="skipped-a-string"),
        pytest.param({"prompt": 3}, "shards[0].prompt is 3", id="prompt-a-number"),
    ],
)
def test_a_shard_that_contradicts_its_types_or_the_manifest(
    change: dict[str, Any], said: str, door: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(MANIFEST.read_text())
    content["shards"][0] |= change
    signed(content)
    assert said in refused(capsys, *door)


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [{"vocab_size": 258}, {"vocab_size": 65536}, {"end": 255}, {"tokenizer": "x"}])
def test_a_manifest_with_another_tokenizer(change: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    signed({**json.loads(MANIFEST.read_text()), **change})
    assert "out/tokenizer is not the tokenizer that out was prepared with" in refused(
        capsys, "train", "--data.path", "out"
    )


@pytest.mark.exhaustive
def test_counts_that_the_files_do_not_have_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    for tokens in (1, 1000, 2**62):
        content = json.loads(MANIFEST.read_text())
        content["tokens"] = content["shards"][0]["tokens"] = tokens
        content["documents"] = content["shards"][0]["documents"] = 1
        signed(content)
        assert f"and the manifest says {2 * tokens}; copy it again" in refused(capsys, "train", "--data.path", "out")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/b", ".hidden", "..", ""])
def test_a_name_of_a_tokenizers_file_stays_in_the_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("outside").write_text("not of the data")
    content = json.loads(MANIFEST.read_text())
    content["request"]["tokenizer"][name] = hashlib.sha256(b"not of the data").hexdigest()
    signed(content)
    for door in (("train", "--data.path", "out"), ("data", "verify", "out")):
        assert "a plain name within the folder is needed" in refused(capsys, *door)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "tokens-00000.bin",
        "documents-00000.bin",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ],
)
@pytest.mark.parametrize("what", ["pipe", "folder", "link to nothing", "nothing", "/dev/zero"])
@pytest.mark.parametrize("door", DOORS)
def test_a_pipe_or_device_is_not_waited_for(
    name: str, what: str, door: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("out", name)
    path.unlink()
    match what:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link to nothing":
            path.symlink_to("nowhere")
        case "/dev/zero":
            path.symlink_to(what)
    assert Path(name).name in refused(capsys, *door)


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([0, COUNT], id="empty-document"),
        pytest.param([COUNT, COUNT], id="twice-the-same"),
        pytest.param([COUNT, 4], id="descending"),
        pytest.param([4, COUNT + 1], id="beyond-the-tokens"),
        pytest.param([4, COUNT - 1], id="before-the-last-token"),
        pytest.param([2**63 + 4, COUNT], id="beyond-64-bits"),
        pytest.param([2**64 - 1, COUNT], id="minus-one"),
    ],
)
def test_documents_that_do_not_end_one_after_another(ends: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    rewritten(ENDS, np.array(ends, dtype="<u8").tobytes(), 1)
    said = (
        f"out/{ENDS.name} is not what was prepared: "
        f"its 2 documents do not end one after another, the last at token {COUNT}"
    )
    assert said in refused(capsys, "data", "verify", "out")
    data = find_data(Path("out"))
    with pytest.raises(ValueError, match="do not end one after another"):
        check_share(data, 0, 1)
    for read in (
        lambda: data.open().read(0, 4),
        lambda: data.open().document_ends(0, 4),
        lambda: data.open().document_start(8),
    ):
        with pytest.raises(ValueError, match="do not end one after another"):
            read()


@pytest.mark.parametrize("place", [0, 1000, COUNT - 1])
@pytest.mark.parametrize("token", [257, 1000, 65535])
def test_a_token_outside_of_the_vocabulary(place: int, token: int, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = np.frombuffer(TOKENS.read_bytes(), dtype="<u2").copy()
    tokens[place] = token
    rewritten(TOKENS, tokens.tobytes(), 0)
    said = f"out/{TOKENS.name} is not what was prepared: it has the token {token} in a vocabulary of 257"
    assert said in refused(capsys, "data", "verify", "out")
    stream = find_data(Path("out")).open()
    with pytest.raises(ValueError, match=f"it has the token {token}"):
        stream.read(max(place - 3, 0), place + 1)
    there = slice(place + 1, None) if place < 8 else slice(0, place)
    start, stop, _ = there.indices(COUNT)
    assert stream.read(start, stop).tolist() == tokens[there].tolist()


def test_unchanged_data_is_read() -> None:
    tokens = find_data(Path("out")).open().read(0, COUNT).tolist()
    texts = [Path(f"books/{name}.txt").read_bytes() for name in "ab"]
    assert tokens == [*texts[0], 256, *texts[1], 256]
    assert check_share(find_data(Path("out")), 0, 1) == 2 * COUNT + 8 * DOCUMENTS


def test_a_folder_without_its_manifest_is_not_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer is text, on which nobody means to train."""
    MANIFEST.unlink()
    assert "out holds no prepared data: No such file" in refused(capsys, "train", "--data.path", "out")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 100_000, id="deep-list"),
        pytest.param('{"format":' * 100_000, id="deep-object"),
        pytest.param('{"format": "weft-tokens", "version": ' + "1" * 5000 + "}", id="5000-digits"),
        pytest.param("null", id="null"),
        pytest.param("\x00", id="nul"),
    ],
)
@pytest.mark.parametrize("door", DOORS)
def test_a_manifest_that_is_no_document(text: str, door: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    MANIFEST.write_text(text)
    assert "out/manifest.json is not a manifest of prepared data: the file " in refused(capsys, *door)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"\xff", id="not-utf-8"),
        pytest.param(b"{", id="cut"),
    ],
)
def test_a_file_of_a_tokenizer_that_is_no_object(name: str, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("out/tokenizer")
    if name == "config.json":  # of the model, where the tokenizer's own names no class
        Path(folder, "tokenizer_config.json").unlink()
    Path(folder, name).write_bytes(content)
    said = refused(capsys, "data", "prepare", "books", "--tokenizer", str(folder), "--output", "new")
    assert f"out/tokenizer/{name} is no tokenizer: the file " in said
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        pytest.param("tokenizer.json", "added_tokens", 3, id="added-a-number"),
        pytest.param("tokenizer.json", "added_tokens", [{"id": 1}], id="added-without-content"),
        pytest.param("tokenizer.json", "added_tokens", [{"content": "a", "id": 1, "special": "false"}], id="flag"),
        pytest.param("tokenizer.json", "pre_tokenizer", "ByteLevel", id="pre-tokenizer-a-string"),
        pytest.param("tokenizer.json", "normalizer", [], id="normalizer-a-list"),
        pytest.param("tokenizer_config.json", "added_tokens_decoder", {"x": {"content": "a"}}, id="no-number"),
        pytest.param("tokenizer_config.json", "added_tokens_decoder", {"1": "a"}, id="token-a-string"),
        pytest.param("tokenizer_config.json", "added_tokens_decoder", {"1": {"content": None}}, id="token-null"),
        pytest.param("tokenizer_config.json", "additional_special_tokens", 7, id="additional-a-number"),
        pytest.param("tokenizer_config.json", "eos_token", ["</s>"], id="end-a-list"),
        pytest.param("tokenizer_config.json", "add_bos_token", "false", id="bool-a-string"),
        pytest.param("tokenizer_config.json", "tokenizer_class", {}, id="class-an-object"),
        pytest.param("special_tokens_map.json", "eos_token", {"content": 3}, id="content-a-number"),
        pytest.param("special_tokens_map.json", "additional_special_tokens", [3], id="additional-numbers"),
        pytest.param("added_tokens.json", "<a>", "7", id="added-number-a-string"),
        pytest.param("added_tokens.json", "<a>", [1], id="added-number-a-list"),
    ],
)
def test_a_value_of_another_type_in_a_tokenizer(name: str, key: str, value: object) -> None:
    path = Path("out/tokenizer", name)
    there = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**there, key: value}))
    with pytest.raises(ValueError, match=f"out/tokenizer has no tokenizer that can be used: {name}"):
        find_tokenizer(Path("out/tokenizer"))


@pytest.mark.parametrize("content", [{"of": 3}, {"shard": []}, [], {"of": "x", "shard": {"number": 0}}])
def test_a_record_of_progress_that_is_another_is_made_again(content: Any) -> None:
    whole = {path.name: path.read_bytes() for path in Path("out").glob("*.bin")}
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    Path("new").mkdir()
    prepare([Path("books")], Path("new"), tokenizer=byte_tokenizer())
    Path("new/manifest.json").unlink()
    for path in (Path("new/part-00000.json"), Path("new/progress.json")):
        path.write_text(json.dumps({"sha256": digest, "holds": content}))
    with pytest.raises(ValueError, match=r"progress\.json is not as it was written; remove new"):
        prepare([Path("books")], Path("new"), tokenizer=byte_tokenizer())
    Path("new/progress.json").unlink()
    for path in Path("new").iterdir():
        if path.is_file():
            path.unlink()
    for path in Path("new/tokenizer").iterdir():
        path.unlink()
    Path("new/tokenizer").rmdir()
    prepare([Path("books")], Path("new"), tokenizer=byte_tokenizer())
    assert {path.name: path.read_bytes() for path in Path("new").glob("*.bin")} == whole
    assert read_manifest(Path("new")).shards == read_manifest(Path("out")).shards
