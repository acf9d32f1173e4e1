"""The page without a browser: what it says first, that every word is text, and that what cannot be read is told."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

from benchmarks.dashboard import blocks, curves, headline, sources
from benchmarks.dashboard.__main__ import main
from benchmarks.record import Run
from tests.architecture.rules import ROOT
from tests.benchmarks import results
from tests.benchmarks.cases import case, counted, run, unmeasured
from tests.benchmarks.results import count, cpu_run, gpu_run, host


class Words(HTMLParser):
    """What a reader sees of a page, its elements, and the content of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.text += data


def made(folder: Path) -> Words:
    output = folder / "out" / "index.html"
    main(["--results", str(folder), "--output", str(output)])
    return Words(output.read_text())


def first(*runs: Run, timed: bool = False) -> headline.Headline:
    """Of the newest of some runs of a device; timed: by another device of the same page."""
    budgets = sources.Budgets.read()
    *earlier, newest = runs
    comparison = sources.compare.compare(newest, earlier, budgets)
    device = sources.Device(newest.device, {str(at): each for at, each in enumerate(runs)}, comparison)
    return headline.headline(device, len(budgets.counts), timed=timed or device.timed)


def test_a_cpus_sentence_claims_no_speed() -> None:
    found = first(cpu_run())
    assert found.sentence == (
        "Not timed on a GPU yet; by count, layout changes never receive more bytes than the lower bound "
        "(DTensor 10 times as many on average on 4x4x4), and cross-entropy moves 6.00 bytes a logit."
    )
    assert first(cpu_run(), timed=True).sentence.startswith("On a CPU no kernel is timed; by count, layout changes")
    assert [(tile.value, tile.section) for tile in found.tiles] == [
        ("1.00×", "reshard"),
        ("6.00 B", "kernels"),
        ("1.08 GB", "kernels"),
        ("21", "models"),
    ]


def test_a_gpus_sentence_has_its_share_of_the_roofline_and_the_mean_of_its_ratios() -> None:
    found = first(
        run(case(roofline=0.88), case("b", roofline=0.934), case(way="eager torch", median=2e-3, roofline=0.4))
    )
    assert found.sentence == (
        "On an NVIDIA H200, Weft's kernels reach 88 to 93% of the roofline, and eager torch takes 2.00× as long (geometric mean)."
    )


@pytest.mark.exhaustive  # draws two devices; its sister, a CPU's sentence beside a GPU, is above
def test_a_page_that_times_a_gpu_says_of_no_device_that_none_is_timed_yet(tmp_path: Path) -> None:
    text = made(results.of_a_gpu(tmp_path)).text
    assert "On an NVIDIA H200, Weft's kernels reach" in text and "On a CPU no kernel is timed; by count" in text
    assert "Not timed on a GPU yet" not in text


def test_the_measure_of_the_roofline_and_the_noise_are_no_rivals() -> None:
    cases = [case(roofline=0.9), case(way="a copy", median=9e-4), case(way="torch, again", median=9e-3, roofline=0.1)]
    assert [tile.value for tile in first(run(*cases)).tiles] == ["90%"]
    assert [tile.value for tile in first(run(*cases, case(way="torch", median=3e-3, roofline=0.3))).tiles] == [
        "90%",
        "3.00×",
    ]


@pytest.mark.parametrize(
    ("runs", "passes", "told"),
    [
        pytest.param([gpu_run(0), gpu_run(5)], False, "10 budgets broken by the newest run, the first by cross_entropy_speed", id="slower"),
        pytest.param([gpu_run(0), gpu_run(1)], True, "14 kernel times compared with the median of 1 earlier run", id="as-before"),
        pytest.param([cpu_run()], True, f"counted figures keep 5 of {len(sources.Budgets.read().counts)} budgets; there is no earlier run", id="first"),
        pytest.param([cpu_run(0), cpu_run(1)], True, "times of a host have no budget", id="host-times"),
        pytest.param([run()], None, "none of its figures has a budget; there is no earlier run", id="nothing-to-judge-by"),
    ],
)  # fmt: skip
def test_the_verdict_is_said_in_words(runs: list[Run], passes: bool | None, told: str) -> None:
    found = first(*runs).verdict
    assert (found.passes, found.word) == (passes, {True: "Passes", False: "Fails", None: "Not judged"}[passes])
    assert told in found.told


def test_a_run_of_which_nothing_can_be_said_says_so() -> None:
    assert (
        first(run(counted(rows=1))).sentence
        == "On NVIDIA H200 no kernel is timed; nothing is measured that Weft can be compared by."
    )


