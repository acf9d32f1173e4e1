"""`weft train` as a user types it: what it prints, what it leaves, and how it ends when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from weft.models.cli import main

from tests.support.limits import PATIENCE

WEFT = (sys.executable, "-m", "weft.models.cli")
SMALL = ("--data.sequence-length", "32", "--data.batch-size", "4", "--optimizer.warmup-steps", "2")


def weft(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WEFT, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output and the folder of a short run on dp=2 x tp=2."""
    folder = tmp_path_factory.mktemp("run")
    done = weft("train", "--steps", "12", "--log-every", "4", "--save-every", "5", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (results,) = (folder / "outputs").iterdir()
    return done.stdout, results


def test_what_is_said_comes_in_order(run: tuple[str, Path]) -> None:
    said, _ = run
    expected = [
        r"^llama-tiny: Llama, 0\.85 M parameters, 4 layers, .*; cpu, gloo, 4 processes, mesh dp=2 x tp=2$",
        r"^layout of the parameters$",
        r"embed_tokens\.weight .* dp: R, tp: S\(0\)  shards \[129, 128\], \[128, 128\]$",
        r"^collectives a step, predicted from the plan$",
        r"^collectives of step 1, as issued$",
        r"^  forward    1 all-gather, 10 all-reduce +as predicted$",
        r"^  backward   9 all-reduce +as predicted$",
        r"^  gradients  2 all-reduce +as predicted$",
        r"^check  loss of step 1: ",
        r"^step  1/12  loss .*  grad norm .*  .* tokens/s  .* MiB$",
        r"^step  4/12  ",
        r"^step 12/12  ",
        r"^sample$",
        r"^loss .* -> .* in \d+ s$",
        r"^saved outputs",
        r"^next  weft generate outputs",
    ]
    position = 0
    for pattern in expected:
        match = re.compile(pattern, re.MULTILINE).search(said, position)
        assert match, f"{pattern} does not follow in:\n{said[position:]}"
        position = match.end()
    assert "NOT as predicted" not in said


def test_the_first_loss_is_that_of_one_process(run: tuple[str, Path]) -> None:
    match = re.search(r"check  loss of step 1: (\S+) on 4 processes, (\S+) on one", run[0])
    assert match
    assert float(match[1]) == pytest.approx(float(match[2]), rel=1e-6)


def test_the_loss_falls(run: tuple[str, Path]) -> None:
    metrics = [json.loads(line) for line in (run[1] / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(1, 13))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.5


def test_the_results_are_all_there(run: tuple[str, Path]) -> None:
    results = run[1]
    names = {"config.json", "metrics.jsonl", "plan.txt", "versions.json", "checkpoint", "checkpoint-5", "checkpoint-10"}
    assert {path.name for path in results.iterdir()} == names
    assert json.loads((results / "config.json").read_text())["steps"] == 12
    assert json.loads((results / "versions.json").read_text())["torch"]
    assert "layers.*.mlp.up_proj.weight: dp: R, tp: S(0)" in (results / "plan.txt").read_text()


def test_transformers_loads_the_checkpoint_with_the_same_logits(run: tuple[str, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from weft.models import from_pretrained

    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(run[1] / "checkpoint")
    with torch.no_grad():
        torch.testing.assert_close(
            from_pretrained(run[1] / "checkpoint")(tokens), theirs(tokens).logits, rtol=0, atol=1e-5
        )


def test_generate_goes_on_with_the_prompt(run: tuple[str, Path], tmp_path: Path) -> None:
    done = weft("generate", str(run[1] / "checkpoint"), "--prompt", "def ", "--tokens", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")


@pytest.mark.exhaustive
def test_another_mesh_another_text_one_loss_with_dropout(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("a", "b"):
        (text / f"{name}.txt").write_text(f"{name}: weft and warp, wärp and weft. " * 40)
    losses = []
    for mesh in (("1", "1"), ("1", "2"), ("2", "1")):
        arguments = ("--mesh.dp", mesh[0], "--mesh.tp", mesh[1], "--output", f"{mesh[0]}x{mesh[1]}")
        arguments += ("--model.dropout", "0.1", "--data.path", str(text))
        done = weft("train", "--steps", "3", *SMALL, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"{mesh[0]}x{mesh[1]}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.exhaustive
def test_processes_that_a_launcher_started_join_one_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "weft.models.cli", "train"),
            *("--steps", "2", "--mesh.tp", "2", "--output", "run", *SMALL),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mesh dp=1 x tp=2" in done.stdout
    assert (tmp_path / "run" / "checkpoint" / "config.json").exists()


BAD_INPUT = [
    pytest.param(("train", "lama-tiny"), r"unknown recipe 'lama-tiny'; did you mean 'llama-tiny'", id="recipe"),
    pytest.param(
        ("train", "--mesh.dp", "3"), r"mesh dp=3 does not fit 4 processes; dp x tp that fit: 4 x 1, 2 x 2", id="mesh"
    ),
    pytest.param(
        ("train", "--mesh.dp", "1", "--mesh.tp", "3"),
        r"tp=3 does not divide num_heads 8 and .*; degrees that work: 1, 2, 4$",
        id="heads",
    ),
    pytest.param(
        ("train", "--model.hidden-size", "100", "--model.num-heads", "10"),
        r"num_heads 10 is not a multiple of num_kv_heads 4",
        id="kv-heads",
    ),
    pytest.param(("train", "--data.path", "nowhere.txt"), r"data.path nowhere.txt does not exist", id="no-path"),
    pytest.param(("train", "--data.path", "empty.txt"), r"data.path empty.txt holds no text", id="empty-file"),
    pytest.param(("train", "--data.path", "folder"), r"data.path folder holds no text", id="empty-folder"),
    pytest.param(("train", "--data.path", "latin.txt"), r"latin.txt is not UTF-8 text \(byte 3 ", id="not-utf-8"),
    pytest.param(("train", "--data.path", "short.txt"), r"short.txt has 6 tokens, fewer than one sequence", id="short"),
    pytest.param(("train", "--output", "folder"), r"output folder folder exists", id="output-exists"),
    pytest.param(("train", "--steps", "0"), r"steps is 0; it must be 1 or more", id="no-steps"),
    pytest.param(("train", "--stepz", "3"), r"(?i)unrecognized.*--stepz", id="unknown-option"),
    pytest.param(("trian",), r"unknown command 'trian'", id="command"),
    pytest.param(("generate", "nowhere", "--prompt", "x"), r"nowhere is not a folder", id="no-checkpoint"),
]


def here(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `weft`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
    assert isinstance(status, int)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("called", [here, pytest.param(weft, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_message(
    arguments: tuple[str, ...], message: str, called: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "short.txt").write_text("hello")
    before = sorted(tmp_path.rglob("*"))
    done = called(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    said = re.sub(r"[│╭╮╰╯─\s]+", " ", done.stderr).strip()  # a message about an option is drawn in a box
    assert re.search(message, said), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_launcher_with_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "3"}
    done = weft("train", "--mesh.dp", "2", "--mesh.tp", "2", cwd=tmp_path, **world)
    assert done.returncode == 2
    assert "mesh dp=2 x tp=2 does not fit 3 processes; dp x tp that fit: 3 x 1, 1 x 3" in done.stderr


@pytest.mark.exhaustive
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    done = weft(
        *("train", "--steps", "50", "--save-every", "1", "--optimizer.lr", "1e30", "--output", "run", *SMALL),
        *("--mesh.dp", "2", "--mesh.tp", "1"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert re.search(
        r"weft train: the loss is (nan|inf) at step \d+, on ranks? [\d, ]+; last checkpoint: ", done.stderr
    )
    last = re.search(r"last checkpoint: (run/checkpoint-\d+)\.", done.stderr)
    assert last
    assert (tmp_path / last[1] / "model.safetensors").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("victim", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_one_dead_rank_ends_all(victim: int, tmp_path: Path) -> None:
    status, said = _disturb(tmp_path, lambda parent, workers: os.kill(workers[victim], signal.SIGKILL))
    assert status == 1
    assert said[0] == f"rank {victim} killed by SIGKILL; the other processes were ended"


@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.exhaustive)],
)
def test_an_interrupted_run_leaves_no_process(how: signal.Signals, status: int, tmp_path: Path) -> None:
    ended, said = _disturb(tmp_path, lambda parent, workers: os.kill(parent, how))
    assert ended == status
    assert "Traceback" not in "".join(said)


def _disturb(folder: Path, disturb: Callable[[int, list[int]], None]) -> tuple[int, list[str]]:
    """Starts a long run, does something to it at step 3, and gives its exit status and what it said of it.

    Fails unless all its processes end.
    """
    arguments = ("train", "--steps", "100000", "--log-every", "1", "--output", "run", *SMALL)
    with subprocess.Popen(
        [*WEFT, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=_heeds_interrupts,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert any(line.startswith("step      3/") for line in process.stdout)
            workers = _workers(process.pid)
            disturb(process.pid, workers)
            disturbed = time.monotonic()
            process.stdout.close()
            status = process.wait(PATIENCE)
            while any(Path(f"/proc/{worker}").exists() for worker in workers):
                assert time.monotonic() - disturbed < PATIENCE
                time.sleep(0.1)
            return status, process.stderr.read().strip().splitlines()
        finally:
            process.kill()


def _heeds_interrupts() -> None:
    """Whether or not these tests do: a shell that starts them in the background has them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _workers(parent: int) -> list[int]:
    """Process ids of the ranks, in order: the children of the fork server, a child of `parent`."""

    def children(pid: int) -> list[int]:
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(status.parent.name))
        return sorted(found)

    return next(ranks for child in children(parent) if len(ranks := children(child)) == 4)
