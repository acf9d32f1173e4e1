"""The pages of the ops: each op has a program that calls it, and its name leads there from the first page."""

from __future__ import annotations

import re

import pytest
from weft import kernels

from tests.architecture.rules import ROOT

FOLDER = ROOT / "docs/kernels"
INDEX = (FOLDER / "index.md").read_text()
ELSEWHERE = {"KeyValueCache", "on_local_tensors"}  # what an op is given, and what makes one: guides have those


@pytest.mark.parametrize("name", sorted({*kernels.__all__} - ELSEWHERE))
def test_an_op_has_a_page_with_a_program_that_calls_it(name: str) -> None:
    (page,) = re.findall(
        rf"^\| [^|\n]*`{name}`[^|\n]* \| [^|\n]+ \| \[[^]]+\]\(([\w./]+\.md)\) \|$", INDEX, re.MULTILINE
    )
    programs = re.findall(r"^```python\n(.*?)^```", (FOLDER / page).read_text(), re.MULTILINE | re.DOTALL)
    assert any(re.search(rf"\b{name}\(", program) for program in programs), page


def test_the_first_page_leads_to_all_others() -> None:
    pages = {page.name for page in FOLDER.glob("*.md")} - {"index.md"}
    (tree,) = re.findall(r"```\{toctree\}\n:hidden:\n\n(.*?)```", INDEX, re.DOTALL)
    assert {f"{name}.md" for name in tree.split()} == pages == {*re.findall(r"\((\w+\.md)\) \|$", INDEX, re.MULTILINE)}


def test_pages_begin_with_a_program_and_say_their_limits() -> None:
    for page in FOLDER.glob("*.md"):
        text = page.read_text()
        assert text.index("```python") < text.index("\n## "), page.name
        assert page.name == "index.md" or "\n## Limits\n" in text, page.name
