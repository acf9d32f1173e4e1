"""Hostile configs, checkpoint records and metrics, and absurd sizes: each is refused with one line and status 2."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import save_checkpoint
from weft.models.checks import divisors
from weft.models.cli import main
from weft.models.data.text import find_corpus
from weft.models.families import make_model
from weft.models.parallel import ParallelPlan
from weft.models.train.config import DataConfig, MeshConfig
from weft.models.train.recipes import recipe
from weft.models.train.results import Results
from weft.models.train.run import Run
from weft.models.train.saved_run import describe_run, read_saved
from weft.models.train.toml import LARGEST

from tests.models.metrics import some_metrics
from tests.models.test_bad_data import weft

SECONDS, BYTES = 5.0, 256 * 2**20  # of a processor, and of memory, to refuse a value
HUGE = [2**62, 2**70, 10**400]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("text.txt").write_text("Call me Weft. " * 500)


@pytest.fixture
def little() -> Iterator[None]:
    """Fails where a test takes more than SECONDS of processor time or BYTES of memory."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which `weft train` refuses its input."""
    status, out, err = weft(capsys, "train", *arguments, "--print-config")
    assert (status, out) == (2, ""), err
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    return err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("x = " + "[" * 100_000, "nests too deeply", id="deep-lists"),
        pytest.param("x = " + "{a=" * 5000, "nests too deeply", id="deep-tables"),
        pytest.param(".".join("a" * 50_000) + " = 1", "nests too deeply", id="deep-key"),
        pytest.param("[" + ".".join("a" * 50_000) + "]", "nests too deeply", id="deep-heading"),
        pytest.param("#" * (LARGEST + 1), "are read at most", id="large"),
        pytest.param("seed = " + "1" * 5000, "is not TOML", id="5000-digits"),
        pytest.param("seed = 0x" + "f" * 9000, "Exceeds the limit", id="9000-hexadecimal-digits"),
        pytest.param("stops = 3", "'stops', which is not an option; did you mean 'steps'?", id="unknown"),
        pytest.param("help = true", "'help', which is not an option", id="help"),
        pytest.param('tyro_write_completion = ["bash", "evil"]', "which is not an option", id="of-the-library"),
        pytest.param('"a\\nb\\u001b[31m" = 3', r"'a\nb\x1b[31m', which is not an option", id="control-characters"),
        pytest.param('[mesh]\n"d p" = 3', "mesh.'d p' is not an option", id="name-with-a-space"),
        pytest.param(
            'track = ["--profile", "evil"]', "track is '--profile', which looks like an option", id="in-a-list"
        ),
        pytest.param(
            'dtype = "--profile=evil"', "dtype is '--profile=evil', which looks like an option", id="in-a-text"
        ),
        pytest.param('[data]\nmixture = ["text.txt=1", "--output", "evil"]', "mixture is '--output'", id="in-a-table"),
        pytest.param("steps = [[1]]", "steps is a list that contains lists or tables", id="list-of-lists"),
        pytest.param("[[mesh]]\ndp = 1", "mesh is a list that contains lists or tables", id="list-of-tables"),
        pytest.param('steps = "x\\ny"', r"run.toml: steps is 'x\ny'; it must be a whole number", id="text-as-number"),
        pytest.param("steps = true", "config run.toml: ", id="bool-as-number"),
        pytest.param("[mesh]\ndp = 1.5", "config run.toml: ", id="half-a-rank"),
        pytest.param("[optimizer]\nlr = nan", "optimizer.lr is nan; it must be above 0", id="nan"),
        pytest.param("[optimizer]\nschedule = 1", "invalid choice '1'", id="no-choice"),
        pytest.param("data = 3", "config run.toml: ", id="number-as-table"),
        pytest.param("recipe = [1]", "recipe = [1]; give a recipe's name", id="recipe-a-list"),
    ],
)
def test_a_config_that_is_another(text: str, said: str, little: None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(text)
    assert said in refused(capsys, "--config", "run.toml")
    assert not Path("evil").exists()


def test_a_config_that_is_no_plain_file(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    Path("folder").mkdir()
    for name in ("pipe", "folder", "/dev/zero", "nowhere"):
        assert name in refused(capsys, "--config", name)


WHOLE = ["steps", "save_every", "keep", "keep_every", "eval_every", "log_every", "seed", "timeout"]
WHOLE += [f"data.{name}" for name in ("batch_size", "sequence_length")]
WHOLE += [f"mesh.{name}" for name in ("pp", "dp", "cp", "tp")]
WHOLE += [f"optimizer.{name}" for name in ("warmup_steps", "decay_steps")]
WHOLE += [f"model.{name}" for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "max_seq_len")]
WHOLE += [
    "model.intermediate_size",
    "model.num_kv_heads",
    "model.head_dim",
    "model.sliding_window",
    "plan.microbatches",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("value", HUGE, ids=["2^62", "2^70", "10^400"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_number_that_no_run_has(name: str, value: int, little: None, capsys: pytest.CaptureFixture[str]) -> None:
    if (name, value) == ("seed", 2**62):  # a valid seed
        return
    table, _, option = name.rpartition(".")
    heading = f"[{table}]\n" if table else ""
    Path("run.toml").write_text(f"{heading}{option} = {value}\n")
    assert refused(capsys, "--config", "run.toml").startswith("weft train: ")
    status, _, err = weft(capsys, "train", f"--{name.replace('_', '-')}", str(value), "--print-config")
    assert status == 2
    assert "Traceback" not in err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"mesh": {"dp": 10**12}}, id="dp"),
        pytest.param({"mesh": {"dp": 2**13, "tp": 2**13}}, id="product"),
        pytest.param({"mesh": {"pp": 2**24, "dp": 1, "tp": 1}}, id="more-stages-than-layers"),
        pytest.param({"mesh": {"cp": 2**24 - 1, "dp": 1, "tp": 2}}, id="cp"),
        pytest.param({"model": {"num_layers": 10**9}}, id="layers"),
        pytest.param({"model": {"num_layers": 200_000}}, id="two-hundred-thousand-layers"),
        pytest.param({"model": {"num_heads": 2**31 - 1}}, id="heads"),
        pytest.param({"data": {"batch_size": 2**20, "sequence_length": 2**12}}, id="tokens-of-a-step"),
        pytest.param({"plan": {"microbatches": 2**31 - 1}}, id="microbatches"),
        pytest.param({"mesh": {"tp": 2**24}}, id="tp"),
    ],
)
def test_sizes_that_would_take_memory_are_refused_before_they_do(
    sizes: dict[str, dict[str, int]], little: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"[{table}]\n" + "\n".join(f"{name} = {size}" for name, size in of.items()) for table, of in sizes.items()]
    Path("run.toml").write_text("\n".join(lines))
    refused(capsys, "--config", "run.toml", "--data.path", "text.txt")


