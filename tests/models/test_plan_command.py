"""`weft plan`: a table whose commands run, a file, JSON, and one line for input that cannot be used."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.models.cli import main, plan_report
from weft.models.cli.plan import read_bytes
from weft.models.cli.plan_report import certificate_lines
from weft.models.cli.settings import read_configuration, with_complete_plan
from weft.models.predict.search import Certificate
from weft.models.train.config import TrainConfig
from weft.models.train.run import mesh_sizes

# 4 processes of a tiny model: few enough plans to price them in seconds
SMALL = ["llama-tiny", "--processes", "4", "--chip", "trn2", "--batch", "8,128", "--mesh.cp", "1"]
SMALL += ["--plan.recompute", "none", "--plan.microbatches", "2", "--plan.no-sequence", "--plan.zero", "0"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `weft plan` prints."""
    with pytest.raises(SystemExit, match="0"):
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert not err
    return out


def configuration(command: str) -> TrainConfig:
    """The complete configuration of a `weft train` command, by the command's own parser and checks."""
    program, train, *arguments = shlex.split(command)
    assert (program, train) == ("weft", "train")
    _, config = read_configuration(arguments, None, command="train", about="{recipes}{default}")
    dp, cp, tp = mesh_sizes(config.mesh, 4, every_process=True)
    return with_complete_plan(config, dp=dp, cp=cp, tp=tp)


@pytest.mark.exhaustive
def test_each_row_has_a_command_that_train_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    found = json.loads(planned(capsys, *SMALL, "--json", "--output", str(file)))
    plans, certificate = found["plans"], found["certificate"]
    assert len(plans) == 10
    assert [each["seconds"] for each in plans] == sorted(each["seconds"] for each in plans)
    for each in plans:
        config, plan = configuration(each["command"]), each["plan"]
        assert (config.mesh.pp, config.mesh.dp, config.mesh.cp, config.mesh.tp) == tuple(
            plan[axis] for axis in ("pp", "dp", "cp", "tp")
        )
        assert (config.plan.zero, config.plan.schedule) == (plan["zero"], plan["schedule"])
        assert (config.plan.microbatches, config.plan.recompute) == (2, "none")
        assert (config.data.batch_size, config.data.sequence_length) == (8, 128)
        assert sum(each["parts"].values()) == pytest.approx(each["seconds"])
    refused, cut = certificate["refused"], certificate["cut"]
    assert certificate["proved"] and certificate["left"] == 0
    assert certificate["enumerated"] == sum(refused.values()) + sum(cut.values()) + certificate["priced"]
    _, from_file = read_configuration([], file, command="train", about="{recipes}{default}")
    best = plans[0]["plan"]
    assert (from_file.mesh.pp, from_file.mesh.dp, from_file.mesh.tp, from_file.plan.zero) == tuple(
        best[name] for name in ("pp", "dp", "tp", "zero")
    )


@pytest.mark.exhaustive
def test_a_table_and_a_certificate_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = planned(capsys, *SMALL, "--mesh.pp", "1")
    assert "4 processes on trn2" in out
    assert "weft train llama-tiny --mesh.dp 4 --mesh.tp 1 --plan.microbatches 2" in out
    assert "slower than 1: " in out
    assert "proved by this model: no plan without a price is faster than plan" in out


@pytest.mark.exhaustive
def test_one_process_and_two_find_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for count in (1, 2):
        monkeypatch.setattr(plan_report, "count_cores", lambda count=count: count)
        found.append(json.loads(planned(capsys, *SMALL, "--mesh.pp", "1", "--json")))
        del found[-1]["certificate"]["seconds"]
    assert found[0] == found[1]
    assert found[0]["certificate"]["priced"] > 1


