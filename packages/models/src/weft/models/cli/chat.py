"""`weft generate --chat`: a conversation with a trained model, by a chat template."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..config import longest_context
from ..data.examples.forms import ASSISTANT, BadExample, Message
from ..data.examples.template import ChatTemplate, find_template
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer
from ..terminal import PROGRAM, one_line, printable
from .arguments import renamed_options

USER, SYSTEM = "user", "system"
EXIT, RESET = "/exit", "/reset"
MARK = "Answered."  # a made-up answer: `_end_of_turn` renders it to see what the template writes after an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How `chat` answers."""

    template: Path | None  # a Jinja file; None: the template of the tokenizer
    system: str | None  # the system message
    prompt: str | None  # the only message; None: messages are read from standard input
    tokens: int  # the most tokens of an answer
    drawing: Mapping[str, Any]  # temperature, top_k, top_p and seed of `generation.stream`


def chat(folder: Path, base: Path, tokenizer: Tokenizer, options: ChatOptions) -> int:
    """Answer the prompt, the messages typed on a terminal, or each line of standard input. Returns the exit status.

    folder: of the model or of adapters. base: of the model. tokenizer: the model's.
    Raises ValueError for a folder without a chat template, for messages refused by the template or too long for the
    model, and, unless messages are typed on a terminal, for an empty answer.
    """
    template = _find_template(folder, tokenizer, options.template)
    system = [] if options.system is None else [{"role": SYSTEM, "content": options.system}]
    _render(template, [*system, {"role": USER, "content": options.prompt or "Hello"}])  # for errors, before torch

    from ..checkpoint.huggingface import from_pretrained
    from ..generation import LogitsNotFinite, end_ids

    ends = {*end_ids(folder, default=end_ids(base, default=[tokenizer.end])), *_end_of_turn(template, tokenizer)}
    conversation = Conversation(from_pretrained(folder).eval(), tokenizer, template, tuple(sorted(ends)), options)
    conversation.messages = [*system]
    try:
        if options.prompt is not None:
            _answer(conversation, options.prompt, "--prompt")
        elif sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
            _converse(conversation)
        else:
            _answer_lines(conversation)
    except LogitsNotFinite as error:
        print(f"\n{PROGRAM} generate: {error}", file=sys.stderr)
        return 1
    return 0


