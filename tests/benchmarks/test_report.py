"""The page says how many cases there are, sets the ways side by side, and shows every name as it was written."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.figures import by_baseline
from benchmarks.history import HistoryError
from benchmarks.record import Case, printable
from tests.benchmarks.cases import beside, case, counted, pytest_file, run, timed, unmeasured

HOSTILE = [
    pytest.param("<script>alert('x')</script>", id="script"),
    pytest.param("<img src=x onerror=alert(1)>", id="html"),
    pytest.param("a | b || \\| c", id="pipes"),
    pytest.param("a\nb\r\n| c | d |\n# e", id="newlines"),
    pytest.param("&lt;b&gt; &amp;", id="entities"),
    pytest.param("`code` **bold** _x_ ~~y~~ $z$", id="marks"),
    pytest.param("[link](https://example.com) ![x](y)", id="links"),
    pytest.param("\u202eright to left\x1b[31m", id="controls"),
    pytest.param("loss[4096x8, bf16] 2 é", id="usual"),
]


class Cells(HTMLParser):
    """What a reader sees in the headings and cells of a page; tags are those of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag in ("td", "th", "h1", "h2", "li", "p"):
            self.shown.append("")

    def handle_data(self, data: str) -> None:
        if self.shown:
            self.shown[-1] += data


def rendered(markdown: str) -> Cells:
    parser = (
        pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    )
    cells = Cells()
    cells.feed(parser.render(markdown))
    cells.shown = [each.strip() for each in cells.shown]
    return cells


