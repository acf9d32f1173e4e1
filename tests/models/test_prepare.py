"""`weft data prepare`: the same bytes however it is run, and one line for unusable input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from weft.models.cli import main
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.shards import verify
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import BYTE_END, Tokenizer, byte_tokenizer, find_tokenizer

from tests.models.texts import TEXTS, contents, write_jsonl, write_parquet, write_text


@pytest.fixture(autouse=True)
def disk_that_needs_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync of this disk may take longer than all else here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def documents(folder: Path) -> list[list[int]]:
    """The documents of a prepared folder, each with its end, by numpy alone."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found: list[list[int]] = []
    for number in range(len(manifest["shards"])):
        tokens = np.fromfile(folder / f"tokens-{number:05}.bin", dtype=manifest["dtype"])
        ends = np.fromfile(folder / f"documents-{number:05}.bin", dtype=np.uint64).astype(int)
        found += [part.tolist() for part in np.split(tokens, ends)[:-1]]
        assert not len(tokens) or ends[-1] == len(tokens)
    return found


def as_bytes(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), BYTE_END] for text in texts if text]


KINDS = [write_text, write_jsonl, write_parquet]


@pytest.mark.parametrize("part_bytes", [30, 100, 10**6])
@pytest.mark.parametrize("write", KINDS, ids=["text", "jsonl", "parquet"])
def test_every_document_is_there_once_in_order_with_its_end(
    write: Callable[[Path, list[str]], Path], part_bytes: int, tmp_path: Path
) -> None:
    given = write(tmp_path / "in", TEXTS)
    manifest = prepare([given], tmp_path / "out", tokenizer=byte_tokenizer(), part_bytes=part_bytes)
    assert documents(tmp_path / "out") == as_bytes(TEXTS)
    assert manifest == read_manifest(tmp_path / "out") == verify(tmp_path / "out")
    assert manifest.dtype == "uint16" and manifest.end == BYTE_END
    assert (len(manifest.shards) == 1) == (part_bytes == 10**6)


def test_texts_are_taken_from_the_named_field_and_column(tmp_path: Path) -> None:
    """The files have further text fields, one with the default name."""
    files = [
        write_jsonl(tmp_path / "in", TEXTS, field="body", text="not this"),
        write_parquet(tmp_path / "in", TEXTS[::-1], column="content", text="nor this", body="nor that"),
    ]
    named = ["--field", "body", "--column", "content", "--workers", "1"]
    assert main_status(["data", "prepare", *map(str, files), "--output", str(tmp_path / "out"), *named]) == 0
    assert documents(tmp_path / "out") == as_bytes(TEXTS + TEXTS[::-1])
    assert main_status(["data", "prepare", str(files[0]), "--output", str(tmp_path / "others"), "--workers", "1"]) == 0
    assert documents(tmp_path / "others") == as_bytes(["not this"] * len(TEXTS))


def test_a_tokenizer_is_learned_from_the_field_that_is_named(tmp_path: Path) -> None:
    given = write_jsonl(tmp_path / "in", ["weft " * 9] * 5, field="body", text="zzzz " * 9)
    options = ["--vocab-size", "261", "--field", "body", "--output", str(tmp_path / "bpe")]
    assert main_status(["data", "train-tokenizer", str(given), *options]) == 0
    found = find_tokenizer(tmp_path / "bpe")
    assert len(found.encode("weft")) < 4 == len(found.encode("zzzz"))


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_is_told_until_everything_is_read(workers: int, tmp_path: Path) -> None:
    given = write_jsonl(tmp_path / "in", TEXTS)
    told: list[tuple[int, int]] = []
    prepare(
        *([given], tmp_path / "out"),
        tokenizer=byte_tokenizer(),
        part_bytes=300,
        workers=workers,
        progress=lambda done, total: told.append((done, total)),
    )
    size = given.stat().st_size
    assert told == sorted(told) and told[0] == (0, size) and told[-1] == (size, size)
    assert workers > 1 or len(told) > 5


