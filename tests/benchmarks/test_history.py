"""Runs are added to the history once, read back as they were, and what cannot be read is told in a line."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history, machine
from benchmarks.history import HistoryError
from tests.architecture.rules import ROOT
from tests.benchmarks.cases import GPU, MACHINE, benchmark, case, counted, pytest_file, run, timed, unmeasured

CPU = {"python_version": "3.11.7"}


def one_line(error: pytest.ExceptionInfo[HistoryError], file: Path) -> str:
    (line,) = str(error.value).splitlines()
    assert str(file) in line
    return line


def test_a_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = run(
        case("b"), case("a", way="Liger", configuration="4 warps", registers=64), counted(bytes=6), unmeasured()
    )
    file = written.write(tmp_path)
    assert file.name == "20260301T120000Z_0023456789.json"
    assert history.read(file) == written
    assert history.load(file) == written


def test_a_run_file_is_the_same_whatever_the_order_and_has_a_line_for_each_case() -> None:
    first, second = case("a", registers=3, bytes=4), case("b")
    assert run(first, second).text() == run(second, case("a", bytes=4, registers=3)).text()
    lines = run(first, second).text().splitlines()
    assert [json.loads(line.strip(" ,"))["name"] for line in lines if line.startswith("  ")] == ["a", "b"]


def test_a_file_of_pytest_benchmark_is_mapped(tmp_path: Path) -> None:
    file = pytest_file(
        tmp_path,
        timed(
            "test_loss[torch.compile-4096]",
            way="torch.compile",
            roofline=0.5,
            peak_bytes=7,
            error=1e-3,
            configuration="x",
        ),
        timed("test_loss[4096-Weft]", seconds_p20=9e-4, seconds_p80=2e-3, flop=1.5, registers=32, spill_bytes=0),
        timed("test_loss[Weft]"),
        timed("test_x[4]", case="loss[8192]"),
        benchmark("test_traffic", kind="count", bytes=6.0, group=None),
        timed("test_loss[CCE-4096]", way="CCE", status="absent"),
        benchmark("test_ceilings", copy_bytes_per_second=4e12, triton="3.6.0", weft="0.1.0", kind="count", dirty=1),
    )
    found = history.recorded(file)
    assert (found.device, found.time, found.dirty) == (GPU, "2026-03-01T12:00:30Z", True)
    assert found.versions == {"python": "3.12.9", "torch": "2.11.0", "triton": "3.6.0", "weft": "0.1.0"}
    assert found.ceilings == {"copy_bytes_per_second": 4e12}
    by_key = {each.key: each for each in found.cases}
    assert set(by_key) == {
        ("losses", "loss[4096]", "torch.compile"),
        ("losses", "loss[4096]", "Weft"),
        ("losses", "loss[4096]", "CCE"),
        ("losses", "loss", "Weft"),
        ("losses", "loss[8192]", "Weft"),
        ("losses_speed", "traffic", "Weft"),
    }
    weft = by_key["losses", "loss[4096]", "Weft"]
    assert (weft.seconds.p20, weft.seconds.median, weft.seconds.p80) == (9e-4, 1e-3, 2e-3)
    assert weft.numbers.items() >= {"flop": 1.5, "registers": 32, "spill_bytes": 0}.items()
    assert by_key["losses", "loss[4096]", "torch.compile"].figures["configuration"] == "x"
    assert by_key["losses_speed", "traffic", "Weft"].figures == {"bytes": 6.0}


def test_a_plain_benchmark_is_a_time_of_the_host(tmp_path: Path) -> None:
    file = pytest_file(tmp_path, benchmark("test_mesh"), machine_info=CPU)
    (found,) = history.recorded(file, "cpu").cases
    assert (found.kind, found.way, found.status) == ("host_time", "Weft", "measured")
    assert found.figures == pytest.approx({"seconds_median": 2e-6, "seconds_p20": 1.4e-6, "seconds_p80": 2.6e-6})


def test_adding_the_same_file_again_changes_nothing(tmp_path: Path) -> None:
    file, results = pytest_file(tmp_path, timed()), tmp_path / "results"
    path = history.add(file, results=results)
    before = {each: each.read_text() for each in results.rglob("*") if each.is_file()}
    assert path == results / "NVIDIA-H200" / "20260301T120030Z_0123456789.json"
    assert history.add(file, results=results) == path
    assert {each: each.read_text() for each in results.rglob("*") if each.is_file()} == before


def test_another_run_of_that_second_and_commit_has_its_own_file(tmp_path: Path) -> None:
    results = tmp_path / "results"
    files = [pytest_file(tmp_path, timed(seconds_median=seconds), name=f"{seconds}.json") for seconds in (1.0, 2.0)]
    first, second = (history.add(file, results=results) for file in files)
    assert first != second
    assert [history.read(each).cases[0].seconds.median for each in (first, second)] == [1.0, 2.0]
    assert [history.add(file, results=results) for file in files] == [first, second]
    assert set(history.runs(GPU, results).runs) == {first.name, second.name}


def test_the_index_is_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "NVIDIA-H200"
    later, earlier = (run(case(), unmeasured("x"), minute=minute).write(folder) for minute in (9, 5))
    added = history.add(pytest_file(tmp_path, timed(), timed(way="CCE", status="absent")), results=tmp_path)
    (folder / "cross_entropy.json").write_text("{}")  # no run: benchmarks keep files of their own here
    index = json.loads((folder / "index.json").read_text())
    assert [row["file"] for row in index] == [added.name, earlier.name, later.name]
    assert list(history.runs(GPU, tmp_path).runs) == [row["file"] for row in index]
    statuses = {"measured": 1, "absent": 1, "failed": 0}
    assert index[0] == {
        "file": added.name, "time": "2026-03-01T12:00:30Z", "commit": "0123456789abcdef0123", "dirty": False,
        **statuses,
    }  # fmt: skip
    assert history.devices(tmp_path) == ["NVIDIA-H200"]


def edited(**changes: Any) -> str:
    """A run file with changed fields. case={...} changes fields of the first case."""
    content = json.loads(run().text())
    content["cases"][0] |= changes.pop("case", {})
    return json.dumps({key: value for key, value in (content | changes).items() if value is not None})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param("", "it is empty", id="empty"),
        pytest.param(" \n", "it is empty", id="blank"),
        pytest.param(run().text()[:100], "it is no JSON", id="cut"),
        pytest.param("[" * 100_000, "recursion", id="nested-without-an-end"),
        pytest.param("[]", "it holds a list", id="a-list"),
        pytest.param("{}", "of schema None", id="no-schema"),
        pytest.param(edited(schema=0), "of schema 0, and 1 is what can be read", id="old-schema"),
        pytest.param(edited(case={"device": "cpu"}), f"mixes devices: '{GPU}', and 'cpu' in losses: loss", id="mixed"),
        pytest.param(edited(device="cpu"), "losses: loss, Weft is a kernel's time, of a CPU", id="a-kernel-on-a-cpu"),
        pytest.param(edited(commit=None), "'commit' is missing", id="a-field-missing"),
        pytest.param(edited(dirty="no"), "'dirty' is 'no', and a bool is wanted", id="a-field-of-another-kind"),
        pytest.param(edited(time="today"), "'today' does not match", id="no-time"),
        pytest.param(edited(versions={"torch": 2.11}), "'torch' of the run is 2.11", id="a-version-of-another-kind"),
        pytest.param(edited(ceilings={"copy": None}), "'copy' of the run's ceilings is None", id="no-ceiling"),
        pytest.param(edited(device="../.."), "'../..' names no device", id="no-device"),
        pytest.param(edited(cases=[]), "there is no case in it", id="no-case"),
        pytest.param(edited(cases=[3]), "'name' is missing", id="a-case-of-another-kind"),
        pytest.param(edited(case={"kind": "speed"}), "kind 'speed'", id="unknown-kind"),
        pytest.param(edited(case={"status": "ok"}), "status 'ok'", id="unknown-status"),
        pytest.param(edited(case={"name": ""}), "'name' of a case is ''", id="no-name"),
        pytest.param(edited(case={"bytes": math.nan}), "nan, neither a word nor a finite number", id="nan"),
        pytest.param(edited(case={"shape": [3]}), "[3], neither a word nor a finite number", id="a-list-of-figures"),
        pytest.param(edited(case={"seconds_median": 0}), "must rise, from above 0", id="no-seconds"),
        pytest.param(edited(case={"seconds_p20": 2.0}), "must rise, from above 0", id="percentiles-the-other-way"),
        pytest.param(edited(case={"seconds_median": "1"}), "must rise, from above 0", id="seconds-as-a-word"),
    ],
)
def test_a_file_that_is_no_run_is_told_in_a_line_and_the_rest_is_read(tmp_path: Path, content: str, told: str) -> None:
    good = run().write(tmp_path / "NVIDIA-H200")
    bad = good.with_name("20260301T110000Z_abc.json")
    bad.write_text(content)
    with pytest.raises(HistoryError) as error:
        history.read(bad)
    assert told in one_line(error, bad)
    found = history.runs(GPU, tmp_path)
    assert found.unreadable == (str(error.value),)
    assert list(found.runs) == [good.name]


def test_bytes_that_are_no_text_are_told_in_a_line(tmp_path: Path) -> None:
    (bad := tmp_path / "bad.json").write_bytes(b"\xff\xfe")
    with pytest.raises(HistoryError, match="can't decode") as error:
        history.read(bad)
    one_line(error, bad)


def test_a_run_in_the_folder_of_another_device_is_told(tmp_path: Path) -> None:
    run(device="NVIDIA A100").write(tmp_path / "NVIDIA-H200")
    found = history.runs(GPU, tmp_path)
    assert not found.runs
    (line,) = found.unreadable
    assert "it is of device 'NVIDIA A100'; move it to NVIDIA-A100/" in line


@pytest.mark.parametrize(
    ("benchmarks", "rest", "device", "told"),
    [
        pytest.param([timed()], {"machine_info": CPU}, None, "names none; --device cpu", id="no-device"),
        pytest.param([timed()], {}, "cpu", "names 'NVIDIA H200' and 'cpu'", id="another-device-asked-for"),
        pytest.param([timed(device="A")], {}, None, "names 'A' and 'NVIDIA H200'", id="mixed-devices"),
        pytest.param([timed(), benchmark("ceilings", device="A")], {}, None, "names 'A' and", id="ceilings-of-another"),
        pytest.param([timed()], {"machine_info": CPU}, "CPU", "a kernel's time, of a CPU", id="a-kernel-on-a-cpu"),
        pytest.param(
            [benchmark("test_a", kind="time")], {}, None, "[None, None, None]", id="a-kernel-by-the-hosts-clock"
        ),
        pytest.param([timed(), timed()], {}, None, "losses: loss[4096], Weft is there twice", id="twice"),
        pytest.param(
            [benchmark("test_a", name="x")], {}, None, "a figure named ['name']", id="a-figure-named-as-a-field"
        ),
        pytest.param([timed(case="a\nb", shape=[3])], {}, None, r"losses: a\nb, Weft", id="newline-in-a-name"),
        pytest.param([timed(way=3)], {}, None, "'way' of a case is 3", id="a-way-that-is-no-word"),
        pytest.param([], {}, None, "there is no case in it", id="no-case"),
        pytest.param([timed()], {"datetime": "today"}, None, "'today'", id="no-time"),
        pytest.param([timed()], {"commit_info": None}, None, "'commit_info' is None", id="no-commit-info"),
    ],
)
def test_a_run_that_cannot_be_added_is_told_in_a_line(
    tmp_path: Path, benchmarks: list[Any], rest: dict[str, Any], device: str | None, told: str
) -> None:
    file = pytest_file(tmp_path, *benchmarks, **rest)
    with pytest.raises(HistoryError) as error:
        history.add(file, device, tmp_path / "results")
    assert told in one_line(error, file)
    assert not (tmp_path / "results").exists()


def test_a_run_made_without_its_repository_is_told_its_commit(tmp_path: Path) -> None:
    file = pytest_file(tmp_path, timed(), commit_info={"id": "unversioned", "dirty": False})
    assert history.recorded(file).commit == ""
    history.main(["add", str(file), "--commit", "abcdef0123456789"], results=tmp_path)
    assert (tmp_path / "NVIDIA-H200" / "20260301T120030Z_abcdef0123.json").exists()


def test_a_run_that_knows_its_commit_is_of_no_other(tmp_path: Path) -> None:
    file = pytest_file(tmp_path, timed())
    known = history.recorded(file).commit
    assert history.recorded(file, commit=known[:10]).commit == known
    with pytest.raises(HistoryError, match=f"the run is of commit {known}, not abcdef"):
        history.recorded(file, commit="abcdef")


def test_the_command_adds_and_tells_what_it_could_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = pytest_file(tmp_path, benchmark("test_mesh"), machine_info=CPU)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "20260301T110000Z_abc.json").write_text("")
    history.main(["add", str(file), "--device", "cpu"], results=tmp_path)
    out, err = capsys.readouterr()
    assert out.strip() == str(tmp_path / "cpu" / "20260301T120030Z_0123456789.json")
    assert err.startswith("not read: ") and "it is empty" in err
    with pytest.raises(SystemExit, match=r"^benchmarks.history: .*no\.json: No such file"):
        history.main(["add", str(tmp_path / "no.json")], results=tmp_path)


@pytest.mark.parametrize("module", ["record", "history", "compare", "report"])
def test_the_standard_library_is_enough(module: str) -> None:
    program = f"import sys, benchmarks.{module}; print({{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert eval(done.stdout).isdisjoint({"torch", "triton", "weft", "numpy", "pytest"})


def test_the_machine_is_kept_with_the_run(tmp_path: Path) -> None:
    told = {"python_version": "3.12.9", "device": GPU, "versions": {}, "machine": MACHINE}
    kept = history.read(history.add(pytest_file(tmp_path, timed(), machine_info=told), results=tmp_path / "results"))
    assert (kept.machine, kept.where) == (MACHINE, "AMD EPYC 9654, 8 cores, load 0.25")
    without = history.recorded(pytest_file(tmp_path, timed()))
    assert (without.machine, without.where, '"machine"' in without.text()) == (
        {},
        "a machine that was not recorded",
        False,
    )


def test_a_run_records_the_cpu_and_the_load_of_this_machine(tmp_path: Path) -> None:
    found = machine.told()
    assert found["cpu"] and found["cores"] >= 1 and found["load"] >= 0
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\nprocessor\t: 1\nmodel name\t: AMD EPYC 9654\n")
    assert machine.model(cpuinfo) == "AMD EPYC 9654"
    assert machine.model(tmp_path / "none"), "elsewhere, the architecture"