class Conversation:
    """The messages of a conversation, and the answering model."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, template: ChatTemplate, ends: tuple[int, ...], options: ChatOptions
    ) -> None:
        from ..prompt_cache import PromptCache

        self.messages: list[Message] = []
        self._model, self._tokenizer, self._template, self._ends = model, tokenizer, template, ends
        self._options = options
        self._limit = longest_context(model.config)
        self._cache = PromptCache()
        self._has_left_out = False

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages = [each for each in self.messages if each["role"] == SYSTEM]

    def answer(self, text: str) -> Iterator[str]:
        """Yield the model's answer to a message, a piece for each token; some pieces are empty.

        The message and the answer, as far as the caller read on, join the conversation. A message without an answer is
        forgotten. Raises ValueError for a message refused by the template, or too long for the model.
        """
        import torch

        from ..generation import stream

        messages, prompt = self._fit([*self.messages, {"role": USER, "content": text}])
        tokens = stream(
            self._model,
            torch.tensor([prompt], dtype=torch.int64),
            max_new_tokens=min(self._options.tokens, self._limit - len(prompt)),
            ends=self._ends,
            cache=self._cache,
            **self._options.drawing,
        )
        new = takewhile(lambda token: token not in self._ends, (int(each) for each in tokens))
        pieces: list[str] = []
        try:
            for piece in self._tokenizer.decode_each(new, after=prompt):
                pieces.append(piece)
                yield piece
        finally:
            if any(pieces):
                self.messages = [*messages, {"role": ASSISTANT, "content": "".join(pieces)}]

    def _fit(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The messages, without the oldest turns if the model's length demands, and the tokens of their prompt.

        If any turn must go, turns go until half of the length is free. The next turns can then continue the cached
        prompt.
        """
        tokens, first = self._encode(messages), sum(each["role"] == SYSTEM for each in messages)
        if len(tokens) + min(self._options.tokens, self._limit // 4) <= self._limit:
            return messages, tokens
        while len(tokens) > self._limit // 2 and len(messages) > first + 1:
            messages = messages[:first] + messages[first + 2 :]
            tokens = self._encode(messages)
            if not self._has_left_out:
                self._has_left_out = True
                _note(
                    f"the conversation is longer than the model's {self._limit} tokens; its oldest turns are left out"
                )
        if len(tokens) >= self._limit:
            raise ValueError(
                f"the message has {len(tokens)} tokens with the chat template, and the model's length is "
                f"{self._limit}; give a shorter message"
            )
        return messages, tokens

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        tokens = self._tokenizer.encode_with_places(_render(self._template, messages))[0]
        if not tokens:
            raise ValueError(f"{self._template.name} renders the message as no text; give another with --template FILE")
        return tokens


def _converse(conversation: Conversation) -> None:
    """Answer messages typed on a terminal, until Ctrl-D or /exit."""
    with suppress(ImportError):  # missing in some builds of Python; `input` then has no history
        import_module("readline")
    print(f"{RESET} begins anew; {EXIT} or Ctrl-D ends; Ctrl-C stops an answer", flush=True)
    while True:
        try:
            text = input("> ").strip()
            check_unicode(text, "the message")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{EXIT} or Ctrl-D ends", flush=True)
            continue
        except ValueError as error:
            _note(str(error))
            continue
        if text == EXIT:
            return
        if text == RESET:
            conversation.reset()
        elif text:
            try:
                with _stopped_by_ctrl_c() as is_stopped:
                    _answer(conversation, text, "the message", is_stopped)
            except ValueError as error:
                _note(str(error))


def _answer_lines(conversation: Conversation) -> None:
    """Answer each line of standard input. Blank lines are skipped."""
    number = 0
    try:
        for number, line in enumerate(sys.stdin or (), 1):
            if text := line.strip():
                where = f"line {number} of standard input"
                check_unicode(text, where)
                try:
                    _answer(conversation, text, where)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(f"standard input is not UTF-8 after line {number}: byte 0x{byte:02x}; convert it") from None


def _answer(conversation: Conversation, text: str, name: str, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Print the answer to a message, token by token, and a line break. Raises ValueError for an empty answer.

    name: of the message, for the error. is_stopped: asked after each token; True ends the answer.
    """
    shown = printable if sys.stdout.isatty() else str
    pieces, is_empty = conversation.answer(text), True
    for piece in pieces:
        is_empty = is_empty and not piece
        print(shown(piece), end="", flush=True)
        if is_stopped():
            pieces.close()  # type: ignore[attr-defined]
            break
    if not is_empty or is_stopped():
        print(flush=True)
        return
    raise ValueError(
        f"the answer to {name} is empty: the model's first token ends it; give another message, or draw with another "
        f"--temperature or --seed"
    )


@contextmanager
def _stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Context whose value tells whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt."""
    presses = list[int]()

    def count(number: int, frame: Any) -> None:
        presses.append(number)
        if len(presses) > 1:
            raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, count)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, previous)


def check_unicode(text: str, name: str) -> None:
    """Raise ValueError for a text of the shell with an invalid byte, which Python keeps as half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise ValueError(f"{name} is not UTF-8: byte 0x{byte:02x} at character {error.start}; convert it") from None


def _find_template(folder: Path, tokenizer: Tokenizer, file: Path | None) -> ChatTemplate:
    with renamed_options({"data.template": "template"}):
        found = find_template(tokenizer, file)
    if found is None:
        raise ValueError(
            f"{folder} has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja); give one "
            f"with --template FILE, or continue a text without --chat"
        )
    return found


def _render(template: ChatTemplate, messages: Sequence[Message]) -> str:
    try:
        return template.render(messages, add_generation_prompt=True)
    except BadExample as error:
        raise ValueError(f"the conversation {error}; give another template with --template FILE") from None


def _end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """The special token written by the template after an answer: [token], or [] if there is none."""
    try:
        text = template.render([{"role": USER, "content": "Hello"}, {"role": ASSISTANT, "content": MARK}])
    except BadExample:
        return []
    added = json.loads(dict(tokenizer.files)[TOKENIZER_FILE]).get("added_tokens") or ()
    names = [each["content"] for each in added if each.get("special")]
    for name in tokenizer.special_names.values():
        names += [name] if isinstance(name, str) else name
    after = text.rpartition(MARK)[2].lstrip()
    fitting = [name for name in names if name and after.startswith(name)]
    return tokenizer.encode_with_places(max(fitting, key=len))[0][:1] if fitting and MARK in text else []


def _note(text: str) -> None:
    print(f"{PROGRAM} generate: {one_line(text)}", file=sys.stderr, flush=True)