@pytest.mark.parametrize("sizes", [{"dp": 10**12}, {"dp": 2**12, "tp": 2**13}, {"a": 2**70}, {"a": 2**24, "b": 2}])
def test_a_mesh_has_a_bound(sizes: dict[str, int], little: None) -> None:
    with pytest.raises(ValueError, match=r"is too large; a mesh has 16,777,216 ranks at most"):
        ProcessMesh.grid(**sizes)
    assert ProcessMesh.grid(dp=2**12, tp=2**12).size == 2**24


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 7200, 2**31 - 1])
def test_divisors_are_all_numbers_that_divide(number: int) -> None:
    if number < 10_000:
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    else:
        assert divisors(number) == [1, number]  # a Mersenne prime


@pytest.fixture
def run() -> dict[str, Any]:
    """The record of a run, from the checkpoint of step 2 in the folder `run`."""
    small = recipe("llama-tiny")
    config = replace(
        small,
        steps=4,
        save_every=2,
        data=DataConfig(path=Path("text.txt"), batch_size=2, sequence_length=16),
        mesh=MeshConfig(dp=1, tp=1),
        model=replace(small.model, num_layers=1, hidden_size=32, intermediate_size=48),
    )
    corpus = find_corpus(Path("text.txt"))
    made = Run(recipe="llama-tiny", config=config, corpus=corpus, dp=1, tp=1, folder=Path("run"))
    with Results(Path("run"), writes=True) as results:
        results.begin("llama-tiny", config, ParallelPlan(), ProcessMesh.grid(dp=1, tp=1), [])
        for step in (1, 2):
            results.add(some_metrics(step=step, done=step / 4))
        said = describe_run(made, 2, 5.5, results.logged)
    torch.manual_seed(0)
    saved(said, config.model)
    return said


def saved(said: dict[str, Any], model: Any = None, folder: str = "run/checkpoint-2") -> None:
    small = recipe("llama-tiny").model
    model = model or replace(small, num_layers=1, hidden_size=32, intermediate_size=48)
    shutil.rmtree(folder, ignore_errors=True)
    save_checkpoint(make_model(model), folder, run=said)


