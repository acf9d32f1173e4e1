"""Sphinx's settings, and the conversion of Weft's docstrings to reStructuredText."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from sphinx.pycode import ModuleAnalyzer

project = "Weft"
project_copyright = "the Weft authors; Apache-2.0"
version = release = "0.1.0"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Weft"
html_static_path = ["style"]
html_css_files = ["blocks.css"]
html_copy_source = False
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}  # code lines of 100 characters fit
html_show_sphinx = False
highlight_language = "text"
smartquotes = False  # quotes belong to values: "none"
myst_heading_anchors = 3  # levels of headings which links may target

nitpicky = True  # a page naming an object missing from the reference is an error
nitpick_ignore_regex = [("py:.*", r"(?!weft\.\w+\.\w+$).*")]  # names in signatures: other packages', and inner modules'

add_module_names = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# The beginning of a docstring's item, at the start of a line or after a sentence: "gate, up: …", "Layouts: …",
# "Raises …".
ITEM = r"(?:(?:[a-z_]\w*(?:, [a-z_]\w*)*|[A-Z][a-z]+)(?=: )|Raises(?= )|Returns(?= ))"


def markup(docstring: str) -> Iterator[str]:
    """Yields a docstring as lines of reStructuredText. Items become a list, and text indented by four becomes code."""
    for number, paragraph in enumerate(re.split(r"\n{2,}", docstring.strip("\n"))):
        if paragraph.startswith("    "):
            yield from (".. code-block:: python", "", *paragraph.split("\n"), "")
            continue
        for text in re.split(rf"\n(?={ITEM})|(?<=\.) (?={ITEM})|(?<=\.)\n(?=[A-Z`])", paragraph):
            line, item = " ".join(text.split()), re.match(ITEM, text) if number else None
            yield f"- **{item[0]}**{inline(line[item.end() :])}" if item else inline(line)
            yield ""


def inline(text: str) -> str:
    """Converts `code` to a literal, and escapes markup in all other text."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_|])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"``{part}``\\ " for part in parts[1::2]]
    return "".join(parts)


def described_fields(described: type) -> Iterator[str]:
    """Yields an item for each field of a dataclass with a text in the source: name, default and text.

    The text is the comment `#:` above or behind the field, or the string below, and may stand in a base class.
    """
    for each in fields(described) if is_dataclass(described) else ():
        found = [texts_of(base.__module__).get((base.__qualname__, each.name)) for base in described.__mro__]
        if text := next(filter(None, found), None):
            yield f"- **{each.name}**{default_of(each)}: {inline(' '.join(text))}"
            yield ""


@functools.cache
def texts_of(module: str) -> dict[tuple[str, str], list[str]]:
    """The lines of text for each attribute of a module's classes, by (class, attribute)."""
    if not module.startswith("weft."):
        return {}
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return dict(analyzer.attr_docs)


def default_of(each: Field[Any]) -> str:
    """A field's default as in a signature. Empty for a field without a default, and for a function."""
    value = each.default if each.default_factory is MISSING else each.default_factory()
    return "" if value is MISSING or callable(value) else inline(f" = `{value!r}`").rstrip("\\ ")


def setup(app: Any) -> None:
    listed: set[str] = set()  # fields of the class whose members Sphinx reads next

    def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = markup("\n".join(lines))
        if what == "class":
            lines += described_fields(obj)
            listed.clear()
            listed.update(each.name for each in (fields(obj) if is_dataclass(obj) else ()))

    def skip_fields(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
        return True if what == "class" and name in listed else None

    def show_all_options(app: Any, what: str, name: str, obj: Any, *shown: Any) -> None:
        """Drops a function's overloads: the reference shows the single signature with every option and default.

        Overloads are for type checkers.
        """
        if what == "function":
            analyzer = ModuleAnalyzer.for_module(obj.__module__)
            analyzer.analyze()
            analyzer.overloads.clear()

    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", show_all_options)
