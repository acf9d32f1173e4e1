"""A page as a visitor has it: opened in a browser, with all that it asked for and complained of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.limits import PATIENCE

# Of each table: the article and name it has, its heads, and its rows as texts.
TABLES = """
() => [...document.querySelectorAll("table[data-table]")].map(table => ({
  article: table.closest("article").id,
  name: table.dataset.table,
  head: [...table.querySelectorAll("thead th")].map(each => each.textContent),
  rows: [...table.querySelectorAll("tbody tr")].map(row => ({
    heads: [...row.querySelectorAll("th")].map(each => each.textContent),
    cells: [...row.querySelectorAll("td")].map(cell => [
      cell.firstChild?.nodeType === Node.TEXT_NODE ? cell.firstChild.data : "",
      cell.querySelector("small")?.textContent ?? "",
    ]),
  })),
}))
"""
# Of each device: what stands above its sections.
FIRST_SCREENS = """
() => [...document.querySelectorAll("article:not(#any)")].map(article => ({
  id: article.id,
  title: article.querySelector(".sentence").textContent,
  sentence: article.querySelector(".standing").textContent,
  lines: [...article.querySelectorAll(".changed li")].map(each => ({
    growth: each.querySelector(".growth").firstChild.data.trim(),
    word: each.querySelector(".growth .quiet").textContent,
    name: each.querySelector(".what").firstChild.data,
    of: each.querySelector(".what .quiet").textContent,
    from: each.querySelector(".from").textContent,
    others: each.querySelector(".others").textContent,
    broken: each.querySelector(".budget") !== null,
    link: each.querySelector("a")?.hash.slice(1) ?? null,
  })),
  facts: Object.fromEntries([...article.querySelectorAll("header .facts > div")].map(each =>
    [each.querySelector("dt").textContent, each.querySelector("dd").textContent.trim()])),
  date: article.querySelector("header time").dateTime,
  word: article.querySelector("header .verdict strong").textContent,
  tiles: [...article.querySelectorAll(".tiles li")].map(each =>
    [each.querySelector(".value").textContent, each.querySelector(".beside").textContent]),
}))
"""


@dataclass(frozen=True, slots=True)
class Opened:
    page: Any  # Playwright's
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def tables(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(TABLES)
        return found

    def first_screens(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(FIRST_SCREENS)
        return found

    def open_all(self) -> None:
        """Unfolds all there is, and waits until what was folded is drawn."""
        self.page.evaluate(
            "document.querySelectorAll('details').forEach(each => each.open = true); "
            "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
        )
        self.drawn()

    def drawn(self) -> None:
        self.page.wait_for_selector("html[data-charts=drawn]", timeout=1000 * PATIENCE)


@contextmanager
def opened(browser: Any, file: Path, *, scheme: str = "light", width: int = 1280) -> Iterator[Opened]:
    context = browser.new_context(
        viewport={"width": width, "height": 800 if width > 600 else 844}, color_scheme=scheme, accept_downloads=True
    )
    found = Opened(context.new_page())
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.on("console", lambda said: found.complaints.append(f"{said.type}: {said.text}"))
    found.page.on("pageerror", lambda error: found.complaints.append(f"error: {error}"))
    found.page.goto(file.as_uri())
    found.drawn()
    yield found
    context.close()
