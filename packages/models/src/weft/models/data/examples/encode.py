"""Examples as tokens: the prompt and completions of a record, and the tokens of them that are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..inputs import Place
from ..tokenizer import Tokenizer
from .example import Example, Segment, Task
from .forms import ASSISTANT, BadExample, Dialog, read_form
from .records import REMEDY
from .template import ChatTemplate, Spans

Tokens = NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A record as tokens, not yet cut to a length. Made by `encode_record`; `join_example` makes an Example of it."""

    prompt: Tokens  # before each completion; none of it is learned. Of a conversation empty
    completions: tuple[Segment, ...]  # dpo: chosen, rejected; else one. Of a conversation all tokens
    label: bool | None = None  # of kto: whether the completion is desirable


@dataclass(slots=True)
class Counts:
    """Counts of examples, which `encode_examples` and `join_example` add to. A caller makes an empty instance."""

    examples: int = 0
    cut: int = 0  # examples with a segment that was longer than the length
    bad: int = 0  # records left out under skip_bad
    first_bad: str = ""  # the error of the first of these


def encode_examples(
    records: Iterable[tuple[Place | str, Mapping[str, Any]]],
    *,
    task: Task,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    counts: Counts,
    skip_bad: bool = False,
) -> Iterator[tuple[Place | str, Encoded]]:
    """The examples of records from `read_examples`, each with its place.

    skip_bad: leave out records that make no example, and count them. Without, such a record raises BadExample.
    Raises ValueError where messages need a chat template and there is none, even under skip_bad.
    """
    for place, record in records:
        try:
            encoded = encode_record(record, place, task=task, tokenizer=tokenizer, template=template)
        except BadExample as error:
            if not skip_bad:
                raise
            counts.bad += 1
            counts.first_bad = counts.first_bad or str(error)
            continue
        counts.examples += 1
        yield place, encoded