def test_a_run_that_is_as_it_was_goes_on(run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert weft(capsys, "train", "--output", "run", "--resume", "--print-config")[0] == 0
    assert read_saved(Path("run/checkpoint-2"))["step"] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"step": -7}, "step is -7; steps are 0 to ", id="step-below-0"),
        pytest.param({"step": 2**70}, "step is a number of many digits", id="step-of-2^70"),
        pytest.param({"step": 2**62}, "step is 4611686018427387904", id="step-of-2^62"),
        pytest.param({"step": 2.0}, "step is 2.0, and a whole number is needed", id="step-a-float"),
        pytest.param({"step": True}, "step is true, and a whole number", id="step-a-bool"),
        pytest.param({"step": "2"}, "step is '2', and a whole number", id="step-a-string"),
        pytest.param({"step": None}, "step is null, and a whole number", id="step-null"),
        pytest.param({"step": 3}, "step is 3, but the folder is named checkpoint-2", id="step-of-another-folder"),
        pytest.param({"held_out_loss": "low"}, "held_out_loss is 'low', and a number", id="loss-a-string"),
        pytest.param({"config": []}, "config is a list of 0, and an object", id="config-a-list"),
        pytest.param({"config": "x"}, "config is 'x', and an object", id="config-a-string"),
        pytest.param({"data": {}}, "data has no 'tokens'", id="data-empty"),
        pytest.param({"data": {"tokens": 1.5, "sha256": ""}}, "data.tokens is 1.5", id="tokens-a-float"),
        pytest.param({"data": 3}, "data is 3, and an object", id="data-a-number"),
        pytest.param({"data": ...}, "its step or its data is missing", id="no-data"),
        pytest.param({"step": ...}, "step is 0, but the folder is named checkpoint-2", id="no-step"),
        pytest.param({"metrics.jsonl": []}, "metrics.jsonl is a list of 0", id="metrics-a-list"),
        pytest.param({"metrics.jsonl": {"lines": 2}}, "metrics.jsonl has no 'bytes'", id="metrics-without-bytes"),
        pytest.param({"metrics.jsonl": {"lines": -2, "bytes": -5, "sha256": ""}}, "has -2 lines", id="negative-bytes"),
        pytest.param({"metrics.jsonl": {"lines": "2", "bytes": 0, "sha256": ""}}, "lines is '2'", id="lines-a-string"),
    ],
)
def test_a_record_of_a_run_that_no_run_writes(
    change: dict[str, Any], said: str, run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    saved({name: value for name, value in {**run, **change}.items() if value is not ...})
    err = refused(capsys, "--output", "run", "--resume")
    assert "run/checkpoint-2/run.json is not as a run writes it: " in err
    assert said in err
    assert err.endswith("; resume from another checkpoint\n")


def test_a_checkpoint_under_a_name_of_its_own_is_gone_on_with(run: dict[str, Any]) -> None:
    for name in ("best", "checkpoint-of-tuesday", "checkpoint-2.bak"):
        saved(run, folder=name)
        assert read_saved(Path(name))["step"] == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["[1]"], id="list"),
        pytest.param(["null"], id="null"),
        pytest.param(['{"step": 1}'], id="step-alone"),
        pytest.param(["[" * 100_000], id="deep"),
        pytest.param(['{"a":' * 100_000], id="deep-object"),
        pytest.param([{"step": 1}, {"step": 1}], id="twice-the-same"),
        pytest.param([{"step": 1}, {"step": 0}], id="descending"),
        pytest.param([{"step": 1}, {"step": 3}], id="with-a-gap"),
        pytest.param([{"step": -7}, {"step": 2}], id="negative"),
        pytest.param([{"step": 2**70}], id="huge-step"),
        pytest.param([{"step": 1, "loss": True}], id="bool-as-loss"),
        pytest.param([{"step": 1, "loss": 10**400}], id="huge-loss"),
        pytest.param([{"step": 1.0}], id="half-a-step"),
        pytest.param([{"step": 1, "held_out_loss": "x"}], id="text-as-loss"),
    ],
)
def test_metrics_that_no_run_writes(lines: list[Any], run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    saved({name: value for name, value in run.items() if name != "metrics.jsonl"})  # nothing is known of the lines
    first = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    written = [each if isinstance(each, str) else json.dumps({**first, **each}) for each in lines]
    Path("run/metrics.jsonl").write_text("".join(f"{line}\n" for line in written))
    assert "run/metrics.jsonl" in refused(capsys, "--output", "run", "--resume")


@pytest.mark.exhaustive
def test_metrics_that_are_no_plain_file(run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("run/metrics.jsonl")
    path.unlink()
    os.mkfifo(path)
    assert "run/metrics.jsonl is no plain file" in refused(capsys, "--output", "run", "--resume")
    path.unlink()
    path.mkdir()
    assert "run/metrics.jsonl is no plain file" in refused(capsys, "--output", "run", "--resume")
    path.rmdir()
    path.symlink_to("/dev/zero")
    assert "run/metrics.jsonl is no plain file" in refused(capsys, "--output", "run", "--resume")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "line",
    [
        'track = ["--profile", "evil"]',
        'dtype = "--output=evil"',
        'tyro_write_completion = ["bash", "evil"]',
        "help = true",
    ],
)
def test_the_config_of_a_strangers_run_names_no_place_to_write(
    line: str, run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("run/config.toml")
    path.write_text(
        f"{line}\n"
        + "\n".join(
            each for each in path.read_text().splitlines() if not each.startswith(("# ", line.partition(" ")[0]))
        )
    )  # fmt: skip
    for what in (["--output", "run", "--resume"], ["--resume", "run/checkpoint-2", "--output", "new"]):
        with pytest.raises(SystemExit) as ended:
            main(["train", *what, "--print-config"])
        out, err = capsys.readouterr()
        assert "evil" not in out
        if what[0] == "--output" or not line.startswith("track"):  # a tracker is not taken from a stranger at all
            assert ended.value.code == 2, err
            assert "config run/config.toml" in err
    assert not Path("evil").exists()
