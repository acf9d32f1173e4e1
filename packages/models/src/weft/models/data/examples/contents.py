"""`ExampleRecords`: reads records of examples and makes the entries of token shards, as `Texts` does for documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..contents import ShardEntry, Unusable
from ..inputs import InputPart, LeftOut, RecordPlace
from ..tokenizer import Tokenizer
from .encode import Encoded, encode_examples, join_example
from .example import Task
from .forms import BadExample
from .records import find_record_parts, read_examples
from .template import ChatTemplate


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
