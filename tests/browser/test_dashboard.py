"""The page in a real browser: nothing is fetched, nothing fails, every number is the JSON's, and everybody can use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history
from benchmarks.dashboard.__main__ import main
from tests.architecture.rules import ROOT
from tests.benchmarks import results
from tests.browser import first_screen, truth
from tests.browser.pages import opened
from tests.browser.pictures import labelled

pytestmark = pytest.mark.browser
SHOTS = ROOT / "dashboard" / "shots"
MADE: dict[str, Callable[[Path], Path]] = {
    "ours": lambda folder: history.RESULTS,  # of which the README has a picture
    "cpu": results.of_a_cpu,
    "gpu": results.of_a_gpu,
    "machines": results.of_two_machines,
    "hostile": results.hostile,
    "broken": results.broken,
    "empty": lambda folder: folder,
}
EVERYWHERE = (("light", 1280), ("dark", 390))
VARIANTS = [
    pytest.param(name, scheme, width, id=f"{name}-{scheme}-{width}")
    for name in MADE
    for scheme in ("light", "dark")
    for width in (1280, 390)
    if name in ("ours", "gpu") or (scheme, width) in EVERYWHERE
]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each kind of results: their folder, and the page."""
    found = {}
    for name, make in MADE.items():
        folder = make(tmp_path_factory.mktemp(name))
        page = tmp_path_factory.mktemp("pages") / f"{name}.html"
        main(["--results", str(folder), "--output", str(page)])
        found[name] = folder, page
    return found