def test_a_manifest_says_what_there_is(tmp_path: Path) -> None:
    prepare([write_jsonl(tmp_path / "in", ["one", "", "two"])], tmp_path / "out", tokenizer=byte_tokenizer())
    said = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (said["format"], said["version"], said["tokens"], said["documents"], said["empty"]) == (
        "weft-tokens",
        1,
        8,
        2,
        1,
    )
    assert set(contents(tmp_path / "out")) == {
        *(
            "manifest.json",
            "tokens-00000.bin",
            "documents-00000.bin",
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
        )
    }


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 tokens."""
    folder = tmp_path_factory.mktemp("learned")
    given = write_jsonl(folder / "in", TEXTS * 5)
    with pytest.raises(SystemExit) as end:
        main(["data", "train-tokenizer", str(given), "--vocab-size", "300", "--output", str(folder / "bpe")])
    assert end.value.code == 0
    return folder / "bpe"


class TestTokenizers:
    def test_a_tokenizer_that_was_learned_survives_its_text(self, learned: Path, tmp_path: Path) -> None:
        found = find_tokenizer(learned)
        assert found.end == 0 and 257 < found.vocab_size <= 300
        for text in [*TEXTS, "日本語 <|endoftext|> \x00", " a  b\n"]:
            tokens = found.encode_document(text)
            assert found.decode(tokens) == text
            assert found.end not in tokens  # a document that names the end does not end there
            assert len("".join(found.decode_each(tokens))) == len(text)
        prepare([write_text(tmp_path / "in", TEXTS)], tmp_path / "out", tokenizer=found, workers=2, part_bytes=200)
        assert documents(tmp_path / "out") == [[*found.encode(text), found.end] for text in TEXTS]
        assert find_data(tmp_path / "out").tokenizer == found

    @pytest.mark.parametrize("name", ["learned", "bytes"])
    def test_bytes_are_those_of_the_text_and_not_of_the_ends_of_documents(self, name: str, learned: Path) -> None:
        found = find_tokenizer(learned) if name == "learned" else byte_tokenizer()
        for text in [*TEXTS, "日本語 <|endoftext|>", ""]:
            tokens = found.encode_document(text)
            assert found.num_bytes([found.end, *tokens, found.end]) == len(text.encode())
        assert found.num_bytes(found.encode("語")[:-1]) in (2, 3), "what is cut"

    def test_learning_it_again_gives_the_same_files(self, learned: Path, tmp_path: Path) -> None:
        main_status(
            [
                "data",
                "train-tokenizer",
                str(learned.parent / "in.jsonl"),
                "--vocab-size",
                "300",
                "--output",
                str(tmp_path / "bpe"),
            ]
        )
        assert contents(tmp_path / "bpe") == contents(learned)

    @pytest.mark.exhaustive  # it imports transformers
    @pytest.mark.parametrize("name", ["learned", "bytes"])
    def test_transformers_reads_the_files_as_we_do(self, name: str, learned: Path, tmp_path: Path) -> None:
        import transformers

        found = find_tokenizer(learned) if name == "learned" else byte_tokenizer()
        for file, content in found.files:
            (tmp_path / file).write_bytes(content)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in TEXTS[:5]:
            assert theirs(text).input_ids == found.encode(text)
            assert theirs.decode(found.encode(text)) == text
        assert (theirs.eos_token_id, len(theirs)) == (found.end, found.vocab_size)
        assert find_tokenizer(tmp_path) == found

    def test_a_file_of_a_tokenizer_names_its_end(self, learned: Path) -> None:
        assert find_tokenizer(learned / "tokenizer.json").end == 0
        assert find_tokenizer(learned / "tokenizer.json", "chapter").end > 256

    @pytest.mark.exhaustive  # it imports transformers
    def test_an_end_that_was_named_goes_with_the_files(self, learned: Path, tmp_path: Path) -> None:
        import transformers

        found = find_tokenizer(learned, "chapter")
        prepare([write_text(tmp_path / "in", TEXTS)], tmp_path / "out", tokenizer=found)
        assert find_data(tmp_path / "out").tokenizer == found
        assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out/tokenizer").eos_token == "chapter"

    @pytest.mark.exhaustive  # it imports transformers
    def test_a_tokenizer_saved_by_transformers_is_the_same_tokenizer(self, learned: Path, tmp_path: Path) -> None:
        """With a chat template, and with bytes that transformers wrote anew."""
        import transformers

        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(learned)
        theirs.chat_template = "{{ messages }}"
        theirs.save_pretrained(tmp_path / "saved")
        found = find_tokenizer(tmp_path / "saved")
        assert [found.encode(text) for text in TEXTS] == [find_tokenizer(learned).encode(text) for text in TEXTS]
        assert found.end == 0
        assert json.loads(dict(found.files)["tokenizer_config.json"])["chat_template"] == "{{ messages }}"
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(json.loads(dict(byte_tokenizer().files)["tokenizer.json"]), indent=7)
        )
        assert find_tokenizer(tmp_path) == byte_tokenizer()

    def test_a_vocabulary_above_65536_takes_32_bits(self, tmp_path: Path) -> None:
        many = Tokenizer(byte_tokenizer().files, BYTE_END, 65537)
        assert prepare([write_text(tmp_path / "in", TEXTS)], tmp_path / "out", tokenizer=many).dtype == "uint32"
        assert documents(tmp_path / "out") == as_bytes(TEXTS)

    @pytest.mark.parametrize(
        ("content", "end", "message"),
        [
            pytest.param(None, None, "has no tokenizer.json; give one that the tokenizers library wrote", id="missing"),
            pytest.param("{", None, "tokenizer.json is no tokenizer: .*; save it again", id="no-json"),
            pytest.param(
                "learned", "<none>", "has no token '<none>'; name the token that is to follow", id="no-such-end"
            ),
        ],
    )
    def test_a_tokenizer_that_is_none_is_refused(
        self, content: str | None, end: str | None, message: str, learned: Path, tmp_path: Path
    ) -> None:
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(
                (learned / "tokenizer.json").read_text() if content == "learned" else content
            )
        with pytest.raises(ValueError, match=message):
            find_tokenizer(tmp_path, end)


def main_status(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code