def test_a_certificate_of_a_search_without_time_says_what_is_left() -> None:
    certificate = Certificate(enumerated=5, priced=2, left=3, least_left=1.5, seconds=60.0)
    plans: Any = [SimpleNamespace(seconds=2.0)]
    *_, last = certificate_lines(certificate, plans)
    assert last == (
        "not proved: the time was over with 3 plans left, of which none takes less than 1.5 s; the best may be 25.0% "
        "faster than plan 1; --within inf ends with a proof"
    )
    plans = [SimpleNamespace(seconds=seconds) for seconds in (1.2, 1.4, 2.0)]
    *_, proof, rest = certificate_lines(certificate, plans)
    assert proof == "proved by this model: no plan without a price is faster than plan 2, 1.4 s"
    assert rest == (
        "not proved below: the time was over with 3 plans left, of which none takes less than 1.5 s; --within inf ends "
        "with a proof"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "--processes is missing", id="no-processes"),
        pytest.param(["--processes", "0"], "--processes is 0; it must be a number from 1", id="zero-processes"),
        pytest.param(["--processes", "many"], "--processes is many; it must be a number", id="words"),
        pytest.param(["--processes", "8"], "--chip is missing; the chips are ", id="no-chip"),
        pytest.param(["--processes", "8", "--chip", "h1000"], "h1000' is not known; the chips are ", id="unknown-chip"),
        pytest.param(["--batch", "8"], "--batch '8' is not rows and tokens", id="batch"),
        pytest.param(["--batch", "0,128"], "--batch '0,128' is not rows and tokens", id="no-rows"),
        pytest.param(["--memory", "much"], "--memory 'much' is no size of memory", id="memory"),
        pytest.param(["--memory", "0GiB"], "--memory '0GiB' is no size of memory", id="no-memory"),
        pytest.param(["--memory", "-1GiB"], "argument --memory: expected one argument", id="negative-memory"),
        pytest.param(["--within", "1e-9"], "before a plan that fits was priced; ", id="no-time"),
        pytest.param(["--within", "-1"], "--within '-1' is no number of seconds above 0", id="within"),
        pytest.param(["--plan.split", "1,3"], "--plan.split gives layers to stages", id="split"),
        pytest.param(["--plan.exact", "dp=2"], "--plan.exact names a mesh, and plan chooses the mesh", id="exact"),
        pytest.param(["--plan.experts-tokens", "gather"], "plan takes the cheaper way for each mesh", id="tokens"),
        pytest.param(["--output", "/nowhere/plan.toml"], "there is no folder /nowhere", id="output"),
        pytest.param(["--memory", "1MiB"], "weights, gradients and optimizer states take", id="below-the-weights"),
        pytest.param(["--mesh.tp", "3"], "plans can run: the fixed options fit no mesh", id="fits-no-mesh"),
        pytest.param(["--mesh.ep", "2"], "has no experts", id="no-experts"),
        pytest.param(["--mesh.dp", "0"], "mesh.dp is 0; it must be 1 or more", id="no-rank"),
        pytest.param(["extra"], "Unrecognized options: extra; --help lists the options", id="second-name"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = [] if not arguments or arguments[0] == "--processes" else ["--processes", "4", "--chip", "h100"]
    with pytest.raises(SystemExit) as end:
        main(["plan", "llama-tiny", *defaults, *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == "" and err.count("\n") == 1 and err.startswith("weft plan: ")
    assert message in err


@pytest.mark.exhaustive
def test_a_model_that_fits_nowhere_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *SMALL, "--memory", "5MiB", "--mesh.pp", "1"])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "fits 0.00 GiB of memory; the least that one takes is 0.0" in err and "more processes" in err


@pytest.mark.exhaustive
def test_bad_input_is_reported_before_torch_is_imported() -> None:
    program = (
        "import sys\nfrom weft.models.cli import main\n"
        "try:\n    main(['plan', '--processes', '0'])\nexcept SystemExit as end:\n"
        "    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("72GiB", 72 * 2**30), ("80 GB", 80 * 10**9), ("1.5TiB", 1649267441664), ("1024", 1024), ("512MiB", 2**29)],
)
def test_sizes_of_memory(text: str, expected: int) -> None:
    assert read_bytes(text) == expected