@pytest.mark.parametrize(("name", "scheme", "width"), VARIANTS)
def test_everybody_can_read_it_without_a_network(
    made: dict[str, tuple[Path, Path]], chromium: Any, name: str, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    _, file = made[name]
    with opened(chromium, file, scheme=scheme, width=width) as found:
        SHOTS.mkdir(parents=True, exist_ok=True)
        first = found.page.screenshot()
        shown = found.page.locator("button[data-file]").first  # the newest run of the device that stands first
        named = labelled(first, str(shown.get_attribute("data-file"))) if shown.count() else first
        (SHOTS / f"{name}-{scheme}-{width}-first.png").write_bytes(named)
        found.page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
        for unfold in (lambda: None, found.open_all):
            unfold()
            sizes = found.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert sizes[0] <= sizes[1], "the page itself does not scroll sideways"
        # Of all that there is: nothing is folded now. Contrast takes most of the time, and hangs on no width: once a scheme.
        rules = {"color-contrast": {"enabled": (scheme, width) in EVERYWHERE}}
        options = {"rules": rules, "resultTypes": ["violations"]}  # what passes is not listed
        alike = {
            "exclude": [[".multiples figure:nth-child(n+3)"]]
        }  # small charts as the first two: a minute for a hundred
        violations = Axe().run(found.page, context=alike, options=options).response["violations"]
        assert not violations, json.dumps([(each["id"], each["nodes"][0]["html"]) for each in violations])
        empty = found.page.evaluate(
            "[...document.querySelectorAll('.chart')].filter(each => !each.querySelector('svg')).length"
        )
        assert empty == 0, "every chart is drawn"
        assert found.page.evaluate("[...document.querySelectorAll('.chart')].every(each => each.ariaLabel.length > 10)")
    assert found.requests == [file.as_uri()]
    assert found.complaints == []


@pytest.mark.parametrize("name", MADE)
def test_every_number_is_that_of_the_json(made: dict[str, tuple[Path, Path]], chromium: Any, name: str) -> None:
    folder, file = made[name]
    with opened(chromium, file) as found:
        tables, first_screens = found.tables(), found.first_screens()
    for first, runs in zip(first_screens, truth.runs_by_device(folder), strict=True):
        own = [table for table in tables if table["article"] == first["id"]]
        truth.check_groups([table for table in own if table["name"].startswith("group ")], runs[-1])
        truth.check_history([table for table in own if table["name"] == "history"], runs)
        truth.check_changes([table for table in own if table["name"] == "changes"], runs)
        first_screen.check(first, runs)
        truth.check_lines(first["lines"], first["title"], runs)
        truth.check_runs([table for table in own if table["name"] == "runs"], runs)
    truth.check_shared([table for table in tables if table["article"] == "any"], folder)


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_the_theme_is_chosen_by_keyboard_and_kept_in_memory_alone(
    made: dict[str, tuple[Path, Path]], chromium: Any, key: str
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    letters = "getComputedStyle(document.querySelector('.chart svg text')).fill"
    with opened(chromium, made["cpu"][1]) as found:
        light = found.page.evaluate(ground), found.page.evaluate(letters)
        for _ in range(9):
            found.page.keyboard.press("Tab")
            if found.page.evaluate("document.activeElement.id") == "theme":
                break
        found.page.keyboard.press(key)
        found.drawn()
        dark = found.page.evaluate(ground), found.page.evaluate(letters)
        assert light[0] != dark[0] and light[1] != dark[1], "the page and its charts"
        assert found.page.get_attribute("#theme", "aria-pressed") == "true"
        assert found.page.evaluate("document.cookie") == ""
        found.page.reload()
        found.drawn()
        assert found.page.evaluate(ground) == light[0]


def test_what_changed_leads_to_its_history_by_keyboard(made: dict[str, tuple[Path, Path]], chromium: Any) -> None:
    with opened(chromium, made["gpu"][1]) as found:
        line = found.page.locator(".changed a").first
        name = line.locator(".what").evaluate("each => each.firstChild.data")
        target = str(line.get_attribute("href")).removeprefix("#")
        figure = found.page.locator(f"[id='{target}']")
        assert not figure.is_visible(), "the history is folded"
        line.focus()
        found.page.keyboard.press("Enter")
        figure.locator("svg").wait_for()
        assert figure.locator("figcaption").inner_text().startswith(name)
        assert found.page.evaluate("document.activeElement.id") == target
        assert figure.evaluate("each => each.getBoundingClientRect().top") >= 0
        ways = found.page.locator("details.past[open] .ways li").all_inner_texts()
        assert ways[0] == "Weft" and "eager torch" in ways
        assert all(
            f"{way} " in str(figure.locator(".chart").get_attribute("aria-label")) for way in ("Weft", "eager torch")
        )
    assert found.complaints == []


def test_a_line_of_the_history_joins_runs_of_one_machine(made: dict[str, tuple[Path, Path]], chromium: Any) -> None:
    """Three runs of one machine, with one of another in between, and two ways."""
    with opened(chromium, made["machines"][1]) as found:
        found.open_all()
        chart = found.page.locator("details.past figure", has_text="matmul").first
        assert chart.locator(".mark-line path").count() == 2 * 3, "Weft, DTensor and the local op, on each machine"
        assert chart.locator(".mark-symbol path").count() == 4 * 3


def test_long_tables_are_folded(made: dict[str, tuple[Path, Path]], chromium: Any) -> None:
    rows = "each => each.querySelectorAll('tbody tr').length"
    with opened(chromium, made["ours"][1]) as found:
        tables = found.page.locator("details.table[open]")
        assert all(tables.nth(at).evaluate(rows) <= 12 for at in range(tables.count()))
        for name in ("compiled", "ratios", "history", "group reshard_time"):
            assert not found.page.locator(f"table[data-table='{name}']").first.is_visible()


def test_words_of_the_results_are_text_in_the_page_and_in_tips(
    made: dict[str, tuple[Path, Path]], chromium: Any
) -> None:
    with opened(chromium, made["hostile"][1]) as found:
        found.open_all()
        assert found.page.title() == "Weft: benchmarks"
        assert found.page.locator("main img").count() == 0
        assert found.page.locator("script").count() == 3, "the data, Vega and the page's own"
        assert results.HOSTILE in found.page.locator("main").inner_text()
        label = found.page.locator(".chart svg text", has_text="</script>").first
        label.hover()
        tip = found.page.locator("#vg-tooltip-element.visible")
        assert "<img src=x" in tip.inner_text()
        assert tip.locator("img").count() == 0
    assert found.complaints == []


def test_the_raw_files_are_in_the_page(made: dict[str, tuple[Path, Path]], chromium: Any) -> None:
    folder, file = made["gpu"]
    with opened(chromium, file) as found:
        buttons = found.page.locator("button[data-file]")
        assert buttons.count() == 4
        for at in range(buttons.count()):
            name = buttons.nth(at).get_attribute("data-file")
            with found.page.expect_download() as download:
                buttons.nth(at).click()
            told = json.loads(Path(download.value.path()).read_text())
            assert told == json.loads(truth.raw_file(folder, name).read_text())
    assert all(url.startswith(("file:", "blob:")) for url in found.requests)
