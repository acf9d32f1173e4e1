"""Chat templates: messages to text, rendered by Jinja in a sandbox, as in transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...safe_files import read_plain
from ...terminal import install_command
from ..tokenizer import CONFIG_FILE, Tokenizer
from .forms import ASSISTANT, BadExample, Message

Spans = list[tuple[int, int]]  # of characters: (start, stop)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, held as text. Made by `find_template`. Jinja compiles the text at the first use; a pickle has
    the text alone.
    """

    name: str  # for errors: the file
    source: str
    special: tuple[tuple[str, str | tuple[str, ...]], ...]  # the tokenizer's special tokens, as bos_token and "<s>"
    tool_source: str | None = None  # the tokenizer's "tool_use", for records with tools; None: `source`
    # The time of the template function `strftime_now`; equal for all records of a run.
    now: datetime = datetime(1970, 1, 1)

    @property
    def sha256(self) -> str:
        """SHA-256 of the templates and special tokens. Templates of equal sums render equal texts, apart from dates."""
        return hashlib.sha256(repr((self.source, self.special, self.tool_source)).encode()).hexdigest()

    @property
    def marks_learned(self) -> bool:
        """Whether the template marks the assistant's words with the tag `generation`."""
        return bool(self._compiled(None).marks)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of messages, as `apply_chat_template(tokenize=False)` of transformers gives it.

        add_generation_prompt: end with the beginning of the assistant's next message.
        tools: the descriptions of tools that the assistant may call; None: no tools.
        variables: further variables of the template; None: none.
        Raises BadExample for messages refused by the template, and ValueError for an unusable template.
        """
        return self._render(messages, add_generation_prompt, tools, variables)[0]

    def render_learned(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        prompt: int | None = None,
    ) -> tuple[str, Spans]:
        """The text of messages, and the spans of characters to learn: the assistant's turns.

        A template may mark the assistant's words with the tag `generation`: the spans are then the marked words.
        Without marks, turns are found by prefix: a turn begins where the rendering of the earlier messages, with
        add_generation_prompt, ends; the turn ends where the rendering through the turn ends, end token included. A
        message of a conversation with weight 0, as in OpenAI's data, is not learned.
        tools, variables: as for `render`.
        prompt: the number of messages at the beginning in which nothing is learned; turns are then found by prefix
            under any template. None: every turn of the assistant is learned.
        Raises BadExample where a rendering is no prefix of the text: some templates leave out earlier reasoning; and
        for a weight of 0 under marks.
        """
        if prompt is None and self._compiled(tools).marks:
            if any(_is_unlearned(each) for each in messages) and "weight" not in self.source:
                raise BadExample(f"has a message of weight 0, whose words {self.name} marks; leave out the weight")
            text, spans = self._render(messages, False, tools, variables)
            if not spans:
                raise BadExample(f"has no words of the assistant that {self.name} marks with its tag generation")
            return text, spans
        text = self.render(messages, tools=tools, variables=variables)
        spans = []
        for i in range(prompt or 0, len(messages)):
            if messages[i]["role"] != ASSISTANT or (prompt is None and _is_unlearned(messages[i])):
                continue
            before = self.render(messages[:i], add_generation_prompt=True, tools=tools, variables=variables)
            is_last = i + 1 == len(messages)
            through = text if is_last else self.render(messages[: i + 1], tools=tools, variables=variables)
            if not (through.startswith(before) and text.startswith(through)):
                raise BadExample(
                    f"is rendered by {self.name} so that the text of the first {i} or {i + 1} messages is no beginning "
                    f"of the whole text; give a template that marks the assistant's words with {{% generation %}} by "
                    f"--data.template FILE"
                )
            spans.append((len(before), len(through)))
        return text, spans

    def check_complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise BadExample for messages of which the template leaves out calls of tools, or writes a list of parts raw.

        Otherwise a model would learn to answer with nothing, or with Python's brackets.
        """
        unsure = [
            i for i, each in enumerate(messages) if each.get("tool_calls") or isinstance(each.get("content"), list)
        ]
        text = self.render(messages, tools=tools, variables=variables) if unsure else ""
        for i in unsure:
            content = messages[i].get("content")
            if isinstance(content, list) and str(content) in text:
                raise BadExample(
                    f"has a list of parts as content of message {i + 1}, which {self.name} writes as a list; give the "
                    f"content as text, or another template by --data.template FILE"
                )
            without = {name: value for name, value in messages[i].items() if name != "tool_calls"}
            changed = [*messages[:i], without, *messages[i + 1 :]]
            if messages[i].get("tool_calls") and self._renders_as(text, changed, tools, variables):
                raise BadExample(
                    f"has tool_calls in message {i + 1}, which {self.name} leaves out; give a template that writes "
                    f"calls of tools by --data.template FILE"
                )

    def _renders_as(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> bool:
        """Whether the messages have this text; False where the template refuses the messages."""
        try:
            return self.render(messages, tools=tools, variables=variables) == text
        except BadExample:
            return False

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> tuple[str, Spans]:
        """The text, and the non-empty spans inside `generation` tags."""
        special = {name: list(value) if isinstance(value, tuple) else value for name, value in self.special}
        context = {
            "messages": [dict(each) for each in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special,
            **(variables or {}),
        }
        compiled = self._compiled(tools)
        try:
            text, spans = compiled.render(context)
            text.encode()
        except compiled.security_error as error:
            raise ValueError(
                f"{self.name} reaches what a chat template may not: {error}; give another template"
            ) from None
        except UnicodeEncodeError:
            raise BadExample(f"is rendered by {self.name} as text with half a surrogate pair") from None
        except RecursionError:
            raise BadExample(f"nests too deeply for {self.name}") from None
        except Exception as error:  # any error of the template's expressions, such as an index outside of a list
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BadExample(f"is refused by {self.name}: {reason}") from None
        return text, [(start, stop) for start, stop in spans if start < stop]

    def _compiled(self, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        return self._plain if self.tool_source is None or tools is None else self._with_tools

    @cached_property
    def _plain(self) -> Any:
        return _compile(self.name, self.source, self.now)

    @cached_property
    def _with_tools(self) -> Any:
        assert self.tool_source is not None, "_compiled checks this"
        return _compile(f"{self.name} (tool_use)", self.tool_source, self.now)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("name", "source", "special", "tool_source", "now")}


def _is_unlearned(message: Message) -> bool:
    """Whether a message of the assistant has weight 0: the words are read, and not learned."""
    return bool(message["role"] == ASSISTANT and message.get("weight", 1) == 0)


def find_template(tokenizer: Tokenizer, file: Path | None = None) -> ChatTemplate | None:
    """The chat template in a Jinja file; without a file, the tokenizer's own; None where the tokenizer has none.

    Of several named templates, "default" is used, and "tool_use" for records with tools.
    Raises ValueError for a file that cannot be read, for errors of syntax, and where jinja2 is not installed.
    """
    special = tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in tokenizer.special_names.items()
    )
    if file is not None:
        try:
            source = read_plain(file).decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text (byte {error.start} of the file); convert it") from None
        except OSError as error:
            raise ValueError(f"--data.template {file} cannot be read: {error.strerror}; give a Jinja file") from None
        found = ChatTemplate(str(file), source, special, None, _today())
    else:
        named = tokenizer.chat_templates
        if not named:
            return None
        if "default" not in named:
            raise ValueError(
                f"the tokenizer has chat templates {', '.join(named)}, and none is named default; give one with "
                f"--data.template FILE"
            )
        name = f"the chat template of {CONFIG_FILE}"
        found = ChatTemplate(name, named["default"], special, named.get("tool_use"), _today())
    _ = found.marks_learned, found._compiled([])  # compiles, for errors of syntax
    return found


def _today() -> datetime:
    """Midnight of today, for equal texts in all processes of a run."""
    return datetime.combine(datetime.now().date(), time.min)


def _compile(name: str, source: str, now: datetime) -> Any:
    """A `sandbox.Compiled` template. Raises ValueError for errors of syntax, and where jinja2 is not installed."""
    if find_spec("jinja2") is None:
        raise ValueError(f"jinja2 is not installed, which renders chat templates; {install_command('jinja2')}")
    try:
        return import_module(".sandbox", __package__).Compiled(source, now)
    except import_module("jinja2").TemplateSyntaxError as error:
        raise ValueError(f"{name} is no Jinja template: line {error.lineno}: {error.message}; mend it") from None
    except RecursionError:
        raise ValueError(f"{name} is no Jinja template: it nests too deeply; mend it") from None