def test_a_time_of_the_host_is_never_shown_as_a_kernels() -> None:
    cases = [host("step_time", "step", way, 1.0) for way in ("Weft", "torch")] + [host("new", "alone", "Weft", 1.0)]
    cases += [host("many", f"case {number}", way, 1.0) for way in ("Weft", "DTensor") for number in range(9)]
    found = {section.name: section for section in blocks.sections(run(*cases, device="cpu"))}
    assert set(found) == {"kernels", "models", "more"} and not found["kernels"].blocks
    assert found["kernels"].lead.startswith("No kernel is timed on a CPU: what follows is counted")
    figures = [figure for section in found.values() for block in section.blocks for figure in block.figures]
    assert len(figures) == 3 and all("host time" in figure.note for figure in figures)


def test_groups_that_nobody_knows_are_shown_by_their_names() -> None:
    found = {section.name: section for section in blocks.sections(run(case(group="new_kernels"), counted(rows=1)))}
    assert [block.title for name in ("kernels", "more") for block in found[name].blocks] == ["new kernels", "counts"]


def test_what_failed_or_is_absent_is_said_once_for_a_reason() -> None:
    cases = [unmeasured(name, "CCE", "absent") for name in ("a", "b")] + [unmeasured("a", error="out of\nmemory")]
    (section,) = (section for section in blocks.sections(run(case(), *cases)) if section.blocks)
    assert section.blocks[0].remarks == (
        "CCE is absent: not installed, or not of this device (a; b)",
        r"Weft is failed: out of\nmemory (a)",
    )


def test_the_largest_difference_between_meshes_is_said() -> None:
    one, other = {"step_001": 2.0, "step_002": 1.0}, {"step_001": 2.0, "step_002": 1.25, "step_003": 9.0}
    cases = [count("loss_curves", "m", "Weft, dp=2", **one), count("loss_curves", "m", "Weft, tp=2", **other)]
    assert curves.differences(cases) == (
        "m: the largest relative difference between 2 meshes is 2.0e-01, at step 2 of 2",
    )
    assert curves.differences(cases[:1]) == ("m: one mesh, with which none can be compared",)


def test_every_word_of_the_results_is_text(tmp_path: Path) -> None:
    page = made(results.hostile(tmp_path))
    names = [tag for tag, _ in page.elements]
    assert names.count("script") == 3 and "img" not in names
    assert page.text.count(results.HOSTILE) > 20
    assert results.HOSTILE in json.dumps(json.loads(page.scripts[0])).replace('\\"', '"')


def test_the_policy_lets_run_what_the_page_holds_and_nothing_else(tmp_path: Path) -> None:
    page = made(results.of_a_cpu(tmp_path))
    (policy,) = (attrs["content"] for tag, attrs in page.elements if tag == "meta" and "http-equiv" in attrs)
    assert (
        policy is not None and "unsafe" not in policy and policy.startswith("default-src 'none'; script-src 'sha256-")
    )
    allowed = re.findall("'sha256-([^']+)'", policy)
    assert [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]
    ] == allowed[:2]
    assert not [attrs for _, attrs in page.elements for name in ("src", "srcset") if name in attrs]


def test_what_cannot_be_read_is_told_in_a_line_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = made(results.broken(tmp_path))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7
    assert all(line.removeprefix("not read: ") in page.text for line in lines)
    assert all(
        line.startswith(("not read: NVIDIA-H200/2", "not read: reshard_bytes.json: ", "not read: aot/"))
        for line in lines
    )
    assert "7 files could not be read" in page.text and "NVIDIA H200" in page.text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('[{"engine": "a", "mesh": "2", "shape": [2, 2], "pairs": 1, "mean": NaN, "max": 1.0, "ratios": {}}]', id="nan"),
        pytest.param('[{"engine": "a", "mesh": "2", "shape": [2, 2], "pairs": 1, "mean": 1.0, "max": 1.0, "ratios": {"x": 1}}]', id="word"),
        pytest.param('[{"engine": "a", "mesh": "2", "shape": [2, 2], "pairs": 1, "mean": 1.0, "max": 1.0, "ratios": {"1": 0}}]', id="none"),
        pytest.param("[1]", id="no-object"),
    ],
)  # fmt: skip
def test_rows_that_make_no_chart_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "reshard_bytes.json").write_text(text)
    found = sources.read(tmp_path)
    assert found.engines == () and len(found.problems) == 1


def test_an_empty_history_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No run is in the history yet" in made(tmp_path).text
    assert re.search(r"The page is .*index.html: \d\.\d\d MB, no device\.", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        pytest.param(
            ["--results", "{0}/none"], "is no folder; give the folder of a history to --results", id="no-results"
        ),
        pytest.param(["--results", "{0}", "--output", "{0}/file/x"], "give another file to --output", id="no-output"),
    ],
)
def test_paths_that_cannot_be_used_are_told_in_a_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=told):
        main([each.format(tmp_path) for each in arguments])


def test_no_torch_is_needed() -> None:
    code = "import sys, benchmarks.dashboard.__main__; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
