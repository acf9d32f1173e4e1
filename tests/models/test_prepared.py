"""A complete prepared folder, and the message when it is damaged or does not fit the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from weft.models.cli import train as train_command
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.sources import check_share, find_data
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.test_bad_data import weft
from tests.support.sample import Portion


@pytest.fixture(autouse=True)
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("Call me by my layout. " * 40)
    Path("other.txt").write_text("Call me by another. " * 40)
    Path("nothing").mkdir()
    prepare([Path("good.txt")], Path("out"), tokenizer=byte_tokenizer())
    monkeypatch.setattr(train_command, "launch", lambda run, gpus: 0)


def test_a_prepared_folder_is_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = weft(capsys, "train", "--data.path", "out")
    assert (status, err) == (0, "")
    assert "layers, on out; " in out


def test_a_shard_that_is_too_short_is_said_when_it_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("out/tokens-00000.bin").open("r+b") as file:
        file.truncate(1000)
    for command in (("train", "--data.path", "out"), ("data", "verify", "out")):
        status, _, err = weft(capsys, *command)
        assert status == 2
        assert "out/tokens-00000.bin has 1000 bytes, and the manifest says 1762; copy it again" in err


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin", "tokenizer/tokenizer.json"])
def test_a_flipped_bit_is_found_by_verify(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft(capsys, "data", "verify", "out")[0] == 0
    content = bytearray(Path("out", name).read_bytes())
    content[3] ^= 4
    Path("out", name).write_bytes(content)
    status, _, err = weft(capsys, "data", "verify", "out")
    assert status == 2
    assert f"out/{name} is not what was prepared: its SHA-256 differs; copy it again" in err


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("change", ["changed", "missing"])
def test_a_tokenizer_that_is_another_is_not_trained_with(
    change: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer would be saved with every checkpoint. The given folder has all files that a tokenizer may have."""
    assert weft(capsys, "data", "train-tokenizer", "good.txt", "--vocab-size", "270", "--output", "bpe")[0] == 0
    Path("bpe/special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert weft(capsys, "data", "prepare", "good.txt", "--tokenizer", "bpe", "--output", "other")[0] == 0
    command = ("train", "--data.path", "other", "--model.vocab-size", "270")
    assert weft(capsys, *command)[0] == 0
    path = Path("other/tokenizer", name)
    value = json.loads(path.read_text())
    path.unlink()
    if change == "changed":
        path.write_text(json.dumps({**value, "pad_token": "<|endoftext|>"}))
    for each in (command, ("data", "verify", "other")):
        status, _, err = weft(capsys, *each)
        assert status == 2
        assert f"{path} is not what was prepared: its SHA-256 differs; copy it again" in err


@pytest.mark.exhaustive
def test_a_file_that_was_put_beside_the_tokenizer_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/tokenizer/special_tokens_map.json").write_text('{"eos_token": "x"}')
    for each in (("train", "--data.path", "out"), ("data", "verify", "out")):
        status, _, err = weft(capsys, *each)
        assert status == 2
        assert "out/tokenizer/special_tokens_map.json was not written by weft data prepare; remove it" in err


@pytest.mark.parametrize("number", [0, 3])
def test_a_flipped_bit_is_found_by_the_rank_whose_share_it_is(number: int) -> None:
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


def test_a_flipped_bit_of_the_manifest_is_found_or_changes_nothing(portion: Portion) -> None:
    """Spaces between the manifest's parts, and its checksum's name, say nothing of the data."""
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


def test_a_manifest_without_a_sum_is_read() -> None:
    """Manifests of older versions have no checksum."""
    path, manifest = Path("out/manifest.json"), read_manifest(Path("out"))
    content = json.loads(path.read_text())
    del content["sha256"]
    path.write_text(json.dumps(content))
    assert read_manifest(Path("out")) == manifest
    path.write_text(json.dumps({**content, "shards": None}))
    with pytest.raises(ValueError, match=r"manifest\.json lacks a part"):
        read_manifest(Path("out"))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin", "tokenizer/tokenizer.json"])
def test_a_missing_file_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out", name).unlink()
    status, _, err = weft(capsys, "train", "--data.path", "out")
    assert status == 2
    assert re.search(f"{Path(name).name}", err)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"version": 2}, "manifest.json is of version 2; this reads version 1: update weft", id="newer"),
        pytest.param({"format": "other"}, "manifest.json is not a manifest of prepared data", id="another-format"),
        pytest.param({"shards": None}, "manifest.json was changed after it was written; copy it again", id="changed"),
        pytest.param(None, "manifest.json is not a manifest of prepared data", id="no-json"),
    ],
)
def test_a_manifest_that_is_another_is_refused(
    change: dict[str, object] | None, message: str, capsys: pytest.CaptureFixture[str]
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
        pytest.param(
            "--data.sequence-length 450 --model.max-seq-len 512",
            "out has 881 tokens, fewer than two sequences of data.sequence_length 450",
            id="fewer-than-two-sequences",
        ),
        pytest.param("--model.vocab-size 256", "model.vocab_size 256 is below 257", id="bytes"),
        pytest.param("--data.mixture out=1", "data.path out and data.mixture are both given", id="both"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_fit_its_data_is_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = weft(capsys, "train", "--data.path", "out", *arguments.split())
    if "256 " in f"{arguments} " and "sequence" in arguments:  # two sequences of 256 and more: it fits
        assert status == 0
    else:
        assert status == 2
        assert message in err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        pytest.param("--data.path small.txt --data.batch-size 119", None, id="enough"),
        pytest.param(
            "--data.path small.txt --data.batch-size 120",
            "a step takes 120 sequences of small.txt, which has 119 to train on: some are taken 2 times in it",
            id="one-too-few",
        ),
        pytest.param(
            "--data.path small.txt --data.batch-size 4096",
            "a step takes 4,096 sequences of small.txt, which has 119 to train on: some are taken 35 times in it",
            id="few",
        ),
        pytest.param(
            "--data.mixture small.txt=1 good.txt=3 --data.batch-size 512",
            "a step takes 128 sequences of small.txt, which has 119 to train on: some are taken 2 times in it",
            id="one-of-a-mixture",
        ),
    ],
)
def test_a_step_that_takes_more_than_there_is_says_so(
    arguments: str, note: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("small.txt").write_text("x" * 1000)  # and the end: 1,001 tokens, of which 125 sequences are made, 6 held out
    Path("good.txt").write_text("Call me by my layout. " * 200)
    command = ("train", *arguments.split(), "--data.sequence-length", "8", "--mesh.dp", "1", "--mesh.tp", "1")
    status, out, err = weft(capsys, *command)
    assert (status, err) == (0, "")
    said = [line for line in out.splitlines() if "to train on" in line]
    assert said == ([f"{note}; give more text, or a smaller --data.batch-size"] if note else [])


@pytest.mark.exhaustive
def test_a_vocabulary_larger_than_the_models_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert weft(capsys, "data", "train-tokenizer", "good.txt", "--vocab-size", "270", "--output", "bpe")[0] == 0
    assert weft(capsys, "data", "prepare", "good.txt", "--tokenizer", "bpe", "--output", "other")[0] == 0
    size = find_data(Path("other")).tokenizer.vocab_size
    status, _, err = weft(capsys, "train", "--data.path", "other")
    assert status == 2
    assert f"model.vocab_size 257 is below {size}: the tokens of other; give --model.vocab-size {size} or more" in err
    status, _, err = weft(capsys, "train", "--data.mixture", "out=1", "other=1")
    assert status == 2
    assert "data.mixture: other and out have different tokenizers; prepare both with one" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            ["other.txt", "--output", "out"], "out holds other data, prepared from good.txt", id="another-whole"
        ),
        pytest.param(["good.txt", "--output", "nothing/.."], "exists and holds something else", id="something-else"),
        pytest.param(["good.txt", "--output", "good.txt"], "the output folder good.txt cannot be made: ", id="a-file"),
        pytest.param(
            ["good.txt", "--output", "/proc/x"],
            "the output folder /proc/x cannot be made: No such file or directory; give another --output\n",
            id="nobody-writes-there",
        ),
    ],
)  # fmt: skip
def test_an_output_that_is_taken_is_refused_and_left(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("out/manifest.json").read_bytes()
    status, _, err = weft(capsys, "data", "prepare", *given)
    assert status == 2
    assert message in err
    assert Path("out/manifest.json").read_bytes() == before
    assert weft(capsys, "data", "prepare", "good.txt", "--output", "out")[0] == 0  # it is whole: nothing to do
