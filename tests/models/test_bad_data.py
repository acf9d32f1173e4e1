"""Unexpected data: the output and the status of each command."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from weft.models.cli import main

GOOD = '{"text": "good"}\n'


def weft(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit status of a command, and its output to both streams."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero.txt").touch()
    Path("zero.jsonl").touch()
    Path("latin.txt").write_bytes("Käse".encode("latin-1"))
    Path("nothing").mkdir()
    Path("pictures").mkdir()
    Path("pictures/a.png").write_bytes(b"\x89PNG")
    Path("no-json.jsonl").write_text(GOOD + "{text: 1}\n" + GOOD)
    Path("no-field.jsonl").write_text(GOOD + '{"body": "x"}\n')
    Path("list.jsonl").write_text("[1]\n")
    Path("number.jsonl").write_text('{"text": 3}\n')
    Path("null.jsonl").write_text('{"text": null}\n')
    Path("latin.jsonl").write_bytes(GOOD.encode() + '{"text": "Käse"}\n'.encode("latin-1"))
    Path("half.jsonl").write_text('{"text": "\\ud83d"}\n')
    Path("deep.jsonl").write_text("[" * 100_000 + "\n")
    Path("empty.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    Path("torn.parquet").write_bytes(b"PAR1 and no more")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), "table.parquet")
    Path("good.txt").write_text("Call me by my layout. " * 40)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("zero.txt", "zero.txt hold no text; give files that do", id="zero-bytes"),
        pytest.param("zero.jsonl", "zero.jsonl hold no text", id="zero-bytes-jsonl"),
        pytest.param("nothing", "nothing hold no text", id="empty-folder"),
        pytest.param("nowhere", "nowhere does not exist; give files, or folders of them", id="missing"),
        pytest.param("", "no INPUT is given; give files", id="none-given"),
        pytest.param("latin.txt", "latin.txt is not UTF-8 text (byte 1 of the file); convert it", id="not-utf-8"),
        pytest.param("pictures", "hold no text: 0 empty documents, 1 files that are not UTF-8", id="pictures-alone"),
        pytest.param("empty.jsonl", "hold no text: 3 empty documents, 0 files", id="empty-documents-alone"),
        pytest.param(
            "no-json.jsonl",
            "no-json.jsonl: line 2, at byte 17, is not JSON; mend the record, or skip bad records with --skip-bad",
            id="no-json",
        ),
        pytest.param("deep.jsonl", "deep.jsonl: line 1, at byte 0, is not JSON", id="deep-json"),
        pytest.param("no-field.jsonl", "line 2, at byte 17, has no field 'text'", id="no-field"),
        pytest.param("list.jsonl", "line 1, at byte 0, has no field 'text'", id="no-object"),
        pytest.param("number.jsonl", "has no text in its field 'text', but int", id="no-text"),
        pytest.param("null.jsonl", "has no text in its field 'text', but null", id="null"),
        pytest.param("latin.jsonl", "line 2, at byte 17, is not UTF-8 (its byte 11)", id="line-not-utf-8"),
        pytest.param("half.jsonl", "has half a surrogate pair in its field 'text'", id="half-a-character"),
        pytest.param(
            "table.parquet", "table.parquet has no column 'text'; give one of body, n with --column", id="no-column"
        ),
        pytest.param(
            "table.parquet --column n",
            "column 'n' is int64, not text; give another with --column",
            id="column-of-numbers",
        ),
        pytest.param("torn.parquet", "torn.parquet is not a Parquet file: ", id="torn-parquet"),
        pytest.param("good.txt --tokenizer nowhere", "nowhere has no tokenizer.json", id="no-tokenizer"),
        pytest.param("good.txt --end </s>", "but bytes end with 256; give a tokenizer too", id="end-of-bytes"),
        pytest.param("good.txt --workers 0", "--workers is 0; it must be 1 or more", id="no-workers"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_prepared_is_one_line_and_leaves_no_folder_taken_as_whole(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = weft(capsys, "data", "prepare", *arguments.split(), "--output", "out")
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("weft data prepare: ") and message in line
    assert not Path("out/manifest.json").exists()


@pytest.mark.exhaustive
def test_an_error_in_a_process_of_several_is_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "data",
        "prepare",
        *["good.txt"] * 4,
        "no-json.jsonl",
        "--output",
        "out",
        "--workers",
        "2",
        "--shard-mib",
        "1",
    )
    Path("good.txt").write_text("good " * 200_000)
    status, out, err = weft(capsys, *command)
    assert (status, out) == (2, "")
    assert (
        err == "weft data prepare: no-json.jsonl: line 2, at byte 17, is not JSON; "
        "mend the record, or skip bad records with --skip-bad\n"
    )


@pytest.mark.parametrize("name", ["no-json", "no-field", "latin", "null", "half"])
def test_bad_lines_are_left_out_where_that_is_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = weft(capsys, "data", "prepare", f"{name}.jsonl", "good.txt", "--skip-bad", "--output", "out")
    assert status == 0
    assert "left out 0 empty documents, 1 bad line, 0 files" in out


def test_left_out_files_are_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    for name, content in {
        "a.txt": b"text",
        "b.txt": b"",
        "c.png": b"\x89PNG",
        "d.jsonl": b'{"text": ""}\n' + GOOD.encode(),
    }.items():
        Path("folder", name).write_bytes(content)
    status, out, _ = weft(capsys, "data", "prepare", "folder", "--output", "out")
    assert status == 0
    assert (
        out.splitlines()[0]
        == "prepared out: 2 documents, 10 tokens of 257 kinds, uint16, in 1 shard; each document ends with token 256"
    )
    assert out.splitlines()[1] == "left out 2 empty documents, 0 bad lines, 1 file not in UTF-8: folder/c.png"


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["bytes", pytest.param("bpe", marks=pytest.mark.exhaustive)])
def test_a_line_of_ten_megabytes_is_a_document(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("long.jsonl").write_text(GOOD + json.dumps({"text": "long line " * 1_000_000}) + "\n" + GOOD)
    tokenizer = []
    if kind == "bpe":  # each of the two words is a token
        Path("words.txt").write_text("long line " * 20)
        assert weft(capsys, "data", "train-tokenizer", "words.txt", "--vocab-size", "300", "--output", "bpe")[0] == 0
        tokenizer = ["--tokenizer", "bpe"]
    command = ("data", "prepare", "long.jsonl", "--shard-mib", "1", "--workers", "1", "--output", "out", *tokenizer)
    status, out, _ = weft(capsys, *command)
    assert (status, out[:26]) == (0, "prepared out: 3 documents,")
    ends = [np.fromfile(file, dtype=np.uint64).tolist() for file in sorted(Path("out").glob("documents-*"))]
    lengths = [int(length) for shard in ends for length in np.diff([0, *shard])]
    assert len(ends) == 10  # the line extends over all shards, and belongs to the shard in which it begins
    assert lengths == ([5, 10_000_001, 5] if kind == "bytes" else [lengths[0], 2_000_002, lengths[0]])


def test_inputs_that_have_changed_since_are_not_gone_on_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("weft.models.data.prepare._make_shards", lambda *arguments: exec("raise KeyboardInterrupt"))
        assert weft(capsys, "data", "prepare", "good.txt", "--output", "out")[0] == 130
    Path("good.txt").write_text("Call me by my layouts. " * 40)
    status, _, err = weft(capsys, "data", "prepare", "good.txt", "--output", "out")
    assert status == 2
    assert "out holds the beginning of another preparation" in err


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "data",
        "prepare",
        "good.txt",
        "no-field.jsonl",
        "--skip-bad",
        "--output",
        "out",
        "--shard-mib",
        "1",
        "--workers",
        "1",
    )
    synced = 0

    def full(file: int) -> None:
        nonlocal synced
        synced += 1
        if synced == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        status, _, err = weft(capsys, *command)
    assert status == 2
    (line,) = err.splitlines()
    assert line.endswith(
        "the output folder out: No space left on device; once that is mended, the same command goes on"
    )
    assert not Path("out/manifest.json").exists()
    assert weft(capsys, *command)[0] == 0
    assert weft(capsys, "data", "verify", "out")[0] == 0


def test_two_at_once_in_one_folder_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def meanwhile(*arguments: object) -> None:
        said.append(weft(capsys, "data", "prepare", "good.txt", "--output", "out"))
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.models.data.prepare._make_shards", meanwhile)
    assert weft(capsys, "data", "prepare", "good.txt", "--output", "out")[0] == 130
    assert said[0][0] == 2 and "out is being prepared by another process" in said[0][2]


@pytest.mark.parametrize(
    ("library", "arguments"),
    [
        pytest.param("pyarrow", "prepare table.parquet --output out", id="parquet"),
        pytest.param("pyarrow", "prepare . --skip-bad --output out", id="parquet-in-a-folder"),
        pytest.param("tokenizers", "train-tokenizer good.txt --vocab-size 300 --output out", id="tokenizers"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_remedy(
    library: str, arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("inputs", "tokenizer"):
        monkeypatch.setattr(f"weft.models.data.{module}.find_spec", lambda name: None)
    status, _, err = weft(capsys, "data", *arguments.split())
    assert status == 2
    assert f"{library} is not installed" in err and f"pip install {library}" in err