@pytest.mark.parametrize("name", HOSTILE)
def test_every_name_is_shown_as_text(name: str) -> None:
    old = run(
        Case(name=name, group=name, way="Weft", kind="count", status="measured", figures={name: 1}),
        Case(name=name, group=name, way=name, kind="count", status="measured", figures={name: 2}),
        Case(name=name, group=name, way="other", kind="count", status="failed", figures={"error": name}),
        device=f"H {name}",
        commit=name[:10],
    )
    new = run(
        *(
            Case(name=name, group=name, way=way, kind="count", status="measured", figures={name: 3})
            for way in ("Weft", name)
        ),
        device=old.device,
    )
    page = rendered(report.report(old) + report.report(new, old))
    assert page.tags <= {"h1", "h2", "p", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"}
    shown = printable(name).strip()
    assert page.shown.count(shown) >= 5, "group, way, case and figure, in tables and headings"
    assert f"failed: {shown}" in page.shown
    assert any(f"H {shown}, commit {printable(name[:10])}"[:12] in each for each in page.shown)
    assert all("\n" not in each for each in page.shown)


MACHINE = "On AMD EPYC 9654, 8 cores, load 0.25"


def test_the_ways_stand_side_by_side_with_their_ratios_to_weft() -> None:
    page = report.report(
        run(
            case("loss[1]", roofline=0.912, peak_bytes=4_200_000_000),
            case("loss[1]", "Liger", 2e-3, peak_bytes=8_400_000_000),
            case("loss[1]", "Weft, one shard", 0.5e-3),
            case("loss[2]", median=3e-6),
            case("loss[2]", "Liger", 24e-6),
            unmeasured("loss[2]", "CCE", "absent"),
            unmeasured("loss[3]", error="no memory"),
            counted(bytes=6, collectives=0),
            counted("traffic", "DTensor", bytes=60, collectives=2),
        )
    )
    assert (
        page
        == rf"""# Benchmarks on NVIDIA H200, commit 0023456789, 2026-03-01T12:00:00Z

Of 9 cases 7 measured, 1 absent, 1 failed. {MACHINE}, with python 3.12.9, torch 2.11.0, triton 3.6.0.

Over Weft's, in the geometric mean of a group:

- in counts: DTensor 10.00 bytes
- in losses: Liger 4.00 time, 2.00 peak\_bytes

## counts

| case | figure | Weft | DTensor |
| --- | --- | --- | --- |
| traffic | bytes | 6 B | 60 B (10.00) |
| traffic | collectives | 0 | 2 |

## losses

| case | figure | Weft | Weft, one shard | CCE | Liger |
| --- | --- | --- | --- | --- | --- |
| loss\[1\] | time | 1 ms | 500 µs (0.50) |  | 2 ms (2.00) |
| loss\[1\] | roofline | 91.2% |  |  |  |
| loss\[1\] | peak\_bytes | 4.2 GB |  |  | 8.4 GB (2.00) |
| loss\[2\] | time | 3 µs |  | absent | 24 µs (8.00) |
| loss\[3\] |  | failed: no memory |  |  |  |
"""
    )


def test_a_time_that_was_taken_in_another_manner_is_marked() -> None:
    liger = case("loss", "Liger", 2e-3, timer="events", peak_bytes=8)
    page = report.report(run(case("loss", timer="graph", peak_bytes=4), liger))
    assert "| loss | time | 1 ms | 2 ms by events (2.00) |" in page
    assert "| loss | peak\\_bytes | 4 B | 8 B (2.00) |" in page


def test_a_mean_leaves_out_what_was_timed_in_another_manner() -> None:
    cases = [
        case(name, way, seconds, timer=timer)
        for name, way, seconds, timer in (
            ("a", "Weft", 1.0, "graph"), ("a", "eager", 2.0, "graph"), ("a", "Liger", 3.0, "events"),
            ("b", "Weft", 1.0, "events"), ("b", "eager", 4.0, "graph"), ("b", "Liger", 5.0, "events"),
        )
    ]  # fmt: skip
    assert by_baseline(cases) == {"eager": {"time": [2.0]}, "Liger": {"time": [5.0]}}


def test_a_time_of_the_host_is_called_so() -> None:
    step = Case(
        name="step", group="steps", way="Weft", kind="host_time", status="measured", figures={"seconds_median": 1.5}
    )
    assert "| step | time of the host | 1.5 s |" in report.report(run(step, device="cpu", dirty=True))


def test_changed_times_and_counts_and_new_and_lost_cases_are_listed() -> None:
    old = run(
        *beside(case("a"), case("b")), case("c", peak_bytes=8), case("d"), counted(bytes=6, rows=1), unmeasured("e")
    )
    new = run(
        *beside(case("a", median=1.01e-3), case("b", median=2e-3)), case("c", peak_bytes=4),
        counted(bytes=12, columns=2),
        case("e"), case("f"), minute=1,
    )  # fmt: skip
    page = report.report(new, old)
    assert (
        page[page.index("## Changed") :]
        == r"""## Changed since commit 0023456789, 2026-03-01T12:00:00Z

Beside their baselines 1 of 2 times slowed down, none sped up.

| group | case | way | figure | before | now | below 1 is worse (spread) |
| --- | --- | --- | --- | --- | --- | --- |
| counts | traffic | Weft | bytes | 6 B | 12 B | 0.50 |
| counts | traffic | Weft | columns |  | 2 |  |
| counts | traffic | Weft | rows | 1 |  |  |
| losses | b | Weft | time: torch over it | 1.00× | 0.50× | 0.50 (0.49 to 0.51) |
| losses | c | Weft | peak\_bytes | 8 B | 4 B | 2.00 |
| losses | d | Weft | status | measured | not there |  |
| losses | e | Weft | status | failed | measured |  |
| losses | f | Weft | status | not there | measured |  |
"""
    )
    slowed = run(*beside(case(median=2e-3), torch=2e-3), minute=1)
    assert report.report(slowed, run(*beside(case()))).endswith(
        "\n\nNothing changed beyond what the machine does, of 1 times beside their baselines. "
        "Of all else nothing changed.\n"
    )


def test_another_device_is_refused() -> None:
    with pytest.raises(HistoryError, match="give runs of one device"):
        report.report(run(), run(device="NVIDIA A100"))


def test_the_command_takes_a_run_or_what_pytest_benchmark_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_history = run(*beside(case("loss[4096]", median=5e-3))).write(tmp_path)
    of_pytest = pytest_file(tmp_path, timed(), timed("test_loss[torch-4096]", way="torch"))
    report.main([str(of_pytest), "--against", str(of_history)])
    row = "| losses | loss\\[4096\\] | Weft | time: torch over it | 0.20× | 1.00× | 5.00 (4.95 to 5.05) |"
    assert row in capsys.readouterr().out
    report.main([str(of_history)])
    assert "Of 2 cases 2 measured" in capsys.readouterr().out
    of_pytest.write_text("")
    with pytest.raises(SystemExit, match=r"^benchmarks.report: .*out.json: it is empty; give a run"):
        report.main([str(of_pytest)])
