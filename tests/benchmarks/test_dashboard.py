"""The page without a browser: its headline, every number the JSON's, every word text, and what cannot be read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vl_convert")
pytest.importorskip("bs4")

import bs4

from benchmarks import compare, history
from benchmarks.dashboard import changed, figures, sources, tiles
from benchmarks.dashboard.__main__ import main
from benchmarks.record import Case, Run
from tests.architecture.rules import ROOT
from tests.benchmarks import oracle, results
from tests.benchmarks.cases import beside, case, run
from tests.benchmarks.results import OTHER, count, cpu_run, gpu_run, host

MADE = ("of_a_cpu", "of_a_gpu", "of_two_machines", "hostile")


class Page:
    """A page: soup, text, titles of the marks, and cells by article, table, head of the row and head of the column."""

    def __init__(self, folder: Path) -> None:
        main(["--results", str(folder), "--output", str(folder / "index.html")])
        self.soup = bs4.BeautifulSoup((folder / "index.html").read_text(), "html.parser")
        self.text, self.tips = self.soup.main.text, [each.text for each in self.soup.select("svg title")]
        self.articles = [each["id"] for each in self.soup.select("article")]
        self.cells = {
            (
                *(table.find_parent("article")["id"], table["data-table"]),
                *(each.text for each in row.select("th")),
                column.text,
            ): [
                cell.find(string=True, recursive=False) or "", *(each.text for each in cell.select("small"))
            ]
            for table in self.soup.select("table")
            for row in table.select("tbody tr")
            for column, cell in zip(table.select("thead .number"), row.select("td"), strict=True)
        }  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Page]]:
    folders = {name: getattr(results, name)(tmp_path_factory.mktemp(name)) for name in MADE}
    return {name: (folder, Page(folder)) for name, folder in folders.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MADE)
def test_every_number_of_a_table_is_that_of_the_json(pages: dict[str, tuple[Path, Page]], name: str) -> None:
    folder, page = pages[name]
    wanted = {("any", *key): cell for key, cell in (oracle.shared(folder) if name in MADE[:2] else {}).items()}
    for article, runs in zip(page.articles, oracle.devices(folder), strict=False):
        wanted |= {(article, *key): cell for key, cell in oracle.tables(runs).items()}
    assert len(wanted) > 10
    wrong = []
    for key, (first, *rest) in wanted.items():
        text, *small = page.cells[key]
        told = re.split(", | to ", small[0]) if small else []
        if not oracle.shows(text, first) or len(rest) > len(told) or not all(map(oracle.shows, told, rest)):
            wrong.append((key, text, small, first, rest))
    assert not wrong
    untold = {key for key in page.cells.keys() - wanted.keys() if key[1].startswith("group") and page.cells[key][0]}
    assert all("failed" in page.cells[key][0] or "absent" in page.cells[key][0] for key in untold)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MADE[:3])
def test_the_numbers_of_a_mark_are_in_a_table(pages: dict[str, tuple[Path, Page]], name: str) -> None:
    """But for ratios and differences over runs and steps, whose two numbers the tables have."""
    _, page = pages[name]
    number = re.compile(r"(?<![\w.])\d[\d.]*(?:e[+-]?\d+)?(?:×|%| [TGMkmµn]?(?:s|B)\b)?")
    shown = {told for parts in page.cells.values() for part in parts for told in number.findall(part)}
    over = re.compile(r", step |\d{4}-\d\d-\d\d \w+: ")
    tips = [tip for tip in page.tips if ": " in tip and not over.search(tip)]
    assert len(tips) > 3
    assert not [tip for tip in tips if not set(number.findall(tip.split(": ")[-1])) <= shown]


@pytest.mark.exhaustive
def test_every_word_of_the_results_is_text(pages: dict[str, tuple[Path, Page]]) -> None:
    _, page = pages["hostile"]
    assert not page.soup.select("script, img")
    assert page.text.count(results.HOSTILE) > 20 and any(results.HOSTILE in tip for tip in page.tips)
    names = {name for tag in page.soup.find_all(True) for name in tag.attrs}
    assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcset")]
    policy = page.soup.select_one("meta[http-equiv]")["content"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "script" not in policy and "unsafe" not in policy
    links = [link["href"] for link in page.soup.select("a")]
    assert all(link.startswith("data:application/json;base64,") or page.soup.find(id=link[1:]) for link in links)


def device_of(*runs: Run) -> sources.Device:
    *earlier, newest = runs
    comparison = compare.compare(newest, compare.beside(newest, earlier), compare.Budgets.read())
    return sources.Device(newest.device, {str(at): each for at, each in enumerate(runs)}, comparison)


def cpu(*cases: Case, minute: int = 0, **rest: object) -> Run:
    return run(*cases, minute=minute, device="cpu", **rest)


def of(*runs: Run) -> changed.Changed:
    return changed.changed(device_of(*runs))


def test_the_first_lines_are_what_changed_beside_the_baselines_the_worst_first() -> None:
    before, now = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, {"a": 1.05, "b": 1.4, "c": 0.5, "d": 3.0}
    runs = [
        cpu(*beside(*(host("step", name, "Weft", each) for name, each in some.items()), torch=2.0), minute=minute)
        for minute, some in enumerate((before, now))
    ]
    found = of(*runs)
    assert [(line.name, line.shown, line.word, line.moved, line.clock) for line in found.lines] == [
        ("d", "3.00×", "slower", "2.00× → 0.67×", "1 s → 3 s"),
        ("b", "1.40×", "slower", "2.00× → 1.43×", "1 s → 1.4 s"),
        ("c", "2.00×", "faster", "2.00× → 4.00×", "1 s → 500 ms"),
    ]
    assert {line.of for line in found.lines} == {"host time, torch ÷ Weft"}
    assert found.sentence == (
        "On a CPU, beside their baselines 2 of 4 times slowed down, 1 sped up; no counted figure changed."
    )
    assert found.beside.startswith("Host times beside the median of 1 run on this machine. Counted figures")


NOISE = "nothing changed beyond what the machine does"
NO_COUNT = "no counted figure changed."


@pytest.mark.parametrize(
    ("runs", "sentence", "beside_"),
    [
        pytest.param([cpu_run()], "On a CPU there is one run, and none before it to compare with.", "", id="one"),
        pytest.param([run(*beside(case(median=pace), torch=pace), minute=pace) for pace in (1, 2)],
            f"On NVIDIA H200, {NOISE}, of 1 times beside their baselines; {NO_COUNT}",
            "of this GPU", id="the-machine"),
        pytest.param([run(case(median=pace), minute=pace) for pace in (1, 2)],
            f"On NVIDIA H200, no time is compared; {NO_COUNT}", "1 time without a baseline", id="alone"),
        pytest.param([cpu_run(1), cpu(*cpu_run().cases, minute=2, machine=OTHER)],
            f"On a CPU, no time is compared; {NO_COUNT}", "other runs are of other machines", id="other-machine"),
        pytest.param([cpu_run(1), cpu(*cpu_run().cases, minute=2, machine={})],
            f"On a CPU, no time is compared; {NO_COUNT}", "the machine of this run was not recorded", id="no-machine"),
        pytest.param([run(*beside(case())), run(*beside(case(), case("new")), minute=1)],
            f"On NVIDIA H200, {NOISE}, of 1 times beside their baselines; {NO_COUNT}",
            "1 time for the first time here", id="new"),
    ],
)  # fmt: skip
def test_without_a_change_it_says_so(runs: list[Run], sentence: str, beside_: str) -> None:
    found = of(*runs)
    assert (found.sentence, list(found.lines)) == (sentence, []) and beside_ in found.beside


def test_counted_figures_are_exact_and_the_compilers_stand_apart() -> None:
    def of_run(spilt: int, registers: int) -> Run:
        spill, over = (
            count("m", "a", "Weft", spill_bytes=spilt),
            count("linear_cross_entropy", "b", "Weft", peak_bytes=1 + spilt),
        )
        return cpu(spill, over, count("compiled", "k", "Weft, sm_90", registers=registers), minute=spilt)

    found = of(of_run(0, 32), of_run(1, 64))
    assert [(line.name, line.shown, line.word) for line in found.lines] == [
        ("a", "from 0", "more"),
        ("b", "2.00×", "more"),
    ]
    assert [(line.name, line.moved) for line in found.compiled] == [("k", "32 → 64")]
    assert [line.shown for line in of(of_run(1, 64), of_run(0, 64)).lines] == ["2.00×", "to 0"]


def test_an_exceeded_budget_stands_first() -> None:
    held = "linear_cross_entropy, 4096 tokens"
    old, new = (
        cpu(
            *beside(host("step", "a", "Weft", pace)),
            count("linear_cross_entropy", held, "Weft", peak_bytes=1.05e9 * size),
            minute=at,
        )
        for at, (pace, size) in enumerate(((1.0, 1.0), (9.0, 1.1)))
    )
    assert [(line.name, line.broken) for line in of(old, new).lines] == [(held, True), ("a", False)]
    assert [line.broken for line in of(gpu_run(0), gpu_run(5)).lines] == [True, True]


@pytest.mark.parametrize(
    ("runs", "word", "told"),
    [
        pytest.param([gpu_run(0), gpu_run(5)],
            "Fails", "3 budgets broken by the newest run, the first by cross_entropy_speed", id="slower"),
        pytest.param([gpu_run(0), gpu_run(1)], "Passes", "2 kernel times judged beside 1 earlier run", id="as-before"),
        pytest.param([cpu_run()],
            "Passes", "1 of 23 budgets of counted figures kept; there is no earlier run", id="first"),
        pytest.param([run()],
            "Not judged", "no figure has a budget; there is no earlier run", id="nothing-to-judge-by"),
        pytest.param([run(case(), case("old")), run(minute=1)],
            "Fails", "losses: old, Weft: measured in the run of", id="lost"),
    ],
)  # fmt: skip
def test_the_verdict_is_said_in_words(runs: list[Run], word: str, told: str) -> None:
    found = changed.verdict(device_of(*runs), len(compare.Budgets.read().counts))
    assert found.word == word and told in found.told


def test_tiles_say_where_weft_stands() -> None:
    assert [(tile.value, tile.beside) for tile in tiles.tiles(cpu_run())] == [
        ("1.05 GB", "eager torch 5.22 GB; 4096 tokens"),
        ("1.00×", "DTensor 10.05×; 4x4x4, 8192 x 8192 fp32"),
        ("6.00 B", f"{results.LIGER[0]} 6.00 B; {results.LIGER[1]} 10.00 B; cross_entropy; at most 6.02 B in 2 cases"),
        ("21", "torch 23; a step of llama-tiny, dp=2 x tp=2"),
    ]
    first, second, *_ = tiles.tiles(gpu_run(0))
    assert (first.value, second.value) == ("88% to 93%", "3.10×"), (
        "neither the roofline's measure nor the noise is a rival"
    )
    assert second.beside.endswith("; Liger 1.60×") and tiles.tiles(run()) == []


def test_rows_are_ways_and_losses_are_told_from_one_process() -> None:
    cases = {group: some for group, kind, some in figures.groups(cpu_run()) if kind == "count"}
    first, second = (figures.of_group(group, "count", cases[group]) for group in ("cross_entropy", "loss_curves"))
    assert first[0].told.endswith(f"Weft 6 to 6.02; {results.LIGER[0]} 6; {results.LIGER[1]} 10.")
    assert [figure.note.split(",")[0] for figure in second] == ["Loss by step", "Difference to Weft"]


@pytest.mark.exhaustive
def test_an_unreadable_file_is_told_in_a_line_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(results.broken(tmp_path))
    lines = [line.removeprefix("not read: ") for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 9 and all(line in page.text for line in lines)
    files = ("NVIDIA-H200/2", "reshard_bytes.json: ", "predicted.json: ", "predicted_seconds_here.json: ", "aot/")
    assert all(line.startswith(files) for line in lines)
    assert "9 files could not be read" in page.text and "NVIDIA H200" in page.text


@pytest.mark.parametrize("ratios", ['{"x": 1}', '{"1": 0}', '{"NaN": 1}', "1"])
def test_rows_that_make_no_chart_are_refused(tmp_path: Path, ratios: str) -> None:
    row = f'[{{"engine": "a", "mesh": "2", "shape": [2, 2], "pairs": 1, "mean": 1.0, "max": 1.0, "ratios": {ratios}}}]'
    (tmp_path / "reshard_bytes.json").write_text(row)
    found = sources.read(tmp_path)
    assert found.engines == () and len(found.problems) == 1


def test_an_empty_history_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No run is in the history yet" in Page(tmp_path).text
    assert re.search(r"The page is .*index.html: \d\.\d\d MB, no device\.", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--results", "{0}/none"], "is no folder; give the folder of a history to --results"),
        (["--results", "{0}", "--output", "{0}/file/x"], "give another file to --output"),
    ],
    ids=["no-results", "no-output"],
)
def test_paths_that_cannot_be_used_are_told_in_a_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=told):
        main([each.format(tmp_path) for each in arguments])


def test_no_torch_is_needed() -> None:
    code = "import sys, benchmarks.dashboard.__main__; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"


def test_the_readmes_picture_is_of_the_newest_run() -> None:
    newest = list(history.runs("cpu").runs)[-1]
    named = f"run\0cpu/{newest}".encode() in (ROOT / "docs/dashboard.png").read_bytes()
    assert named, "./run test_browser; cp dashboard/shots/ours-light-1280-first.png docs/dashboard.png"
