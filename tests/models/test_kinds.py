"""Files of every kind: the documents in each, whatever its name, and files refused by name."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from weft.models.cli import main
from weft.models.data.batches import Batches
from weft.models.data.inputs import Columns, find_parts
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.sources import Records, find_data
from weft.models.data.text import Corpus
from weft.models.data.tokenizer import BYTE_END, byte_tokenizer

TEXTS = ["one, two", 'wärp "and" weft ☃', "a\nb\r\nc\ttab", "four" * 30]


@pytest.fixture(autouse=True)
def disk_that_needs_no_sync(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sync of this disk may take longer than all else here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.chdir(tmp_path)


def records(field: str = "text") -> list[dict[str, Any]]:
    return [{"n": n, field: text} for n, text in enumerate(TEXTS)]


def lines(field: str = "text") -> str:
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in records(field))


def table(delimiter: str, field: str = "text") -> str:
    with open("made", "w+", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([["n", field], *([n, text] for n, text in enumerate(TEXTS))])
        file.seek(0)
        found = file.read()
    os.remove("made")
    return found


def parquet(field: str = "text") -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"n": range(len(TEXTS)), field: TEXTS}), sink)
    return bytes(sink.getvalue())


WRITTEN: dict[str, Callable[..., Any]] = {
    "a.jsonl": lines,
    "a.JSONL": lines,
    "a.ndjson": lines,
    "train.json": lines,  # as `datasets` writes it
    "a.Json": lambda field="text": json.dumps(records(field), indent=1),
    "b.json": lambda field="text": json.dumps(records(field)),
    "a.csv": lambda field="text": table(",", field),
    "a.CSV": lambda field="text": table(",", field),
    "a.tsv": lambda field="text": table("\t", field),
    "a.parquet": parquet,
    "a.PARQUET": parquet,
    "a.pq": parquet,
}


def write(name: str, content: str | bytes) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def documents(folder: str | Path = "out") -> list[str]:
    """The documents of a prepared folder of bytes."""
    found: list[str] = []
    for number in range(len(read_manifest(Path(folder)).shards)):
        tokens = np.fromfile(Path(folder, f"tokens-{number:05}.bin"), dtype=np.uint16)
        ends = np.fromfile(Path(folder, f"documents-{number:05}.bin"), dtype=np.uint64).astype(int)
        found += [bytes(part[:-1].astype(np.uint8)).decode() for part in np.split(tokens, ends)[:-1]]
    return found


def weft(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status, out, err = weft(capsys, *arguments)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("part_bytes", [40, 10**6])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_record_is_a_document_by_any_name(name: str, part_bytes: int) -> None:
    prepare([write(name, WRITTEN[name]())], Path("out"), tokenizer=byte_tokenizer(), part_bytes=part_bytes)
    assert documents() == TEXTS


@pytest.mark.parametrize("name", WRITTEN)
def test_a_run_is_trained_on_the_texts_of_records(name: str) -> None:
    data = find_data(write(name, WRITTEN[name]()))
    assert isinstance(data, Records) and (data.prompt, data.is_prepared) == ("one, two ", False)
    tokens = [token for text in TEXTS for token in (*text.encode(), BYTE_END)]
    stream = data.open()
    assert (data.num_tokens, stream.num_tokens) == (len(tokens), len(tokens))
    assert stream.read(0, len(tokens)).tolist() == tokens
    ends = [place + 1 for place, token in enumerate(tokens) if token == BYTE_END]
    assert stream.document_ends(0, len(tokens)).tolist() == ends
    assert [stream.document_start(place) for place in (0, ends[0] - 1, ends[0], len(tokens) - 1)] == [
        0,
        0,
        ends[0],
        ends[2],
    ]


def test_batches_of_records_are_those_of_the_same_texts_in_files() -> None:
    texts = [f"{'chapter ' * (n % 5)}{n}" for n in range(40)]
    for number, text in enumerate(texts):
        write(f"files/{number:03}.txt", text)
    write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    both = [Batches(find_data(Path(name)), sequence_length=9, batch_size=4, seed=1) for name in ("files", "a.jsonl")]
    for step in range(20):
        one, other = (each.batch(step, slice(None)) for each in both)
        assert one.tokens.tolist() == other.tokens.tolist() and one.targets.tolist() == other.targets.tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WRITTEN)
def test_a_field_that_is_missing_is_an_error_that_lists_those_there_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the command with the right one follows."""
    write(name, WRITTEN[name]("body"))
    line = refused(capsys, "data", "prepare", name, "--output", "out", "--workers", "1")
    assert name in line and "'text'" in line and "n, body" in line and ("--field" in line or "--column" in line)
    assert not Path("out").exists()
    assert f"data.path: {name}" in (line := refused(capsys, "train", "--data.path", name))
    assert "n, body" in line and "weft data prepare" in line
    assert weft(capsys, "data", "prepare", name, "--output", "out", "--field", "body")[0] == 0
    assert documents() == TEXTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failed_preparation_does_not_block_the_next(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a part was complete, and where the failed preparation had been interrupted."""
    write("a.txt", "good " * 300_000)
    write("b.jsonl", lines("body"))
    command = ["data", "prepare", "a.txt", "b.jsonl", "--output", "deep/out", "--shard-mib", "1", "--workers", workers]
    assert "b.jsonl: line 1, at byte 0, has no field 'text'" in refused(capsys, *command)
    assert not Path("deep/out").exists()
    assert weft(capsys, *command, "--field", "body")[0] == 0
    assert documents("deep/out")[1:] == TEXTS


class TestRefused:
    @pytest.mark.exhaustive
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            (
                "a.jsonl.gz",
                gzip.compress(b"{}"),
                "a.jsonl.gz is compressed by gzip, not text in UTF-8; unpack the file first",
            ),
            ("a.txt", gzip.compress(b"text"), "a.txt is compressed by gzip"),
            ("a.jsonl", gzip.compress(b"text"), "a.jsonl is compressed by gzip"),
            ("a.bz2", bz2.compress(b"text"), "a.bz2 is compressed by bzip2"),
            ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04", "a.jsonl.zst is compressed by zstd"),
            ("a.data", parquet, "a.data is a Parquet file, not text in UTF-8; name it .parquet"),
            (
                "a.txt",
                "Kette".encode("utf-16"),
                "a.txt is text in UTF-16 or UTF-32, not text in UTF-8; convert it to UTF-8",
            ),
            ("a.csv", b"\xfe\xff\x00t", "a.csv is text in UTF-16"),
            ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "a.jsonl is text in UTF-16 or UTF-32"),
            ("a", b"text\x00text", "a is binary (byte 4 is 0), not text in UTF-8"),
            ("data", lines, "data holds JSON, but has the suffix ''; name it .jsonl"),
            ("a.jsonlines", lines, "a.jsonlines holds JSON, but has the suffix '.jsonlines'; name it .jsonl"),
            ("a.dat", lambda: json.dumps(records()), "a.dat holds JSON"),
            ("a.geojson", '{\n "type": "FeatureCollection"\n}', "a.geojson holds JSON"),
            (
                "a.json",
                '{\n "data": []\n}',
                "a.json holds no records: neither a list of objects nor an object in each line",
            ),
            ("a.json", "[1, 2]", "a.json holds no records"),
            ("a.json", "Call me Ishmael.", "a.json holds no records"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    def test_a_file_that_was_named(
        self, name: str, content: Any, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(name, content() if callable(content) else content)
        for command in (("data", "prepare", name, "--output", "out"), ("train", "--data.path", name)):
            assert message in refused(capsys, *command)
        assert not Path("out").exists()

    @pytest.mark.few(1)
    @pytest.mark.parametrize("name", ["data", "a.dat", "a.JSONLINES"])
    def test_records_in_a_folder_under_another_name(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        write("in/a.txt", "text")
        write(f"in/{name}", lines())
        assert f"in/{name} holds JSON" in refused(capsys, "data", "prepare", "in", "--output", "out")
        assert f"in/{name} holds JSON" in refused(capsys, "train", "--data.path", "in")
        status, out, _ = weft(capsys, "data", "prepare", "in", "--output", "out", "--skip-bad")
        assert status == 0 and f"1 file not in UTF-8: in/{name}" in out and documents() == ["text"]

    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}\n{"text" "c"}\n', "a.jsonl: line 4, at byte 29, is not JSON"),
            (
                "a.jsonl",
                '{"text": "a"}\n{"text": null}\n',
                "a.jsonl: line 2, at byte 14, has no text in its field 'text', but null",
            ),
            (
                "a.json",
                '[{"text": "a"}, {"id": 1}]',
                "a.json: item 2 has no field 'text' (it has id: name one with --field)",
            ),
            ("a.json", '[{"text": "a"}, 7]', "a.json: item 2 has no field 'text': it is int, not an object"),
            ("a.json", '[{"text": 4}]', "a.json: item 1 has no text in its field 'text', but int"),
            ("a.json", '[{"text": "a"}', "a.json begins as a list of objects, and is not JSON: "),
            ("a.csv", 'id,text\n1,a\n2,"b\nb"\n3\n', "a.csv: row 3 has 1 values, and there are 2 columns"),
            ("a.csv", 'text,id,text\n', "a.csv has 2 columns 'text'; give one of text, id, text with --column"),
            ("a.csv", b"id,text\n1,caf\xe9\n", "a.csv is not UTF-8 (byte 13 of the file); convert it"),
            ("a.csv", 'id,text\n1,"a', "a.csv is no table of comma- or tab-separated values: unexpected end of data"),
            ("a.csv", "id;text\n1;a\n", "a.csv has no column 'text'; give one of id;text with --column"),
        ],
        ids=lambda value: value if isinstance(value, str) and " " not in value else "",
    )  # fmt: skip
    def test_a_record_without_a_text(
        self, name: str, content: str | bytes, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(name, content)
        assert message in refused(capsys, "data", "prepare", name, "--output", "out", "--workers", "1")
        assert message in refused(capsys, "train", "--data.path", name)

    @pytest.mark.exhaustive
    def test_the_number_of_a_line_is_that_of_the_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Also where the file is read in parts."""
        write("a.jsonl", '{"text": "a"}\n' * 200_000 + "{\n")
        line = refused(capsys, "data", "prepare", "a.jsonl", "--output", "out", "--shard-mib", "1", "--workers", "1")
        assert "a.jsonl: line 200001, at byte 2800000, is not JSON" in line


@pytest.mark.parametrize(("name", "bad"), [("a.jsonl", 2), ("a.json", 2), ("a.csv", 1)])
def test_records_without_a_text_are_left_out_where_that_is_asked_for(
    name: str, bad: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Any] = [{"text": "a"}, {"text": None}, {"id": 3}, {"text": ""}, {"text": "b"}]
    content = {
        "a.jsonl": "".join(json.dumps(each) + "\n" for each in found),
        "a.json": json.dumps(found),
        "a.csv": "id,text\n1,a\n2\n3,\n4,b\n",
    }[name]
    write(name, content)
    status, out, _ = weft(capsys, "data", "prepare", name, "--output", "out", "--skip-bad")
    assert status == 0 and documents() == ["a", "b"]
    assert f"left out 1 empty document, {bad} bad line" in out


class TestFolders:
    def test_records_and_texts_of_one_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        write("in/a.txt", "text")
        write("in/b.jsonl", lines())
        write("in/c/d.csv", table(","))
        write("in/settings.json", '{\n "indent": 2\n}\n')
        write("in/one.json", '{"indent": 2}\n')
        write("in/list.json", "[1, 2]")
        write("in/code.py", "def weave(): ...\n")
        write("in/data.gz", gzip.compress(b"x"))
        expected = ["text", *TEXTS, *TEXTS, "def weave(): ...\n", "[1, 2]", '{"indent": 2}\n', '{\n "indent": 2\n}\n']
        status, out, _ = weft(capsys, "data", "prepare", "in", "--output", "out")
        assert status == 0 and documents() == expected
        assert "left out 0 empty documents, 0 bad lines, 1 file not in UTF-8: in/data.gz" in out
        data = find_data(Path("in"))
        assert isinstance(data, Records) and data.skipped == (Path("in/data.gz"),)
        assert data.num_tokens == sum(len(text.encode()) + 1 for text in expected)

    def test_a_folder_of_source_code_is_text(self) -> None:
        """Every module of a package here, and settings beside."""
        root = Path("mesh")
        shutil.copytree(Path(__file__).parents[2] / "packages/mesh", root, ignore=shutil.ignore_patterns("__pycache__"))
        data = find_data(root)
        assert isinstance(data, Corpus) and not data.skipped and len(data.files) > 5
        assert isinstance(find_data(None), Corpus)

    def test_links_to_files_are_followed(self) -> None:
        """As in Hugging Face's cache, names link to files without a suffix."""
        blob = write("blobs/0a1b2c", lines())
        Path("snapshot").mkdir()
        Path("snapshot/train.jsonl").symlink_to(blob.resolve())
        prepare([Path("snapshot")], Path("out"), tokenizer=byte_tokenizer())
        prepare([Path("snapshot/train.jsonl")], Path("other"), tokenizer=byte_tokenizer())
        assert documents("out") == documents("other") == TEXTS

    def test_entries_that_are_no_files_are_named_and_counted(self, capsys: pytest.CaptureFixture[str]) -> None:
        write("in/a.txt", "text")
        write("elsewhere/b.txt", "other")
        os.mkfifo("in/pipe")
        Path("in/gone.txt").symlink_to("nowhere.txt")
        Path("in/more").symlink_to(Path("elsewhere").resolve())
        with socket.socket(socket.AF_UNIX) as served:
            served.bind("in/socket")
            status, out, _ = weft(capsys, "data", "prepare", "in", "--output", "out", "--workers", "1")
        assert status == 0 and documents() == ["text"]
        assert (
            "passed over 4 entries: in/gone.txt (a link to nothing), in/more (a link to a folder), "
            "in/pipe (a fifo), ..." in out
        )
        assert read_manifest(Path("out")).shards[0].passed[-1] == "in/socket (a socket)"
        assert find_data(Path("in")).passed[:2] == ("in/gone.txt (a link to nothing)", "in/more (a link to a folder)")

    def test_a_pipe_that_was_named_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        os.mkfifo("pipe")
        for command in (("data", "prepare", "pipe", "--output", "out"), ("train", "--data.path", "pipe")):
            assert "pipe is a fifo; give a file, or a folder of files" in refused(capsys, *command)

    def test_an_output_within_and_hidden_entries_are_no_input(self) -> None:
        for name in ("in/a.txt", "in/out/b.txt", "in/.git/c.txt", "in/.d.txt"):
            write(name, name)
        found = find_parts([Path("in")], Columns(), 1 << 20, leave_out=Path("in/out"))
        assert [piece.path for part in found for piece in part] == [Path("in/a.txt")]


class TestByteOrderMarks:
    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "b.json", "a.csv"])
    def test_a_mark_is_no_part_of_a_text(self, name: str) -> None:
        content = "one" if name == "a.txt" else str(WRITTEN.get(name, lines)())
        write(name, b"\xef\xbb\xbf" + content.encode())
        prepare([Path(name)], Path("out"), tokenizer=byte_tokenizer())
        expected = ["one"] if name == "a.txt" else TEXTS
        assert documents() == expected
        assert find_data(Path(name)).num_tokens == sum(len(text.encode()) + 1 for text in expected)

    def test_a_corpus_of_text_is_read_without_marks(self) -> None:
        for number, text in enumerate(["\ufefffirst", "second", "\ufeff", "\ufeff\ufeffthird"]):
            write(f"in/{number}.txt", text)
        data = find_data(Path("in"))
        expected = [*b"first", BYTE_END, *b"second", BYTE_END, *"\ufeffthird".encode(), BYTE_END]
        assert isinstance(data, Corpus) and data.num_tokens == len(expected)
        stream = data.open()
        assert stream.read(0, len(expected)).tolist() == expected
        assert stream.read(3, 9).tolist() == expected[3:9]
        write("one.txt", "first")
        write("mark.txt", "\ufefffirst")
        assert find_data(Path("one.txt")).sha256 == find_data(Path("mark.txt")).sha256
