"""Records of examples as the content of shards: every segment with its tokens of any length and their masks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..contents import Entry, Unusable
from ..inputs import LeftOut, Part, Place
from ..tokenizer import Tokenizer
from .encode import Counts, Encoded, encode_examples, join_example
from .example import Task
from .forms import BadExample
from .records import find_record_parts, read_examples
from .template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Records:
    """Examples of a task, made of records. A part's examples depend on the part alone.

    In kto, the mismatched completion of an example is the completion of the record before in the part; of a part's
    first record, the completion of the part's last record. An input of more than one part, of 64 MiB each by default,
    so has a cycle for each part; records read into memory have the same parts and cycles.
    """

    task: Task
    tokenizer: Tokenizer
    template: ChatTemplate | None
    skip_bad: bool = False

    def find_parts(self, inputs: Sequence[Path], part_bytes: int, leave_out: Path | None) -> list[Part]:
        """See `find_record_parts` of records.py."""
        return find_record_parts(inputs, part_bytes, skip_bad=self.skip_bad, leave_out=leave_out)

    def request(self) -> dict[str, Any]:
        """The task, the template, and whether bad records are left out."""
        template = "" if self.template is None else self.template.sha256
        return {"task": self.task, "template": template, "skip_bad": self.skip_bad}

    def dated(self, time: datetime) -> Records:
        """These contents, with `time` as the time that templates write into texts."""
        return self if self.template is None else replace(self, template=replace(self.template, now=time))

    def entries(self, part: Part, left_out: LeftOut) -> Iterator[Entry]:
        """The examples of a part, uncut; see `Contents`."""
        counts = Counts()
        records = read_examples(part, left_out, skip_bad=self.skip_bad)
        try:
            examples = encode_examples(
                records,
                task=self.task,
                tokenizer=self.tokenizer,
                template=self.template,
                counts=counts,
                skip_bad=self.skip_bad,
            )
            if self.task == "kto":
                known = list(examples)
                for number, (place, encoded) in enumerate(known):
                    yield from self._entry(place, encoded, known[number - 1][1], counts)
            else:
                for place, encoded in examples:
                    yield from self._entry(place, encoded, None, counts)
        except ValueError as error:
            raise Unusable(str(error)) from None
        left_out.bad += counts.bad

    def _entry(self, place: Place | str, encoded: Encoded, previous: Encoded | None, counts: Counts) -> Iterator[Entry]:
        try:
            example = join_example(
                encoded, place, length=sys.maxsize, previous=None if previous is None else previous.completions[0]
            )
        except BadExample:  # without a learned token at any length
            if not self.skip_bad:
                raise
            counts.bad += 1
            return
        yield Entry(
            tuple(segment.tokens for segment in example.segments),
            tuple(segment.learned for segment in example.segments),
            example.label,
            size=4 * sum(len(segment.tokens) for segment in example.segments),  # about four bytes a token
            place=place,
        )
