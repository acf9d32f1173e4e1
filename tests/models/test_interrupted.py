"""`weft data prepare`, ended at any moment: the same command goes on, to the same bytes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from weft.models.data.manifest import read_manifest
from weft.models.data.prepare import prepare
from weft.models.data.tokenizer import byte_tokenizer

from tests.models.texts import TEXTS, contents, write_jsonl, write_text
from tests.support.sample import Portion


@pytest.fixture(autouse=True)
def disk_that_needs_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync of this disk may take longer than all else here."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@dataclass
class Killed(BaseException):
    """Stands for SIGKILL: nothing is cleaned up."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> Iterator[None]:
    """Raise Killed inside the block when a file is about to be renamed to a name containing `name`.

    after: how many such files are renamed before. The process id is faked, so that leftovers belong to another
    process.
    """
    renamed, rename = 0, os.rename

    def ending(source: str, target: Path) -> None:
        nonlocal renamed
        renamed += name in str(target)
        if renamed > after:
            raise Killed
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "rename", ending)
        patch.setattr(os, "getpid", lambda: 1)
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_an_interrupted_preparation_goes_on_to_the_same_bytes(
    after: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in the middle of a shard, by any number of workers."""
    given = write_jsonl(tmp_path / "in", TEXTS)
    make = {"tokenizer": byte_tokenizer(), "part_bytes": 300}
    prepare([given], tmp_path / "whole", **make)
    with killed(monkeypatch, "tokens-", after):
        prepare([given], tmp_path / "out", **make)
    assert not (tmp_path / "out/manifest.json").exists()
    assert len(list((tmp_path / "out").glob("part-*.json"))) == after
    with pytest.raises(ValueError, match="out holds no prepared data: No such file"):
        read_manifest(tmp_path / "out")
    kept = {name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("tokens-*") for name in [file.name]}
    prepare([given], tmp_path / "out", workers=workers, **make)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == time for name, time in kept.items()), "made once"
    prepare([given], tmp_path / "out", **make)  # and again, there is nothing to do
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["progress", "documents-", "part-", "tokenizer.json", "tokenizer_config", "manifest"])
def test_a_preparation_ended_at_any_file_goes_on_to_the_same_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is written under a temporary name; a leftover neither blocks the next preparation nor stays."""
    given = write_jsonl(tmp_path / "in", TEXTS)
    prepare([given], tmp_path / "whole", tokenizer=byte_tokenizer(), part_bytes=300)
    with killed(monkeypatch, name):
        prepare([given], tmp_path / "out", tokenizer=byte_tokenizer(), part_bytes=300)
    (aside,) = (tmp_path / "out").rglob(".*.partial-1")
    assert aside.name.startswith(f".{name}")
    prepare([given], tmp_path / "out", tokenizer=byte_tokenizer(), part_bytes=300)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_strangers_partial_file_stays(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.letter.partial-1").touch()
    with pytest.raises(ValueError, match="exists and holds something else"):
        prepare([write_jsonl(tmp_path / "in", TEXTS)], tmp_path / "out", tokenizer=byte_tokenizer())
    assert set(contents(tmp_path / "out")) == {".letter.partial-1"}


@pytest.mark.parametrize("output", ["in/out", "in/deep/out", "in/../in/out"])
def test_an_output_within_an_input_is_none(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, resumed and called once more, the output equals an output elsewhere."""
    monkeypatch.chdir(tmp_path)
    write_text(Path("in"), TEXTS)
    make = {"tokenizer": byte_tokenizer(), "part_bytes": 200}
    prepare([Path("in")], Path("aside"), **make)
    with killed(monkeypatch, "tokens-", 2):
        prepare([Path("in")], Path(output), **make)
    for _ in range(2):
        prepare([Path("in")], Path(output), **make)
        assert contents(Path(output)) == contents(Path("aside"))
    with pytest.raises(ValueError, match="in exists and holds something else"):
        prepare([Path("in")], Path("in"), **make)


class TestRecords:
    """A preparation is interrupted, and a bit of its progress records is flipped."""

    @pytest.fixture(autouse=True)
    def interrupted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Interrupted after two shards, with more to come."""
        monkeypatch.chdir(tmp_path)
        write_jsonl(Path("in"), TEXTS)
        self.prepare(Path("whole"))
        with killed(monkeypatch, "tokens-", 2):
            self.prepare(Path("out"))
        self.whole = contents(Path("out"))

    def prepare(self, output: Path) -> None:
        prepare([Path("in.jsonl")], output, tokenizer=byte_tokenizer(), part_bytes=300)

    def again(self) -> None:
        for name in contents(Path("out")).keys() - self.whole.keys():
            Path("out", name).unlink()
        for name, content in self.whole.items():
            Path("out", name).write_bytes(content)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("name", ["progress.json", "part-00000.json"])
    def test_any_flipped_bit_changes_nothing_in_the_end(self, name: str, portion: Portion) -> None:
        """Work whose record does not fit is done again."""
        for at in portion.of(range(len(self.whole[name])), every=20):
            self.again()
            content = bytearray(self.whole[name])
            content[at] ^= 1 << at % 8
            Path("out", name).write_bytes(content)
            self.prepare(Path("out"))
            assert contents(Path("out")) == contents(Path("whole")), content.decode(errors="replace")

    @pytest.mark.parametrize("name", ["progress.json", "part-00000.json"])
    @pytest.mark.parametrize(
        ("pattern", "becomes"),
        [
            pytest.param(rb"[{]", b"[", id="structure"),
            pytest.param(rb'": ', b'":0', id="separator"),
            pytest.param(rb'"request"|"tokens"', b'"rfquest"', id="key"),
            pytest.param(rb'("part_bytes"|"tokens"): \d', rb"\1: 9", id="count"),
            pytest.param(rb'"of"|"modified"', b'"og"', id="another-key"),
            pytest.param(rb".*", b"", id="empty"),
            pytest.param(rb".*", b"[]", id="list"),
            pytest.param(rb".*", b"\xff", id="no-text"),
        ],
    )
    def test_a_record_that_was_changed_changes_nothing_in_the_end(
        self, name: str, pattern: bytes, becomes: bytes
    ) -> None:
        changed, count = re.subn(pattern, becomes, self.whole[name], count=1)
        assert count == 1 and changed != self.whole[name]
        Path("out", name).write_bytes(changed)
        self.prepare(Path("out"))
        assert contents(Path("out")) == contents(Path("whole"))

    @pytest.mark.parametrize("name", ["tokens-00000.bin", "documents-00000.bin"])
    def test_a_shard_that_was_cut_or_is_gone_is_made_again(self, name: str) -> None:
        for change in (lambda path: os.truncate(path, 8), Path.unlink):
            self.again()
            change(Path("out", name))
            self.prepare(Path("out"))
            assert contents(Path("out")) == contents(Path("whole"))

    def test_a_beginning_that_no_record_tells_is_refused_and_left(self) -> None:
        """The files may be another preparation's, or another program's."""
        Path("out/progress.json").write_text("{}")
        for path in Path("out").glob("part-*.json"):
            path.unlink()
        before = contents(Path("out"))
        with pytest.raises(
            ValueError, match=r"out/progress\.json is not as it was written; remove out, or give another"
        ):
            self.prepare(Path("out"))
        assert contents(Path("out")) == before

    @pytest.mark.parametrize("name", ["tokens-00000.bin", "manifest.json"])
    def test_a_whole_folder_that_was_damaged_says_what_to_remove(self, name: str) -> None:
        before = contents(Path("whole"))
        os.truncate(Path("whole", name), 8)
        with pytest.raises(ValueError, match=r"whole/.*; (copy it again, or )?remove the folder and prepare it again$"):
            self.prepare(Path("whole"))
        shutil.rmtree("whole")
        self.prepare(Path("whole"))
        assert contents(Path("whole")) == before


@pytest.mark.exhaustive
def test_a_command_that_was_killed_goes_on(tmp_path: Path) -> None:
    """The processes themselves, by SIGKILL, at moments of all kinds; with another count of workers each time."""
    given = write_jsonl(tmp_path / "in", [text * 500 for text in TEXTS])
    prepare([given], tmp_path / "whole", tokenizer=byte_tokenizer(), part_bytes=1 << 20)
    command = [
        sys.executable,
        "-m",
        "weft.models.cli",
        "data",
        "prepare",
        str(given),
        "--output",
        str(tmp_path / "out"),
        "--shard-mib",
        "1",
    ]
    killed = 0
    for attempt in range(40):
        process = subprocess.Popen([*command, "--workers", str(attempt % 3 + 1)], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 0.3 * attempt
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        elif process.returncode == 0:
            break
        process.wait()
    assert process.returncode == 0 and killed
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
