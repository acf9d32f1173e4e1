"""The page in a real browser: nothing is fetched, nothing fails, everybody can use the page. Takes its pictures."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history
from benchmarks.dashboard.__main__ import main
from tests.architecture.rules import ROOT
from tests.benchmarks import results

pytestmark = pytest.mark.browser
SHOTS = ROOT / "dashboard" / "shots"
MADE: dict[str, Callable[[Path], Path]] = {
    "ours": lambda folder: history.RESULTS,  # of which the README has a picture
    "gpu": results.of_a_gpu,
    "machines": results.of_two_machines,
    "hostile": results.hostile,
    "broken": results.broken,
    "empty": lambda folder: folder,
}
EVERYWHERE = (("light", 1280), ("dark", 390))
GROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages."""
    found = {name: tmp_path_factory.mktemp("pages") / f"{name}.html" for name in MADE}
    for name, make in MADE.items():
        main(["--results", str(make(tmp_path_factory.mktemp(name))), "--output", str(found[name])])
    return found


@contextmanager
def opened(browser: Any, file: Path, *, scheme: str = "light", width: int = 1280) -> Iterator[Any]:
    """The page in a visitor's browser. The page may request no file, and print no message to the console."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, accept_downloads=True)
    page, requests, complaints = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    yield page
    assert (complaints, {each for each in requests if not each.startswith("data:")}) == ([], {file.as_uri()})
    context.close()


def labelled(png: bytes, run: str) -> bytes:
    """The picture, with the name of a run in a tEXt chunk after the header: https://www.w3.org/TR/png-3/#11tEXt."""
    text = b"tEXtrun\0" + run.encode("latin-1")
    return png[:33] + (len(text) - 4).to_bytes(4) + text + zlib.crc32(text).to_bytes(4) + png[33:]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    ("scheme", "width"), [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]
)
def test_everybody_can_read_it_without_a_network(
    made: dict[str, Path], chromium: Any, name: str, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    with opened(chromium, made[name], scheme=scheme, width=width) as page:
        assert page.title() == "Weft: benchmarks", "no word of the results was run"
        SHOTS.mkdir(parents=True, exist_ok=True)
        shown = page.locator("a[data-file]").first  # the newest run of the device that stands first
        first = page.screenshot()
        first = labelled(first, str(shown.get_attribute("data-file"))) if shown.count() else first
        (SHOTS / f"{name}-{scheme}-{width}-first.png").write_bytes(first)
        page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
            "the page does not scroll sideways"
        )
        assert page.evaluate("[...document.querySelectorAll('svg')].every(each => each.ariaLabel.length > 10)")
        # Of what is alike the first: a minute for all. Contrast hangs on no width: once a scheme.
        page.evaluate(
            "document.querySelectorAll('figure:nth-child(n+3), tr:nth-child(n+5)').forEach(each => each.remove())"
        )
        rules = {"color-contrast": {"enabled": (scheme, width) in EVERYWHERE}}
        options = {"rules": rules, "resultTypes": ["violations"]}  # what passes is not listed
        violations = Axe().run(page, options=options).response["violations"]
        assert not violations, json.dumps([(each["id"], each["nodes"][0]["html"]) for each in violations])


def test_the_theme_is_chosen_by_keyboard_for_page_and_charts(made: dict[str, Path], chromium: Any) -> None:
    letters = "getComputedStyle(document.querySelector('figure text')).fill"
    with opened(chromium, made["ours"]) as page:
        light = page.evaluate(GROUND), page.evaluate(letters)
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowLeft")  # of the three the last
        assert page.evaluate("document.activeElement.id") == "dark"
        dark = page.evaluate(GROUND), page.evaluate(letters)
        assert light[0] != dark[0] and light[1] != dark[1]
        page.reload()
        assert page.evaluate("document.cookie") == ""


def test_the_files_are_in_the_page(made: dict[str, Path], chromium: Any) -> None:
    with opened(chromium, made["ours"]) as page:
        links = page.locator("a[data-file]")
        names = [str(links.nth(at).get_attribute("data-file")) for at in range(links.count())]
        assert {*names} >= {file.name for file in history.RESULTS.glob("*.json")}, "each kept file can be downloaded"
        for at, name in enumerate(names):
            with page.expect_download() as download:
                links.nth(at).click()
            told = json.loads(Path(download.value.path()).read_text())
            assert told == json.loads((history.RESULTS / name).read_text())


def test_printed_it_is_light_and_shows_its_tables(made: dict[str, Path], chromium: Any) -> None:
    with opened(chromium, made["machines"], scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(GROUND) == "rgb(255, 255, 255)"
        assert page.locator("table").first.bounding_box()["height"] > 20
