"""Data that nobody promised: what each command says and does."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from weft.models.cli import main
from weft.models.cli import train as train_command
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.sources import check_share, find_data
from weft.models.data.tokenizer import byte_tokenizer

from tests.support.sample import Portion

GOOD = '{"text": "good"}\n'


def weft(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The status of a command, and what it wrote."""
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
        pytest.param("no-json.jsonl", "no-json.jsonl: the line at byte 17 is not JSON; mend it, or leave such out with --skip-bad", id="no-json"),
        pytest.param("deep.jsonl", "deep.jsonl: the line at byte 0 is not JSON", id="deep-json"),
        pytest.param("no-field.jsonl", "the line at byte 17 has no field 'text'", id="no-field"),
        pytest.param("list.jsonl", "the line at byte 0 has no field 'text'", id="no-object"),
        pytest.param("number.jsonl", "has no text in its field 'text', but int", id="no-text"),
        pytest.param("null.jsonl", "has no text in its field 'text', but null", id="null"),
        pytest.param("latin.jsonl", "the line at byte 17 is not UTF-8 (its byte 11)", id="line-not-utf-8"),
        pytest.param("half.jsonl", "has half a surrogate pair in its field 'text'", id="half-a-character"),
        pytest.param("table.parquet", "table.parquet has no column 'text'; give one of body, n with --column", id="no-column"),
        pytest.param("table.parquet --column n", "column 'n' is int64, not text; give another with --column", id="column-of-numbers"),
        pytest.param("torn.parquet", "torn.parquet is not a Parquet file: ", id="torn-parquet"),
        pytest.param("good.txt --tokenizer nowhere", "nowhere has no tokenizer.json", id="no-tokenizer"),
        pytest.param("good.txt --end </s>", "but bytes end with 256; give a tokenizer too", id="end-of-bytes"),
        pytest.param("good.txt --workers 0", "--workers is 0; it must be 1 or more", id="no-workers"),
    ],
)  # fmt: skip
def test_what_cannot_be_prepared_is_one_line_and_leaves_nothing_that_is_taken_as_whole(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = weft(capsys, "data", "prepare", *arguments.split(), "--output", "out")
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("weft data prepare: ") and message in line
    assert not Path("out/manifest.json").exists()


def test_what_is_wrong_in_a_process_of_several_is_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
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
        err
        == "weft data prepare: no-json.jsonl: the line at byte 17 is not JSON; mend it, or leave such out with --skip-bad\n"
    )


@pytest.mark.parametrize("name", ["no-json", "no-field", "latin", "null", "half"])
def test_bad_lines_are_left_out_where_that_is_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = weft(capsys, "data", "prepare", f"{name}.jsonl", "good.txt", "--skip-bad", "--output", "out")
    assert status == 0
    assert "left out 0 empty documents, 1 bad line, 0 files" in out


def test_what_is_left_out_is_counted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert len(ends) == 10  # the line lies in all of them, and belongs to the one in which it begins
    assert lengths == ([5, 10_000_001, 5] if kind == "bytes" else [lengths[0], 2_000_002, lengths[0]])


