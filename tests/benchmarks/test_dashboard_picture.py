"""The README's picture of the page is of the newest run that is kept."""

from __future__ import annotations

from benchmarks import history
from benchmarks.dashboard import sources
from tests.architecture.rules import ROOT
from tests.browser.pictures import labelled, run_of

PICTURE = (ROOT / "docs/dashboard.png").read_bytes()


def test_the_readmes_picture_is_of_the_newest_run() -> None:
    first = sources.read(history.RESULTS).devices[0]
    newest = f"{first.name}/{list(first.runs)[-1]}"
    assert run_of(PICTURE) == newest, (
        "./run test_browser; cp dashboard/shots/ours-light-1280-first.png docs/dashboard.png"
    )


def test_a_picture_says_which_run_it_shows() -> None:
    header = PICTURE[:33]  # the signature, and one chunk of 13 bytes
    assert run_of(header) is None
    assert run_of(labelled(header, "cpu/other.json")) == "cpu/other.json"
