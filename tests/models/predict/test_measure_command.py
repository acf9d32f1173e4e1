"""`weft measure` as a command: bad input, the output, and the end by a signal or a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.cli import measure as measure_command
from weft.models.predict.chip import Chip, Product, Rate, load_chip
from weft.models.predict.measure import Measuring

from tests.support import preloaded
from tests.support.limits import PATIENCE


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(["--processes", "0"], "--processes is 0; give 1 to 256", id="no-process"),
        pytest.param(["--processes", "100000"], "--processes is 100000; give 1 to 256", id="many"),
        pytest.param(["--seconds", "nan"], "--seconds is nan; give more than 0, and at most 3600", id="nan"),
        pytest.param(["--seconds", "-1"], "--seconds is -1; give more than 0", id="negative"),
        pytest.param(["--seconds", "1e9"], "--seconds is 1e+09; give more than 0, and at most 3600", id="years"),
        pytest.param(["--output", "here"], "--output here does not end in .toml; name it here.toml", id="suffix"),
        pytest.param(
            ["--output", "no/here.toml"], "cannot be written: No such file or directory; give a file", id="no-folder"
        ),
        pytest.param(["--output", f"{'x' * 300}.toml"], "cannot be written: File name too long; give", id="long"),
        pytest.param(["--output", f"{'x' * 250}.toml"], "cannot be written: File name too long; give", id="long-aside"),
        pytest.param(["--output", "a.txt/here.toml"], "cannot be written: Not a directory; give a", id="in-a-file"),
        pytest.param(["--output", "folder.toml"], "--output folder.toml is no plain file; give another", id="a-folder"),
    ],
)
def test_input_that_cannot_be_used_is_one_line(
    arguments: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "a.txt").touch()
    monkeypatch.setattr(measure_command, "measure", lambda measuring: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["measure", *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("weft measure: ") and error in err
    assert {each.name for each in tmp_path.iterdir()} == {"folder.toml", "a.txt"}


def test_a_folder_without_the_right_to_write_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(measure_command, "check_writable", refused)  # root may write to any folder
    monkeypatch.setattr(measure_command, "measure", lambda measuring: pytest.fail("measured"))
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--output", str(tmp_path / "here.toml")])
    assert ended.value.code == 2
    assert "here.toml cannot be written: Permission denied; give a file in a folder" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_at_the_end_is_a_line_after_the_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(measure_command, "write_anew", full)
    monkeypatch.setattr(measure_command, "measure", lambda measuring: measured())
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--output", str(tmp_path / "here.toml")])
    signal.signal(signal.SIGTERM, before)
    out, err = capsys.readouterr()
    assert ended.value.code == 1 and "us an op" in out
    assert err == f"weft measure: {tmp_path / 'here.toml'} cannot be written: No space left on device\n"


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_ends_its_processes_and_leaves_the_file(
    sent: signal.Signals, tmp_path: Path
) -> None:
    """Once the processes measure: with a line for Ctrl-C, silently for SIGTERM."""
    (tmp_path / "here.toml").write_text("of an earlier measurement")
    command = [sys.executable, "-m", "weft.models.cli", "measure", "--output", "here.toml", "--processes", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = preloaded.Popen(command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    while " s  copies: " not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(sent)
    out, err = process.communicate(timeout=PATIENCE)  # ends only once no process holds the pipes
    assert process.returncode == 128 + sent
    assert err.strip() == ("weft measure: interrupted; what was saved is whole" if sent == signal.SIGINT else "")
    assert "wrote" not in out
    assert [each.name for each in tmp_path.iterdir()] == ["here.toml"]
    assert (tmp_path / "here.toml").read_text() == "of an earlier measurement"


def test_a_gpu_each(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure_command, "gpu_count", lambda: 4)
    with pytest.raises(SystemExit):
        main(["measure", "--processes", "8"])
    assert "--processes is 8, and this machine has 4 GPUs; give 4 or less" in capsys.readouterr().err


def measured() -> Chip:
    return replace(
        load_chip("h100"),
        name="this machine",
        source="measured today",
        threads=1,
        collective_host_seconds=7e-5,
        ops={"attention.forward.float32": Rate(seconds=1e-6, seconds_per_flop=2e-12)},
        products=(Product(dtype="float32", M=8, N=8, K=8, seconds=1e-6),),
        collectives={"all-reduce": Rate(seconds=1e-5, seconds_per_byte=1e-9), "recv": Rate(seconds=1e-5)},
    )


def test_the_measured_chip_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Measuring] = []

    def measure(measuring: Measuring) -> Chip:
        asked.append(measuring)
        return measured()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(measure_command, "gpu_count", lambda: 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.25, 0.0, 0.0))
    monkeypatch.setattr(measure_command, "measure", measure)
    monkeypatch.chdir(tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (tmp_path / "chip-here.toml").symlink_to(outside)
    with pytest.raises(SystemExit) as ended:
        main(["measure", "--seconds", "7", "--processes", "3"])
    assert ended.value.code == 0
    signal.signal(signal.SIGTERM, before)
    out = capsys.readouterr().out
    assert asked == [Measuring(processes=3, seconds=7.0, gpus=0)]
    assert load_chip(tmp_path / "chip-here.toml") == measured() and outside.read_text() == "kept"
    assert "other programs keep 3.2 cores busy; the measured times will be too long" in out
    assert "us an op, 70 us a collective" in out
    assert "all-reduce               10 us and 1.00 GB/s" in out
    assert "attention                forward 1 us + 2.0 ps an operation" in out
    assert out.endswith("wrote chip-here.toml; weft explain --chip chip-here.toml predicts a step here\n")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_short_measurement_writes_a_file_for_predictions(tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft.models.cli", "measure", "--seconds", "0.5", "--output", "here.toml"]
    result = subprocess.run(
        [*command, "--processes", "2"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280
    )
    assert (result.returncode, result.stderr) == (0, "")
    chip = load_chip(tmp_path / "here.toml")
    assert chip.threads == 1 and chip.crowding >= 1 and "measured" in chip.source
    assert 1e8 < chip.peak("float32") < 1e13 and 1e8 < chip.memory_bandwidth < 1e13
    kinds = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "recv", "all-reduce of gradients"}
    assert kinds == set(chip.collectives)
    assert all(rate.time(2**20) > 0 for rate in chip.collectives.values())
    for name in ("linear", "attention", "rms_norm", "swiglu_linear", "cross_entropy"):
        rate = chip.rate(name, "forward", "float32")
        assert rate is not None and (rate.adds_products or 0 < rate.time(2**20, 2**24) < 10)
        # On a CPU, the loss computes its gradient in forward.
        part = "forward" if name == "cross_entropy" else "backward"
        assert chip.rate(name, part, "bfloat16") is not None
    assert 1e-6 < chip.collective_host_seconds < 1e-2
    assert chip.link(2, 1)[1] < 1e12 and 0 <= chip.levels[0].slowdown <= 1
    assert 0 <= chip.host_seconds < 1e-2
