"""The ops' documentation pages: each op has a program that calls it, and the index leads from its name to the page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from weft import kernels

from tests.architecture.rules import ROOT

FOLDER = ROOT / "docs/kernels"
INDEX = (FOLDER / "index.md").read_text()
ELSEWHERE = {"KeyValueCache", "on_local_tensors"}  # an argument of ops, and a maker of ops: guides explain both


@pytest.mark.every_value
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


def _parameters(name: str) -> set[str]:
    """The parameters of an op; a form for process groups has the options of the op itself."""
    known = set(inspect.signature(getattr(kernels, name)).parameters)
    return known | (_parameters(name.removeprefix("vocab_parallel_")) if "options" in known else set())


OPS = {name: _parameters(name) for name in kernels.__all__ if name not in ELSEWHERE}
OPTIONS = set().union(*OPS.values())
PAGES = [*sorted(FOLDER.glob("*.md")), *sorted((ROOT / "docs/api").glob("*kernels*.md"))]


def misnamed(text: str) -> list[str]:
    """The options that a page's prose gives to ops without them: `option`, `option=value`, `op(option=value)`.

    A sentence that names ops speaks of their options; any other sentence speaks of the page's ops.
    """
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    of_page, found = {name for name in OPS if re.search(rf"\b{name}\b", text)}, []
    for sentence in re.split(r"(?<=[.:;|])\s+|\n\n+", prose):
        spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", sentence)]
        calls = [match for span in spans if (match := re.fullmatch(r"(\w+)\((.*)\)", span)) and match[1] in OPS]
        found += [
            f"{call[1]}({option}=)"
            for call in calls
            for option in re.findall(r"(\w+)=", call[2])
            if option not in OPS[call[1]]
        ]
        named = {span for span in spans if span in OPS} | {call[1] for call in calls} or of_page
        options = {match[1] for span in spans if (match := re.fullmatch(r"(\w+)(=.*)?", span))} & OPTIONS - set(OPS)
        known = set().union(*(OPS[name] for name in named))
        found += [f"{option} of {', '.join(sorted(named))}" for option in sorted(options - known)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_options_that_a_page_names_are_taken(page: Path) -> None:
    assert misnamed(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("With `cos`, `sin` and `head_dim` the outputs of `qkv_linear` are turned.", ["head_dim of qkv_linear"]),
        ("`linear(…, softcap=5.0)` caps.", ["linear(softcap=)"]),
        ("`cross_entropy` takes `softcap` and `label_smoothing=0.1`.", []),
        ("`vocab_parallel_cross_entropy` takes `z_loss` and `group`.", []),
        ("The page of `dropout`.\n\nThe option `window` hides keys.", ["window of dropout"]),
        ("```python\ndropout(x, window=3)\n```\n`dropout` with `p`.", []),
    ],
)
def test_an_argument_that_no_op_of_a_sentence_takes_is_found(text: str, found: list[str]) -> None:
    assert misnamed(text) == found