def encode_record(
    record: Mapping[str, Any], place: Place | str, *, task: Task, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Encoded:
    """A record's prompt and completions as tokens, of any length.

    place: where the record is, for errors. template: from `find_template`; None: all records are text.
    Raises BadExample, with the place, for a record that makes no example of the task; ValueError for messages without
    a chat template.
    """
    try:
        form = read_form(record, task, has_template=template is not None)
        if template is None and not form.dialogs[0].is_text:
            raise ValueError(
                f"{place} has messages, and the tokenizer has no chat template; give a tokenizer's folder with one "
                f"(chat_template in tokenizer_config.json, or chat_template.jinja), or --data.template FILE"
            )
        return _Encoder(tokenizer, template).encode(form.dialogs, task, form.label)
    except BadExample as error:
        raise BadExample(f"{place} {error}; {REMEDY}") from None


def join_example(
    encoded: Encoded, place: Place | str, *, length: int, previous: Segment | None = None, counts: Counts | None = None
) -> Example:
    """The segments of an example: its prompt with each completion, cut at the end to `length` tokens.

    previous: of kto, the completion of the record before, cyclic over the source: `encoded.completions[0]` of that
        record. The second segment is the prompt of this record with that completion.
    counts: where given, an example with a cut segment adds 1 to `cut`.
    Raises BadExample where a cut leaves no learned token in a segment.
    """
    completions = encoded.completions if previous is None else (*encoded.completions, previous)
    segments, is_cut = [], False
    for completion in completions:
        tokens = np.concatenate((encoded.prompt, completion.tokens))
        learned = np.concatenate((np.zeros(len(encoded.prompt), dtype=np.bool_), completion.learned))
        is_cut |= len(tokens) > length
        if not learned[1:length].any():  # the first token follows nothing, and is no target
            raise BadExample(
                f"{place} has no token to learn among the first {length:,} of its {len(tokens):,} tokens; give a "
                f"longer --data.sequence-length, or leave the record out"
            )
        segments.append(Segment(tokens[:length], learned[:length]))
    if counts is not None:
        counts.cut += is_cut
    return Example(tuple(segments), encoded.label)


def encode_example(
    record: Mapping[str, Any],
    place: Place | str,
    *,
    task: Task,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    length: int,
    previous: Segment | None = None,
    counts: Counts | None = None,
) -> Example:
    """`encode_record`, then `join_example`. previous: of kto, the completion of the record before."""
    encoded = encode_record(record, place, task=task, tokenizer=tokenizer, template=template)
    return join_example(encoded, place, length=length, previous=previous, counts=counts)


@dataclass(frozen=True, slots=True)
class _Encoder:
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def encode(self, dialogs: tuple[Dialog, ...], task: Task, label: bool | None) -> Encoded:
        first = dialogs[0]
        if task == "sft":
            conversation = self._text(first) if first.is_text else self._messages(first)
            return Encoded(np.zeros(0, dtype=np.int64), (conversation,))
        texts = [self._texts(each) for each in dialogs]
        prompt = texts[0][0][: min(_shared(texts[0][0], text) for text, _, _ in texts)]
        begin = self.tokenizer.begin if first.is_text else ()
        if task == "dpo":  # trl encodes prompt and completion apart, and ends each completion
            completions = tuple(self._ended(self._completion(len(prompt), whole, spans)) for _, whole, spans in texts)
            return Encoded(_tokens([*begin, *self.tokenizer.encode_with_places(prompt)[0]]), completions)
        # trl encodes prompt and completion of kto together, and ends the completion where its tokens do not.
        _, whole, spans = texts[0]
        tokens, places = self.tokenizer.encode_with_places(whole)
        start = next((i for i, (_, stop) in enumerate(places) if stop > (len(prompt) or -1)), len(tokens))
        answer = Segment(_tokens(tokens[start:]), _learned(places[start:], spans))
        if not tokens[start:] or tokens[-1] != self.tokenizer.end:
            answer = self._ended(answer)
        return Encoded(_tokens([*begin, *tokens[:start]]), (answer,), label)

    def _text(self, dialog: Dialog) -> Segment:
        """A prompt and a completion of text, as trl encodes them for sft: together, with the end's name behind."""
        assert isinstance(dialog.prompt, str) and isinstance(dialog.completion, str), "read_form checks this"
        end = self.tokenizer.end_name
        text = dialog.prompt + dialog.completion + ("" if dialog.completion.endswith(end) else end)
        segment = self._segment(text, [(len(dialog.prompt), len(text))])
        begin = self.tokenizer.begin
        return Segment(
            np.concatenate((_tokens(begin), segment.tokens)),
            np.concatenate((np.zeros(len(begin), dtype=np.bool_), segment.learned)),
        )

    def _messages(self, dialog: Dialog) -> Segment:
        """A conversation, or a prompt and a completion of messages, as trl encodes them for sft."""
        assert self.template is not None and not isinstance(dialog.completion, str), "encode_record checks this"
        prompt = dialog.prompt
        assert not isinstance(prompt, str), "read_form checks this"
        text, spans = self.template.render_learned(
            [*(prompt or ()), *dialog.completion],
            tools=dialog.tools,
            variables=dialog.variables,
            prompt=None if prompt is None else len(prompt),
        )
        return self._segment(text, spans)

    def _texts(self, dialog: Dialog) -> tuple[str, str, Spans]:
        """The text of a prompt, of the prompt with its completion, and the spans of the latter that are learned.

        As trl renders them: of messages, the prompt's text is the beginning that the prompt, rendered with
        add_generation_prompt, and the whole share. Some templates end a prompt with the beginning of a reasoning.
        """
        prompt, completion = dialog.prompt, dialog.completion
        if isinstance(completion, str):
            assert isinstance(prompt, str), "read_form checks this"
            return prompt, prompt + completion, [(len(prompt), len(prompt + completion))]
        assert self.template is not None and prompt is not None and not isinstance(prompt, str), "encode_record checks"
        if prompt[-1]["role"] == ASSISTANT:
            raise BadExample(f"has a prompt that ends with a message of {ASSISTANT!r}; begin the completion with it")
        options: dict[str, Any] = {"tools": dialog.tools, "variables": dialog.variables}
        messages = [*prompt, *completion]
        whole = self.template.render(messages, **options)
        opened = self.template.render(prompt, add_generation_prompt=True, **options)
        shared = opened[: _shared(opened, whole)]
        if len(shared) < _shared(opened, self.template.render(prompt, **options)):
            raise BadExample(
                f"is rendered by {self.template.name} so that the prompt with its completion does not begin as the "
                f"prompt alone; give another template by --data.template FILE"
            )
        if len(completion) == 1:
            return shared, whole, [(len(shared), len(whole))]
        _, spans = self.template.render_learned(messages, prompt=len(prompt), **options)
        return shared, whole, [(len(shared), spans[0][1]), *spans[1:]]

    def _segment(self, text: str, spans: Spans) -> Segment:
        tokens, places = self.tokenizer.encode_with_places(text)
        return Segment(_tokens(tokens), _learned(places, spans))

    def _completion(self, start: int, whole: str, spans: Spans) -> Segment:
        """The text behind a prompt of `start` characters, encoded apart from the prompt. spans: of the whole text."""
        shifted = [(begin - start, stop - start) for begin, stop in spans]
        return self._segment(whole[start:], [(0, shifted[0][1]), *shifted[1:]])

    def _ended(self, segment: Segment) -> Segment:
        """A segment with the token that ends a document, which is learned."""
        return Segment(np.append(segment.tokens, self.tokenizer.end), np.append(segment.learned, True))


def _tokens(tokens: Iterable[int]) -> Tokens:
    return np.array(list(tokens), dtype=np.int64)


def _learned(places: list[tuple[int, int]], spans: Spans) -> NDArray[np.bool_]:
    """Whether each token has characters within a span. A token of spaces may have an empty place: at the end of the
    spaces, or at the beginning of the text.
    """
    learned = np.zeros(len(places), dtype=np.bool_)
    if not places:
        return learned
    starts, stops = np.array(places, dtype=np.int64).T
    for start, stop in spans:
        learned |= (stops > (start or -1)) & ((starts < stop) | ((starts == stops) & (stops <= stop)))
    return learned


def _shared(first: str, second: str) -> int:
    """The number of characters that two texts begin with alike."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
