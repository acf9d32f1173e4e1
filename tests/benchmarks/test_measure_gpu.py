"""The command for a day with a GPU: its pieces, their order and time limits, and how they end, fail and continue."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import history, measure_gpu
from benchmarks.measure_gpu import DONE, FAILED, OUT_OF_TIME, PIECES, UNFINISHED, Piece, due, main, measure, merge
from benchmarks.products import FORMATS
from tests.architecture.rules import ROOT

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
CALL = 560  # seconds of a call, where a machine gives ten minutes


def python(name: str, program: str, seconds: int = 60, **more: Any) -> Piece:
    return Piece(name, ("-c", program), seconds, **more)


def test_on_one_gpu_all_takes_33_minutes_in_four_calls() -> None:
    here = [each for each in PIECES if each.gpus == 1]
    assert sum(each.seconds for each in here) <= 33 * 60
    calls, left = 1, CALL
    for each in here:
        if each.seconds > left:
            calls, left = calls + 1, CALL
        assert each.seconds <= left
        left -= each.seconds
    assert calls == 4


def test_no_piece_takes_ten_minutes_and_names_are_unique() -> None:
    assert all(each.seconds < 600 for each in PIECES)
    assert len({each.name for each in PIECES}) == len(PIECES)


def test_kernels_are_tested_then_tuned_then_timed() -> None:
    first = {
        kind: next(i for i, each in enumerate(PIECES) if each.name.startswith(kind)) for kind in ("tune", "benchmark")
    }
    assert all(i < first["tune"] for i, each in enumerate(PIECES) if each.name.startswith("test"))
    assert all(
        i < first["benchmark"]
        for i, each in enumerate(PIECES)
        if each.name in ("tune-bf16", "tune-fp8", "tune-attention")
    )
    formats = {word for each in PIECES if "benchmarks.tune_matmul" in each.command for word in each.command}
    assert {*FORMATS} <= formats


def test_every_test_that_needs_a_gpu_is_in_one_piece_at_least() -> None:
    marked = {
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b(?!`)|\bdevice: str\b", path.read_text())
    }
    paths = [
        Path(word) for each in PIECES if each.name.startswith("test-") for word in each.command if word[:6] == "tests/"
    ]
    assert all((ROOT / path).exists() for path in paths)
    kernels = {each for each in marked if each.is_relative_to("tests/kernels")}
    assert kernels and all(any(each.is_relative_to(path) for path in paths) for each in kernels)
    others = {path for path in marked - kernels if "pytest.mark.gpu\n" in (ROOT / path).read_text()}
    assert others <= set(paths)


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_a_piece_names_what_exists(piece: Piece) -> None:
    for word in piece.command:
        path = ROOT / word.removeprefix("--ignore=")
        assert path.exists() or not word.removeprefix("--ignore=").startswith(("tests/", "benchmarks/"))
        assert not word.startswith("benchmarks.") or (ROOT / f"{word.replace('.', '/')}.py").exists()


def test_a_piece_that_cannot_run_here_says_why() -> None:
    alone = Piece("a", (), 1, needs=("no_such_module",))
    assert alone.left_out(1) == "no_such_module not installed"
    assert Piece("a", (), 1, gpus=4).left_out(2) == "it takes 4 GPUs, and there are 2"
    assert Piece("a", (), 1, needs=("torch",)).left_out(1) is None


def test_new_pieces_come_before_pieces_that_go_on() -> None:
    pieces = [
        Piece("done", (), 1), Piece("goes-on", (), 1, goes_on=True), Piece("over", (), 1),
        Piece("failed", (), 1), Piece("new", (), 1), Piece("two", (), 1, gpus=2),
    ]  # fmt: skip
    states = {"done": DONE, "goes-on": OUT_OF_TIME, "over": OUT_OF_TIME, "failed": FAILED}
    assert [each.name for each in due(pieces, states, 1)] == ["new", "goes-on", "failed"]


@pytest.mark.exhaustive
def test_pieces_end_fail_and_run_out_of_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pieces = [
        python("well", "print('it is well')"),
        python("fails", "raise SystemExit(1)"),
        python("unfinished", f"raise SystemExit({UNFINISHED})"),
        python("hangs", "import time; print('hangs', flush=True); time.sleep(600)", seconds=1),
    ]
    told = measure(pieces, tmp_path / "kept", out=tmp_path / "out")
    states = {name: each["state"] for name, each in told.items()}
    assert states == {"well": DONE, "fails": FAILED, "unfinished": OUT_OF_TIME, "hangs": OUT_OF_TIME}
    assert told["hangs"]["seconds"] < 60
    assert "it is well" in capfd.readouterr().out
    assert json.loads((tmp_path / "out/pieces.json").read_text()) == told
    assert "== hangs\nhangs" in (tmp_path / "out/log.txt").read_text()
    assert (tmp_path / "out/measured.json").exists() and (tmp_path / "out/attention.json").exists()


def test_a_call_begins_what_fits_and_the_next_goes_on(tmp_path: Path) -> None:
    pieces = [python("first", "", 6), python("second", "", 60)]
    first = measure(pieces, tmp_path, seconds=7)
    assert {*first} == {"first"}
    left = due(pieces, {name: each["state"] for name, each in first.items()}, 1)
    assert {*measure(left, tmp_path, seconds=100)} == {"first", "second"}


def told_run(cases: list[str]) -> dict[str, Any]:
    """As pytest-benchmark writes it."""
    head = {"datetime": "2026-01-02T03:04:05+00:00", "commit_info": {"id": "a" * 40, "dirty": False}}
    machine = {"device": "a GPU", "python_version": "3.12"}
    named = [{"name": case, "group": "g", "fullname": "f", "stats": {}} for case in cases]
    extra = {"way": "Weft", "kind": "time", "status": "measured", "seconds_median": 1.0}
    return head | {
        "machine_info": machine,
        "benchmarks": [each | {"extra_info": extra | {"case": each["name"]}} for each in named],
    }


def test_the_measurements_of_all_pieces_are_kept_as_one_run(tmp_path: Path) -> None:
    assert merge(tmp_path) is None
    (tmp_path / "products.json").write_text(json.dumps(told_run(["a product"])))
    (tmp_path / "layers.json").write_text(json.dumps(told_run(["a layer"])))
    run = merge(tmp_path)
    assert run is not None
    kept = json.loads(history.add(run, results=tmp_path / "results").read_text())
    assert kept["device"] == "a GPU" and [each["name"] for each in kept["cases"]] == ["a layer", "a product"]


@NO_GPU
def test_a_dry_run_says_what_would_be_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_gpu, "measure", lambda *arguments: pytest.fail("it ran"))
    main(["--dry-run"])
    shown = capsys.readouterr().out
    assert re.search(r"tune-bf16 +240 s  python -m benchmarks.tune_matmul --dtype bf16 --seconds 210\n", shown)
    assert "tune-in-steps-2 is left out: it takes 2 GPUs" in shown


@NO_GPU
def test_without_a_gpu_nothing_is_run() -> None:
    with pytest.raises(SystemExit, match="there is no GPU to measure on"):
        main([])


def test_a_piece_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune-int4"])
    assert "no piece is named tune-int4; give one of test-products" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_benchmark_that_ends_early_says_so(tmp_path: Path) -> None:
    """By pytest's exit status."""
    piece = Piece("a", ("-m", "pytest", "-q", "--within=0", "benchmarks/test_mesh.py"), 100)
    assert measure([piece], tmp_path)["a"]["state"] == OUT_OF_TIME
