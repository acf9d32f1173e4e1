"""Which identifiers are riddles, and how dense prose is with words that point at nouns instead of naming them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

POINTING = {"it", "its", "they", "them", "that", "those", "what", "such", "so", "one", "other", "others"}
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)  # blocks and spans
TOOLS = ("# type:", "# noqa", "# fmt")  # comments for tools


def riddles(source: str, words: Set[str]) -> set[str]:
    """The names of values, parameters, functions, classes and attributes that are in `words`, or have one as a part."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {getattr(node, kind, None) for node in nodes for kind in ("id", "arg", "attr", "name")}
    return {name for name in names if isinstance(name, str) and words & {name, *_parts(name)}}


def _parts(name: str) -> list[str]:
    """The words of an identifier, in lower case."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")


def types(source: str) -> list[str]:
    """The public classes and aliases of types that a module defines; without type variables, and without constants."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Assign) and not (
            isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("TypeVar", "ParamSpec")
        ):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in found if name[0].isupper() and not name.isupper()]


def records(source: str) -> dict[str, list[ast.AnnAssign]]:
    """The fields of each dataclass and NamedTuple that a module defines, by the name of the class."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in text or text.endswith("NamedTuple")
            for text in map(ast.unparse, [*node.decorator_list, *node.bases])
        ):
            found[node.name] = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return found


def listed_fields(source: str) -> dict[str, list[str]]:
    """The fields that a dataclass or NamedTuple lists in the docstring, as "size: …", by the name of the class."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    docstrings = {node.name: ast.get_docstring(node) or "" for node in classes}
    found = {}
    for name, fields in records(source).items():
        items = re.findall(r"(?:^|[.;] ) *([a-z_]\w*(?:, [a-z_]\w*)*): ", docstrings[name], re.MULTILINE)
        listed = {field for item in items for field in item.split(", ")}
        found[name] = [field for field in (ast.unparse(each.target) for each in fields) if field in listed]
    return found


def hidden_comments(source: str, name: str) -> list[str]:
    """The fields of class `name` whose comments do not begin with `#:`, which keeps the comments from the reference."""
    lines, hidden = source.splitlines(), []
    for field in records(source).get(name, []):
        behind = lines[(field.end_lineno or field.lineno) - 1][field.end_col_offset :]
        if re.match(r"\s*# (?!type:|noqa|fmt)", behind) or re.match(r"\s*# ", lines[field.lineno - 2]):
            hidden.append(ast.unparse(field.target))
    return hidden


def comments_behind_breaks(source: str) -> list[int]:
    """The numbers of lines with a comment behind a bracket that closes a statement broken over three lines."""
    lines = source.splitlines()
    closing = re.compile(r"\s*[)\]}]+[:,]?\s+#:? (?!type:|noqa|fmt)")
    return [
        at + 1 for at in range(2, len(lines)) if closing.match(lines[at]) and lines[at - 2].endswith(("(", "[", "{"))
    ]


def prose(path: Path) -> Iterator[str]:
    """The docstrings and comments of a Python file, or the text of a page without code."""
    source = path.read_text()
    if path.suffix == ".md":
        yield source
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(TOOLS):
            yield token.string


def pointing_words(texts: Iterable[str]) -> tuple[int, int]:
    """The number of pointing words, and of all words; code in backticks does not count."""
    words = [word.lower() for text in texts for word in re.findall(r"[A-Za-z']+", CODE.sub(" ", text))]
    return sum(word in POINTING for word in words), len(words)