class TestPrepared:
    """A folder that was whole, and what is said once it is not."""

    @pytest.fixture(autouse=True)
    def prepared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prepare([Path("good.txt")], Path("out"), tokenizer=byte_tokenizer())
        monkeypatch.setattr(train_command, "launch", lambda run, gpus: 0)

    def test_it_is_trained_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, err = weft(capsys, "train", "--data.path", "out")
        assert (status, err) == (0, "")
        assert "layers, on out; " in out

    def test_a_shard_that_is_too_short_is_said_when_it_is_opened(self, capsys: pytest.CaptureFixture[str]) -> None:
        with Path("out/tokens-00000.bin").open("r+b") as file:
            file.truncate(1000)
        for command in (("train", "--data.path", "out"), ("data", "verify", "out")):
            status, _, err = weft(capsys, *command)
            assert status == 2
            assert "out/tokens-00000.bin has 1000 bytes, and the manifest says 1762; copy it again" in err

    @pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin", "tokenizer/tokenizer.json"])
    def test_a_flipped_bit_is_found_by_verify(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert weft(capsys, "data", "verify", "out")[0] == 0
        content = bytearray(Path("out", name).read_bytes())
        content[3] ^= 4
        Path("out", name).write_bytes(content)
        status, _, err = weft(capsys, "data", "verify", "out")
        assert status == 2
        assert f"out/{name} is not what was prepared: its SHA-256 differs; copy it again" in err

    @pytest.mark.parametrize("number", [0, 3])
    def test_a_flipped_bit_is_found_by_the_rank_whose_share_it_is(self, number: int) -> None:
        """Three ranks of a run read of the files of four shards each once."""
        prepare([Path("good.txt")] * 4, Path("four"), tokenizer=byte_tokenizer(), part_bytes=100)
        data = find_data(Path("four"))
        sizes = [path.stat().st_size for path in Path("four").glob("*.bin")]
        assert len(sizes) == 2 * 4
        shares = [check_share(data, rank, 3) for rank in range(3)]
        assert sum(shares) == sum(sizes) and max(shares) == sum(sizes) // 2
        with Path(f"four/tokens-{number:05}.bin").open("r+b") as file:
            file.write(b"!")
        with pytest.raises(
            ValueError, match=rf"four/tokens-0000{number}\.bin is not what was prepared: its SHA-256 differs"
        ):
            check_share(data, 0, 3)
        assert [check_share(data, rank, 3) for rank in (1, 2)] == shares[1:]

    def test_a_flipped_bit_of_the_manifest_is_found_or_changes_nothing(self, portion: Portion) -> None:
        """Spaces between its parts, and the name of its own sum, say nothing of the data."""
        path, whole, found = Path("out/manifest.json"), Path("out/manifest.json").read_bytes(), 0
        manifest = read_manifest(Path("out"))
        for bit in portion.of(range(8 * len(whole)), every=40):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            try:
                assert read_manifest(Path("out")) == manifest
            except ValueError as error:
                assert str(error).startswith("out")
                found += 1
        assert found

    def test_a_manifest_without_a_sum_is_read(self) -> None:
        """As those are that were written before it had one."""
        path, manifest = Path("out/manifest.json"), read_manifest(Path("out"))
        content = json.loads(path.read_text())
        del content["sha256"]
        path.write_text(json.dumps(content))
        assert read_manifest(Path("out")) == manifest
        path.write_text(json.dumps({**content, "shards": None}))
        with pytest.raises(ValueError, match=r"manifest\.json lacks a part"):
            read_manifest(Path("out"))

    @pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin", "tokenizer/tokenizer.json"])
    def test_a_missing_file_is_named(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("out", name).unlink()
        status, _, err = weft(capsys, "train", "--data.path", "out")
        assert status == 2
        assert re.search(f"{Path(name).name}", err)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            pytest.param(
                {"version": 2}, "manifest.json is of version 2; this reads version 1: update weft", id="newer"
            ),
            pytest.param({"format": "other"}, "manifest.json is not a manifest of prepared data", id="another-format"),
            pytest.param(
                {"shards": None}, "manifest.json was changed after it was written; copy it again", id="changed"
            ),
            pytest.param(None, "manifest.json is not a manifest of prepared data", id="no-json"),
        ],
    )
    def test_a_manifest_that_is_another_is_refused(
        self, change: dict[str, object] | None, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        manifest = Path("out/manifest.json")
        content = json.loads(manifest.read_text())
        manifest.write_text("{" if change is None else json.dumps({**content, **change}))
        status, _, err = weft(capsys, "train", "--data.path", "out")
        assert status == 2
        assert message in err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param("--data.sequence-length 256", "out has 881 tokens", id="enough"),
            pytest.param("--data.sequence-length 450 --model.max-seq-len 512", "out has 881 tokens, fewer than two sequences of data.sequence_length 450", id="fewer-than-a-batch"),
            pytest.param("--model.vocab-size 256", "model.vocab_size 256 is below 257", id="bytes"),
            pytest.param("--data.mixture out=1", "data.path out and data.mixture are both given", id="both"),
        ],
    )  # fmt: skip
    def test_a_run_that_does_not_fit_its_data_is_refused(
        self, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, _, err = weft(capsys, "train", "--data.path", "out", *arguments.split())
        if "256 " in f"{arguments} " and "sequence" in arguments:  # two sequences of 256 and more: it fits
            assert status == 0
        else:
            assert status == 2
            assert message in err

    def test_a_vocabulary_larger_than_the_models_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert weft(capsys, "data", "train-tokenizer", "good.txt", "--vocab-size", "270", "--output", "bpe")[0] == 0
        assert weft(capsys, "data", "prepare", "good.txt", "--tokenizer", "bpe", "--output", "other")[0] == 0
        size = find_data(Path("other")).tokenizer.vocab_size
        status, _, err = weft(capsys, "train", "--data.path", "other")
        assert status == 2
        assert (
            f"model.vocab_size 257 is below {size}: the tokens of other; give --model.vocab-size {size} or more" in err
        )
        status, _, err = weft(capsys, "train", "--data.mixture", "out=1", "other=1")
        assert status == 2
        assert "data.mixture: other and out have different tokenizers; prepare both with one" in err

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            pytest.param(["latin.jsonl", "--skip-bad", "--output", "out"], "out holds other data, prepared from good.txt", id="another-whole"),
            pytest.param(["good.txt", "--output", "nothing/.."], "exists and holds something else", id="something-else"),
            pytest.param(["good.txt", "--output", "good.txt"], "good.txt cannot be made: ", id="a-file"),
            pytest.param(["good.txt", "--output", "/proc/x"], "/proc/x cannot be made: ", id="nobody-writes-there"),
        ],
    )  # fmt: skip
    def test_an_output_that_is_taken_is_refused_and_left(
        self, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = Path("out/manifest.json").read_bytes()
        status, _, err = weft(capsys, "data", "prepare", *given)
        assert status == 2
        assert message in err
        assert Path("out/manifest.json").read_bytes() == before
        assert weft(capsys, "data", "prepare", "good.txt", "--output", "out")[0] == 0  # it is whole: nothing to do


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
        "out cannot be made: [Errno 28] No space left on device; once that is mended, the same command goes on"
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
