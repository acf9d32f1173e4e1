"""Input that `weft` cannot use gives one message and status 2, at once, and leaves no files."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.end_to_end.test_train import WEFT, here, weft, weft_preloaded
from tests.support import preloaded

BAD_INPUT = [
    pytest.param(("train", "lama-tiny"), r"unknown recipe 'lama-tiny'; did you mean 'llama-tiny'", id="recipe"),
    pytest.param(
        ("train", "--mesh.tp", "3"), r"mesh tp=3 does not fit 4 processes; dp x tp that fit: 4 x 1, 2 x 2", id="mesh"
    ),
    pytest.param(
        ("train", "--mesh.dp", "1", "--mesh.tp", "3"),
        r"tp=3 does not divide num_heads 8 and .*; degrees that work: 1, 2, 4, 8$",
        id="heads",
    ),
    pytest.param(
        ("train", "--mesh.cp", "3"), r"mesh cp=3 does not fit 4 processes; cp that fit: 1, 2, 4$", id="context"
    ),
    pytest.param(
        ("train", "--mesh.cp", "2", "--plan.context", "ulysses", "--model.num-kv-heads", "2"),
        r"context 'ulysses' cuts heads over tp x cp = 2 x 2, which "
        r"does not divide num_kv_heads 2; cp that work: 1; context",
        id="ulysses-heads",
    ),
    pytest.param(("train", "--dtype", "float8"), r"(?i)invalid choice 'float8'.*bfloat16", id="dtype"),
    pytest.param(("train", "--plan.context", "ring"), r"(?i)invalid choice 'ring'.*all_gather", id="context-kind"),
    pytest.param(
        ("train", "--model.hidden-size", "100", "--model.num-heads", "10"),
        r"num_heads 10 is not a multiple of num_kv_heads 4",
        id="kv-heads",
    ),
    pytest.param(("train", "--data.path", "nowhere.txt"), r"data.path nowhere.txt does not exist", id="no-path"),
    pytest.param(("train", "--data.path", "empty.txt"), r"data.path empty.txt holds no text", id="empty-file"),
    pytest.param(("train", "--data.path", "folder"), r"data.path folder holds no text", id="empty-folder"),
    pytest.param(("train", "--data.path", "latin.txt"), r"latin.txt is not UTF-8 text \(byte 3 ", id="not-utf-8"),
    pytest.param(
        ("train", "--data.path", "short.txt"), r"short.txt has 6 tokens, fewer than two sequences", id="short"
    ),
    pytest.param(("train", "--output", "folder"), r"output folder folder exists", id="output-exists"),
    pytest.param(
        ("train", "--resume", "nowhere"),
        r"^weft train: --resume nowhere does not exist; give the folder of a run, or of a checkpoint$",
        id="nothing-to-resume",
    ),
    pytest.param(("train", "--steps", "0"), r"steps is 0; it must be 1 or more", id="no-steps"),
    pytest.param(("train", "--stepz", "3"), r"(?i)unrecognized.*--stepz", id="unknown-option"),
    pytest.param(("trian",), r"unknown command 'trian'", id="command"),
    pytest.param(
        ("train", "--output", "/proc/x"), r"the output folder /proc/x cannot be made: .*; give another", id="output"
    ),
    pytest.param(("train", "--output", "empty.txt/x"), r"empty.txt/x cannot be made", id="output-below-a-file"),
    pytest.param(
        ("train", "--model.vocab-size", "100"), r"model.vocab_size 100 is below 257: a text's tokens", id="vocabulary"
    ),
    pytest.param(("generate", "nowhere", "--prompt", "x"), r"nowhere is not a folder", id="no-folder"),
    pytest.param(("generate", "folder", "--prompt", "x"), r"folder has no checkpoint; give", id="no-checkpoint"),
    pytest.param(("generate", "folder", "--prompt", ""), r"--prompt is empty", id="no-prompt"),
    pytest.param(
        ("generate", "folder", "--prompt", "x", "--tokens", "-3"),
        r"--tokens is -3; it must be a whole number, 0 or more",
        id="tokens",
    ),
    pytest.param(
        ("generate", "folder", "--prompt", "x", "--temperature", "-1"), r"--temperature is -1.0; it", id="temperature"
    ),
    pytest.param(
        ("generate", "folder", "--prompt", "x", "--temperature", "nan"), r"--temperature is nan; it", id="no-number"
    ),
]


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


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """A folder with a text, and a run without a tokenizer for its model."""
    (tmp_path / "book.txt").write_text("Call me by my layout. " * 10)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"vocab_size": 32000}')
    return tmp_path


def test_bad_input_is_told_before_torch_is_imported(untrained: Path) -> None:
    program = """
import sys
from weft.models.cli import main
for arguments in (
    ["train", "--output", "/proc/x"],
    ["train", "--output", "book.txt/x"],
    ["train", "--model.vocab-size", "100"],
    ["generate", "nowhere", "--prompt", "x"],
    ["generate", "run", "--prompt", "x"],
    ["generate", "run", "--prompt", "x", "--tokens", "-3"],
    ["generate", "run", "--prompt", "x", "--temperature", "-1"],
):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == 2
    assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=untrained, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 7, "one line each"


def test_bad_input_takes_two_fifths_of_the_import_of_torch_at_most(untrained: Path) -> None:
    """In processor time, from Python's start; the run's text is the standard library.

    torch is imported beside each run, because further programs share the caches. The best of five pairs counts.
    """

    def seconds(command: Sequence[str], status: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert subprocess.run(command, cwd=untrained, capture_output=True, check=False).returncode == status
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def share(arguments: Sequence[str]) -> float:
        return seconds((*WEFT, *arguments), 2) / seconds((sys.executable, "-c", "import torch"), 0)

    for arguments in (("train", "--output", "/proc/x"), ("generate", "run", "--prompt", "x")):
        assert any(share(arguments) < 0.4 for _ in range(5)), arguments


@pytest.mark.exhaustive
def test_a_launcher_with_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "3"}
    done = weft_preloaded("train", "--mesh.dp", "2", "--mesh.tp", "2", cwd=tmp_path, **world)
    assert done.returncode == 2
    assert "mesh dp=2 x tp=2 does not fit 3 processes; dp x tp that fit: 3 x 1, 1 x 3" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(("--mesh.tp", "3"), id="mesh"),
        pytest.param(("--stpes", "3"), id="option", marks=pytest.mark.exhaustive),
    ],
)
def test_of_a_launchers_processes_one_says_what_is_wrong(mistake: tuple[str, str], tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = preloaded.run([*launcher, "-m", "weft.models.cli", "train", *mistake], cwd=tmp_path)
    assert len(re.findall("does not fit 2 processes|perhaps you meant", done.stderr)) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr
