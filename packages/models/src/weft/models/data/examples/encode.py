"""Turns a record into tokens with masks: first prompt and completions apart, then the segments of an example.

`ExampleRecords` reads records and makes the entries of token shards, as `Texts` does for documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contents import ShardEntry, Unusable
from ..inputs import InputPart, LeftOut, RecordPlace
from ..tokenizer import Tokenizer
from .example import Example, MaskedTokens, Task
from .forms import ASSISTANT, BadExample, Dialog, read_form
from .records import REMEDY, find_record_parts, read_examples
from .template import ChatTemplate, Spans

_AS_TEXT: Mapping[Task, str] = {
    "sft": '{"prompt": "...", "completion": "..."}',
    "dpo": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
    "kto": '{"prompt": "...", "completion": "...", "label": true}',
}
Tokens = NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A record as tokens of any length. Made by `encode_record`; `join_example` makes an Example from an Encoded."""

    prompt: Tokens  # shared by all completions, never learned; empty for sft
    completions: tuple[MaskedTokens, ...]  # sft: the whole text, prompt included; dpo: chosen, rejected; kto: one
    label: bool | None = None  # kto: whether the completion is desirable


def encode_examples(
    records: Iterable[tuple[RecordPlace | str, Mapping[str, Any]]],
    *,
    task: Task,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    left_out: LeftOut,
    skip_bad: bool = False,
) -> Iterator[tuple[RecordPlace | str, Encoded]]:
    """Encode the records from `read_examples`; yields each with the record's place.

    skip_bad: leave out records without an example, and add their number to `left_out.bad`. Without skip_bad, a bad
        record raises BadExample.
    Raises ValueError where messages need a chat template and there is none, even under skip_bad.
    """
    for place, record in records:
        try:
            encoded = encode_record(record, place, task=task, tokenizer=tokenizer, template=template)
        except BadExample:
            if not skip_bad:
                raise
            left_out.bad += 1
            continue
        yield place, encoded


def encode_record(
    record: Mapping[str, Any],
    place: RecordPlace | str,
    *,
    task: Task,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
) -> Encoded:
    """A record's prompt and completions as tokens, of any length.

    place: where the record is, for errors. template: from `find_template`; None: only records of text are encoded.
    Raises BadExample, with the place, for a record that makes no example of the task; ValueError for messages without
    a chat template.
    """
    try:
        form = read_form(record, task, has_template=template is not None)
        if template is not None:
            for each in form.dialogs:
                template.check_complete(each.messages, tools=each.tools, variables=each.variables)
        if template is None and not form.dialogs[0].is_text:
            raise ValueError(
                f"{place} has messages, and the tokenizer has no chat template; give a tokenizer's folder with one "
                f"(chat_template in tokenizer_config.json, or chat_template.jinja), or --data.template FILE, or write "
                f"the records without roles, as text: {_AS_TEXT[task]}"
            )
        return _Encoder(tokenizer, template).encode(form.dialogs, task, form.label)
    except BadExample as error:
        raise BadExample(f"{place} {error}; {REMEDY}") from None


def join_example(encoded: Encoded, place: RecordPlace | str, *, previous: MaskedTokens | None = None) -> Example:
    """The example of a record, uncut: a segment is the prompt followed by a completion.

    previous: kto only, `completions[0]` of the previous record: the mismatched completion of the second segment.
    Raises BadExample, with the place, for a segment without a learned token behind the first token.
    """
    completions = encoded.completions if previous is None else (*encoded.completions, previous)
    segments = []
    for completion in completions:
        tokens = np.concatenate((encoded.prompt, completion.tokens))
        learned = np.concatenate((np.zeros(len(encoded.prompt), dtype=np.bool_), completion.learned))
        if not learned[1:].any():  # the first token follows nothing, and is no target
            raise BadExample(f"{place} has no token to learn behind the first of its {len(tokens):,} tokens; {REMEDY}")
        segments.append(MaskedTokens(tokens, learned))
    return Example(tuple(segments), encoded.label)


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
        answer = MaskedTokens(_tokens(tokens[start:]), _learned(places[start:], spans))
        if not tokens[start:] or tokens[-1] != self.tokenizer.end:
            answer = self._ended(answer)
        return Encoded(_tokens([*begin, *tokens[:start]]), (answer,), label)

    def _text(self, dialog: Dialog) -> MaskedTokens:
        """A prompt and a completion of text, encoded together as in trl's sft, with the end token's text appended."""
        assert isinstance(dialog.prompt, str) and isinstance(dialog.completion, str), "read_form checks this"
        end = self.tokenizer.end_name
        text = dialog.prompt + dialog.completion + ("" if dialog.completion.endswith(end) else end)
        segment = self._segment(text, [(len(dialog.prompt), len(text))])
        begin = self.tokenizer.begin
        return MaskedTokens(
            np.concatenate((_tokens(begin), segment.tokens)),
            np.concatenate((np.zeros(len(begin), dtype=np.bool_), segment.learned)),
        )

    def _messages(self, dialog: Dialog) -> MaskedTokens:
        """A conversation, or a prompt and a completion of messages, encoded as in trl's sft."""
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
        """(prompt, whole, learned spans of whole), where whole is the text of the prompt with its completion.

        As trl renders messages: the prompt alone is rendered with add_generation_prompt, and the prompt's text ends
        where this rendering and whole first differ. Some templates end a prompt with the opening of a reasoning.
        """
        prompt, completion = dialog.prompt, dialog.completion
        if isinstance(completion, str):
            assert isinstance(prompt, str), "read_form checks this"
            return prompt, prompt + completion, [(len(prompt), len(prompt + completion))]
        assert self.template is not None and prompt is not None and not isinstance(prompt, str), "encode_record checks"
        if prompt[-1]["role"] == ASSISTANT:
            raise BadExample(
                f"has a prompt that ends with a message of {ASSISTANT!r}; begin the completion with this message"
            )
        options: dict[str, Any] = {"tools": dialog.tools, "variables": dialog.variables}
        messages = [*prompt, *completion]
        whole = self.template.render(messages, **options)
        opened = self.template.render(prompt, add_generation_prompt=True, **options)
        shared = opened[: _shared(opened, whole)]
        if len(shared) < _shared(opened, self.template.render(prompt, **options)):
            raise BadExample(
                f"has a prompt that {self.template.name} renders differently with and without the completion; give "
                f"another template by --data.template FILE"
            )
        if len(completion) == 1:
            return shared, whole, [(len(shared), len(whole))]
        _, spans = self.template.render_learned(messages, prompt=len(prompt), **options)
        return shared, whole, [(len(shared), spans[0][1]), *spans[1:]]

    def _segment(self, text: str, spans: Spans) -> MaskedTokens:
        tokens, places = self.tokenizer.encode_with_places(text)
        return MaskedTokens(_tokens(tokens), _learned(places, spans))

    def _completion(self, start: int, whole: str, spans: Spans) -> MaskedTokens:
        """The text behind a prompt of `start` characters, encoded apart from the prompt. spans: of the whole text."""
        shifted = [(begin - start, stop - start) for begin, stop in spans]
        return self._segment(whole[start:], [(0, shifted[0][1]), *shifted[1:]])

    def _ended(self, segment: MaskedTokens) -> MaskedTokens:
        """The segment with the tokenizer's end token appended; the end token is learned."""
        return MaskedTokens(np.append(segment.tokens, self.tokenizer.end), np.append(segment.learned, True))


