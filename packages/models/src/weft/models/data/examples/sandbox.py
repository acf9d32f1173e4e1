"""Jinja for chat templates of unknown origin: transformers' sandbox, with bounds on loops and sizes. Needs jinja2."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Bounds of one rendering. Templates in use take a few steps for each message; 200,000 steps take about a second.
MOST_STEPS = 200_000  # of loops and calls of macros
MOST_CHARACTERS = 1 << 26  # written, or made by an operator
LARGEST_ARGUMENT = 1_000_000  # in a call, as the width of a padded text
MOST_BITS = 4096  # of a product or power of integers


class Generation(Extension):
    """Jinja extension: the tag `{% generation %}...{% endgeneration %}` around words to learn, and bounds on work.

    `Compiled` puts calls of `step` and `concatenate` into a template's loops, macros and operators `~`.
    """

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Called by Jinja at the tag: the block's content becomes a call of `mark`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        """The content of the tag between the environment's marks."""
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"

    def step(self) -> bool:
        """Count a step: called by each pass of a loop and each call of a macro. True, for use in a loop's test."""
        self.environment.spend(1)  # type: ignore[attr-defined]
        return True

    def concatenate(self, *values: object) -> str:
        """The operator `~`. Raises TemplateError for a result of more than MOST_CHARACTERS."""
        texts = list(map(str, values))
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates. Refuses work beyond the bounds above with a TemplateError."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: datetime) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], finalize=self._write
        )
        token = secrets.token_hex(16)  # unknown to the writers of templates and messages
        self.marks = (f"\ue000{token}<", f"\ue000{token}>")
        self._steps = self._characters = 0
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = now.strftime
        self.globals["range"] = self._range
        del self.globals["lipsum"]

    def begin(self) -> None:
        """Reset the counts of steps and characters; called before each rendering."""
        self._steps = self._characters = 0

    def spend(self, steps: int) -> None:
        """Count steps. Raises TemplateError beyond MOST_STEPS."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise TemplateError(f"it takes more than {MOST_STEPS:,} steps of loops and macros")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Called by Jinja for the intercepted operators. Raises TemplateError for results that are too large."""
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        if operator == "*":
            for sequence, number in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(number, int):
                    _check_size(len(sequence) * number)
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * max(right, 0)
            if bits > MOST_BITS:
                raise TemplateError(f"it makes a number of more than {MOST_BITS} bits")
        if operator == "%" and isinstance(left, str) and re.search(r"\d{5}|\*", left):
            raise TemplateError("it formats text with a width of more than 9,999")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Called by Jinja for a template's call, such as `text.center(9)`. Raises TemplateError for large numbers."""
        if any(isinstance(each, int) and abs(each) > LARGEST_ARGUMENT for each in (*args, *kwargs.values())):
            raise TemplateError(
                f"it calls {getattr(function, '__name__', 'a function')} with a number above {LARGEST_ARGUMENT:,}"
            )
        return super().call(context, function, *args, **kwargs)

    def _range(self, *arguments: int) -> range:
        found = range(*arguments)
        self.spend(len(found))
        return found

    def _write(self, value: Any) -> Any:
        """Count the characters of a value; called by Jinja for each value written into the text."""
        self._characters += len(value) if isinstance(value, str) else 0
        _check_size(self._characters)
        return value


class Compiled:
    """A compiled chat template in a sandbox. Renders a text at a time. marks: whether there are `generation` tags."""

    security_error = SecurityError

    def __init__(self, source: str, now: datetime) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._environment = Environment(now)
        self._extension = next(each for each in self._environment.extensions.values() if isinstance(each, Generation))
        tree = self._environment.parse(source)
        self.marks = any(
            isinstance(node.call, nodes.Call)
            and isinstance(node.call.node, nodes.ExtensionAttribute)
            and node.call.node.name == "mark"
            for node in tree.find_all(nodes.CallBlock)
        )
        self._count_steps(tree)
        self._template = self._environment.from_string(tree)

    def _count_steps(self, tree: nodes.Template) -> None:
        """Make all loops and macros of the tree call `step`, and the operators `~` call `concatenate`."""
        for loop in list(tree.find_all(nodes.For)):
            step = self._extension.call_method("step", lineno=loop.lineno)
            if loop.test is None:
                loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
            else:
                loop.test = nodes.And(step, loop.test, lineno=loop.lineno)
        macros: list[nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
        for macro in macros:
            step = self._extension.call_method("step", lineno=macro.lineno)
            macro.body.insert(0, nodes.ExprStmt(step, lineno=macro.lineno))
        for parent in [tree, *tree.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, list):
                    value[:] = [self._bounded(each) for each in value]
                else:
                    setattr(parent, field, self._bounded(value))

    def _bounded(self, node: Any) -> Any:
        if not isinstance(node, nodes.Concat):
            return node
        return self._extension.call_method("concatenate", node.nodes, lineno=node.lineno)

    def render(self, context: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans of characters inside `generation` tags. context: the template's variables."""
        self._environment.begin()
        pieces, size = [], 0
        for piece in self._template.generate(**context):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        begin, end = self._environment.marks
        text, spans, starts = "", [], []
        for part in re.split(f"({re.escape(begin)}|{re.escape(end)})", "".join(pieces)):
            if part == begin:
                starts.append(len(text))
            elif part == end and starts:
                spans.append((starts.pop(), len(text)))
            else:
                text += part
        return text, sorted(spans)


def _check_size(characters: int) -> None:
    """Raises TemplateError for a text of more than MOST_CHARACTERS."""
    if characters > MOST_CHARACTERS:
        raise TemplateError(f"it makes a text of more than {MOST_CHARACTERS:,} characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates: plain JSON. Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    """The function `raise_exception` of chat templates."""
    raise TemplateError(message)
