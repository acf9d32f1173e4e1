"""Tokens around each document of a prepared folder: by the options, and by the manifest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weft.models.cli import main
from weft.models.data.batches import Batches
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import byte_tokenizer, find_tokenizer

from tests.models.test_tokens import saved

TEXTS = ["the warp", "<s>the weft</s>", " a loom"]


@pytest.fixture(autouse=True)
def disk_that_needs_no_sync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sync of this disk may take longer than all else here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def prepared(*options: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["data", "prepare", "in.jsonl", "--output", "out", "--workers", "1", *options])
    assert isinstance(end.value.code, int)
    return end.value.code


def documents() -> list[list[int]]:
    tokens, ends = np.fromfile("out/tokens-00000.bin", np.uint16), np.fromfile("out/documents-00000.bin", np.uint64)
    assert ends[-1] == len(tokens)
    return [part.tolist() for part in np.split(tokens, ends.astype(int))[:-1]]


# The tokenizer, the options, the names of the tokens before and after each document, and the message.
CASES: dict[str, tuple[str, list[str], list[str], list[str], str]] = {
    "bos-by-template": ("byte-level-with-template", [], ["<s>"], ["</s>"], "begins with token 1 and ends with token 2"),
    "bos-and-eos-by-template": (
        "byte-level-template-of-both",
        [],
        ["<s>"],
        ["</s>"],
        "begins with token 1 and ends with token 2",
    ),
    "bos-by-class": ("llama-2", [], ["<s>"], ["</s>"], "begins with token 1 and ends with token 2"),
    "none-by-template": ("byte-level-with-an-ignored-option", [], [], ["</s>"], "ends with token 2"),
    "no-bos": ("byte-level-with-template", ["--no-bos"], [], ["</s>"], "ends with token 2"),
    "bos-that-a-prompt-has-not": (
        "byte-level-with-an-ignored-option",
        ["--bos"],
        ["<s>"],
        ["</s>"],
        "begins with token 1 and ends with token 2",
    ),
    "bos-that-a-prompt-has": ("llama-2", ["--bos"], ["<s>"], ["</s>"], "begins with token 1 and ends with token 2"),
    "no-eos": ("llama-2", ["--no-eos"], ["<s>"], [], "begins with token 1 and has no end"),
    "neither": ("llama-2", ["--no-eos", "--no-bos"], [], [], "has no end"),
    "eos": ("llama-2", ["--eos", "--no-bos"], [], ["</s>"], "ends with token 2"),
    "another-end": (
        "llama-2",
        ["--end", "<|im_end|>"],
        ["<s>"],
        ["<|im_end|>"],
        "begins with token 1 and ends with token 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_document_has_around_it_what_the_options_say(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, options, before, after, said = CASES[name]
    Path("tokenizer").mkdir()
    saved(kind, Path("tokenizer"))
    assert prepared("--tokenizer", "tokenizer", *options) == 0
    assert f"in 1 shard; each document {said}\n" in capsys.readouterr().out
    found = find_tokenizer(Path("tokenizer"))
    import tokenizers

    numbers = tokenizers.Tokenizer.from_file("tokenizer/tokenizer.json").token_to_id
    begin, end = list(map(numbers, before)), list(map(numbers, after))
    assert documents() == [[*begin, *found.encode_document(text), *end] for text in TEXTS]
    assert find_data(Path("out")).begin == tuple(begin)
    manifest = read_manifest(Path("out"))
    assert (manifest.request["before_each"], manifest.request["after_each"]) == (begin, end)


@pytest.mark.parametrize("options", [[], ["--no-bos"], ["--no-eos"]], ids=str)
def test_a_document_begins_as_a_prompt_does_unless_an_option_says_otherwise(options: list[str]) -> None:
    Path("tokenizer").mkdir()
    found = find_tokenizer(saved("llama-2", Path("tokenizer")))
    assert prepared("--tokenizer", "tokenizer", *options) == 0
    assert (documents()[0][: len(found.encode("the warp"))] == found.encode("the warp")) == ("--no-bos" not in options)


def test_documents_without_ends_are_kept_apart() -> None:
    texts = ["abc", "de", "f" * 9] * 20
    Path("in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([Path("in.jsonl")], Path("out"), tokenizer=byte_tokenizer(), eos=False)
    data = find_data(Path("out"))
    assert data.num_tokens == sum(map(len, texts))
    rows = Batches(data, sequence_length=20, batch_size=2, seed=0, packed=True).batch(0, slice(None))
    assert rows.positions is not None and rows.documents is not None
    for tokens, positions in zip(rows.tokens.tolist(), rows.positions.tolist(), strict=True):
        for place in range(1, 20):
            begins = bytes(tokens[place : place + 1]) in (b"a", b"d") or (tokens[place - 1], tokens[place]) == (*b"ef",)
            assert (positions[place] == 0) == begins


def test_other_options_are_another_preparation(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tokenizer").mkdir()
    saved("llama-2", Path("tokenizer"))
    assert prepared("--tokenizer", "tokenizer") == 0
    assert prepared("--tokenizer", "tokenizer") == 0
    assert prepared("--tokenizer", "tokenizer", "--no-bos") == 2
    assert "out holds other data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("qwen2", ["--bos"], "--bos puts the tokenizer's bos_token before each document, and the tokenizer names none"),
        (None, ["--bos"], "--bos puts the tokenizer's bos_token before each document, and the tokenizer names none"),
        ("llama-2", ["--bos", "--no-bos"], "--bos and --no-bos are both given; give only one"),
    ],
)
def test_a_bos_that_there_is_not_is_refused(
    kind: str | None, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tokenizer").mkdir()
    more: list[Any] = [] if kind is None else ["--tokenizer", str(saved(kind, Path("tokenizer")))]
    assert prepared(*more, *options) == 2
    assert message in capsys.readouterr().err and not Path("out").exists()


def test_beginnings_and_ends_of_documents_are_no_bytes_of_a_text(tmp_path: Path) -> None:
    found = find_tokenizer(saved("llama-2", tmp_path))
    tokens = [*found.begin, *found.encode_document("the weft"), found.end]
    assert found.num_bytes(tokens) == found.num_bytes(found.encode_document("the weft")) == len(b"the weft")