def _tokens(tokens: Iterable[int]) -> Tokens:
    return np.array(list(tokens), dtype=np.int64)


def _learned(places: list[tuple[int, int]], spans: Spans) -> NDArray[np.bool_]:
    """[n] bool: whether a token has characters within a span. places: of each token's characters, (start, stop).

    A token of spaces may have an empty place, at the end of the spaces or at the beginning of the text.
    """
    learned = np.zeros(len(places), dtype=np.bool_)
    if not places:
        return learned
    starts, stops = np.array(places, dtype=np.int64).T
    for start, stop in spans:
        learned |= (stops > (start or -1)) & ((starts < stop) | ((starts == stops) & (stops <= stop)))
    return learned


def _shared(first: str, second: str) -> int:
    """The number of characters in the longest common prefix."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


@dataclass(frozen=True, slots=True)
class ExampleRecords:
    """The `Contents` of fine-tuning: records become uncut examples. A part's examples depend on the part alone.

    Made by `weft data prepare --task`, and by `find_examples` for a run that reads records.
    kto: an example's mismatched completion is the completion of the previous record of the part; the first record of a
    part takes the completion of the part's last record.
    """

    task: Task
    tokenizer: Tokenizer
    template: ChatTemplate | None
    skip_bad: bool = False  # leave out records that make no example; without, a bad record is an error

    def find_parts(self, inputs: Sequence[Path], part_bytes: int, leave_out: Path | None) -> list[InputPart]:
        """See `find_record_parts` of records.py."""
        return find_record_parts(inputs, part_bytes, skip_bad=self.skip_bad, leave_out=leave_out)

    def request(self) -> dict[str, Any]:
        """The options that determine the shards' bytes, for the manifest; see `Contents`."""
        template = "" if self.template is None else self.template.sha256
        return {"task": self.task, "template": template, "skip_bad": self.skip_bad}

    def dated(self, time: datetime) -> ExampleRecords:
        """A copy whose chat template writes `time` as the current time."""
        return self if self.template is None else replace(self, template=replace(self.template, now=time))

    def entries(self, part: InputPart, left_out: LeftOut) -> Iterator[ShardEntry]:
        """The examples of a part, uncut; see `Contents`."""
        records = read_examples(part, left_out, skip_bad=self.skip_bad)
        try:
            examples = encode_examples(
                records,
                task=self.task,
                tokenizer=self.tokenizer,
                template=self.template,
                left_out=left_out,
                skip_bad=self.skip_bad,
            )
            if self.task == "kto":
                known = list(examples)
                for number, (place, encoded) in enumerate(known):
                    yield from self._entry(place, encoded, known[number - 1][1], left_out)
            else:
                for place, encoded in examples:
                    yield from self._entry(place, encoded, None, left_out)
        except ValueError as error:
            raise Unusable(str(error)) from None

    def _entry(
        self, place: RecordPlace | str, encoded: Encoded, previous: Encoded | None, left_out: LeftOut
    ) -> Iterator[ShardEntry]:
        try:
            example = join_example(encoded, place, previous=None if previous is None else previous.completions[0])
        except BadExample:
            if not self.skip_bad:
                raise
            left_out.bad += 1
            return
        yield ShardEntry(
            tuple(segment.tokens for segment in example.segments),
            tuple(segment.learned for segment in example.segments),
            example.label,
            size=4 * sum(len(segment.tokens) for segment in example.segments),  # about four bytes a token
            place=place,
        )
