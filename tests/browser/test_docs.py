"""The pages of the documentation in a browser: every block is read whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page.relative_to(ROOT / "docs").with_suffix("")
    for page in (ROOT / "docs").rglob("*.md")
    if "api" not in page.parts and "_build" not in page.parts
)
# Every block that is wider than its place, and every block or table that reaches past the window: how each begins.
CUT_OFF = """
() => [...document.querySelectorAll("pre, .table-wrapper")].filter(each =>
  each.matches("pre") && each.scrollWidth > each.clientWidth + 1 || each.getBoundingClientRect().right > innerWidth
).map(each => each.textContent.trim().slice(0, 60))
"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages without the reference, which needs torch. Links to the reference are warnings, and are ignored."""
    built = tmp_path_factory.mktemp("html")
    without = ("-D", "exclude_patterns=_build,api/*")
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", *without, str(ROOT / "docs"), str(built)],
        check=True,
        capture_output=True,
    )
    return built


@pytest.mark.parametrize("width", [1280, 1440])
def test_no_block_of_a_page_is_cut_off(width: int, html: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900})
    found = {}
    for name in PAGES:
        page.goto((html / name).with_suffix(".html").as_uri())
        if cut := page.evaluate(CUT_OFF):
            found[str(name)] = cut
    page.close()
    assert not found


def test_a_block_that_is_cut_off_is_found(html: Path, chromium: Any) -> None:
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.goto((html / "reshard.html").as_uri())
    page.add_style_tag(content=".highlight pre { white-space: pre }")
    assert any("->" in each for each in page.evaluate(CUT_OFF))
    page.close()


def test_pages_are_found() -> None:
    assert {Path("index"), Path("guides/fine_tune"), Path("kernels/attention")} <= set(PAGES)
