"""The examples of a run, from records read into memory or from a folder of `weft data prepare --task`."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from os.path import lexists
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...terminal import PROGRAM
from ..inputs import LeftOut, newest_time
from ..manifest import MANIFEST, DataManifest, TokenShard
from ..sources import Mixture, find_prepared, parse_mixture
from ..tokenizer import Tokenizer, have_same_tokens
from .encode import ExampleRecords
from .example import SEGMENTS, Example, MaskedTokens, Task
from .forms import BadExample
from .stored import Arrays, PartInMemory, PartOnDisk, UncutExamples
from .template import ChatTemplate

MOST_BYTES = 256 << 20  # of records in a run without `weft data prepare`: each process holds their tokens in memory
PART_BYTES = 64 << 20  # the default of `weft data prepare`: equal parts give kto equal mismatched completions
NOUNS = {"sft": "conversation", "dpo": "pair", "kto": "judged completion"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Examples:
    """The examples of a file or folder, each segment cut to the run's sequence length. Made by `find_examples`."""

    task: Task
    tokenizer: Tokenizer
    length: int  # the most tokens of a segment
    parts: tuple[UncutExamples, ...]  # the uncut examples, also the ones left out
    numbers: NDArray[np.int64]  # [n]: for each kept example, the number among the examples of all parts
    lengths: NDArray[np.int64]  # [n, segments]: the tokens of each segment after the cut
    learned: NDArray[np.int64]  # [n, segments]: the learned tokens of each segment, without the first token
    labels: NDArray[np.bool_]  # [n]: for kto, whether the completion is desirable; else False
    num_cut: int  # examples with a segment longer than `length`
    num_bad: int  # under skip_bad: bad records left out, and examples with nothing to learn after the cut
    sha256: str  # of the uncut examples
    folder: Path  # the folder or file of the data
    manifest: DataManifest | None = None  # of a prepared folder
    skipped: tuple[Path, ...] = ()  # files without records
    passed: tuple[str, ...] = ()  # descriptions of folder entries passed over because they are no files

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, number: int) -> Example:
        """The example with this number, 0 to len - 1. Raises ValueError for a token outside the vocabulary."""
        segments = SEGMENTS[self.task]
        stored = int(self.numbers[number])
        part = int(np.searchsorted(self._firsts, stored, side="right")) - 1
        arrays, first = self.parts[part].arrays, (stored - int(self._firsts[part])) * segments
        found = []
        for place in range(first, first + segments):
            start = int(arrays.ends[place - 1]) if place else 0
            stop = min(int(arrays.ends[place]), start + self.length)
            tokens = arrays.tokens[start:stop].astype(np.int64)
            if (highest := int(tokens.max())) >= self.tokenizer.vocab_size:
                raise ValueError(
                    f"{self.name} is not what was prepared: it has the token {highest} in a vocabulary "
                    f"of {self.tokenizer.vocab_size}; weft data verify names the file"
                )
            found.append(MaskedTokens(tokens, arrays.masks[start:stop].astype(np.bool_)))
        return Example(tuple(found), bool(self.labels[number]) if self.task == "kto" else None)

    @property
    def name(self) -> str:
        """The file or folder."""
        return str(self.folder)

    @property
    def is_prepared(self) -> bool:
        """Whether the examples come from token shards, not from records."""
        return self.manifest is not None

    @property
    def num_tokens(self) -> int:
        """The number of tokens. Mismatched segments of kto do not count."""
        return int(self._own(self.lengths).sum())

    @property
    def num_learned(self) -> int:
        """The number of learned tokens. Mismatched segments of kto do not count."""
        return int(self._own(self.learned).sum())

    @cached_property
    def prompt_tokens(self) -> tuple[int, ...]:
        """The tokens of the first example before the first learned token, as a conversation's first question."""
        segment = self.read(0).segments[0]
        return tuple(segment.tokens[: int(np.argmax(segment.learned))].tolist())

    @property
    def prompt(self) -> str:
        """The text of `prompt_tokens`, special tokens included; a sample of the trained model continues this text."""
        return self.tokenizer.decode(self.prompt_tokens)

    @property
    def begin(self) -> tuple[int, ...]:
        """No tokens: `prompt_tokens` includes the tokenizer's beginning already. For texts, see `Source`."""
        return ()

    @property
    def shards(self) -> Sequence[tuple[Path, TokenShard, DataManifest]]:
        """The shards of a prepared folder, each with the folder and the manifest; empty for records."""
        return [(self.folder, shard, self.manifest) for shard in self.manifest.shards] if self.manifest else []

    def describe(self) -> str:
        """The counts of the examples, as "1,203 conversations, 402,311 tokens (31% learned), 3 cut to 2,048"."""
        share = round(100 * self.num_learned / max(self.num_tokens, 1))
        cut = f", {self.num_cut:,} cut to {self.length:,}" if self.num_cut else ""
        bad = f", {self.num_bad:,} left out" if self.num_bad else ""
        plural = "" if len(self) == 1 else "s"
        labels = f" ({int(self.labels.sum()):,} desirable)" if self.task == "kto" else ""
        noun = f"{NOUNS[self.task]}{plural}{labels}"
        return f"{len(self):,} {noun}, {self.num_tokens:,} tokens ({share}% learned){cut}{bad}"

    def open(self) -> Any:
        """Raises TypeError: examples have no stream of tokens, which `Source.open` gives for texts; call `read`."""
        raise TypeError("examples are read one by one: call read")

    def _own(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """counts [n, segments] without the column of mismatched segments (kto)."""
        return counts[:, :1] if self.task == "kto" else counts

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        """The number of each part's first example among the examples of all parts; last, the number of all."""
        counts = [len(part.arrays.ends) // SEGMENTS[self.task] for part in self.parts]
        return np.cumsum([0, *counts])

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class ExampleMixture(Mixture):
    """Several sources of examples, with equal task and tokenizer; rows are taken by weight."""

    parts: tuple[tuple[Examples, Fraction], ...]

    @property
    def task(self) -> Task:
        """The task, common to all sources."""
        return self.parts[0][0].task

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        """`Examples.prompt_tokens` of the first source."""
        return self.parts[0][0].prompt_tokens

    def describe(self) -> str:
        """The counts of each source."""
        return "; ".join(f"{source.name}: {source.describe()}" for source, _ in self.parts)


def find_examples(
    path: Path | None,
    mixture: Sequence[str] = (),
    *,
    task: Task,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    length: int,
    skip_bad: bool = False,
) -> Examples | ExampleMixture:
    """Open the examples of a run: the records or the prepared folder at `path`, or a mixture such as ["chats=0.7"].

    path: None with a mixture. tokenizer, template: encode records; template None: for records of text alone. A prepared
        folder must have been made with this tokenizer.
    length: the most tokens of a segment; a longer segment is cut at the end.
    skip_bad: leave out records without an example, and examples in which a cut leaves nothing to learn.
    Raises ValueError for data that cannot be read, for more than 256 MiB of records, for a folder prepared for another
    task or with another tokenizer, and, unless skip_bad, for a bad record, by file and line.
    """

    def find(each: Path) -> Examples:
        if lexists(each / MANIFEST) or any(each.glob("tokens-*.bin")):
            return open_prepared(each, task, tokenizer=tokenizer, length=length, skip_bad=skip_bad)
        return _read_records(each, ExampleRecords(task, tokenizer, template, skip_bad), length)

    if not mixture:
        if path is None:
            raise ValueError(f"--task {task} needs data; give records or a prepared folder by --data.path")
        return find(path)
    return ExampleMixture(tuple((find(name), weight) for name, weight in parse_mixture(path, mixture)))


def _read_records(path: Path, records: ExampleRecords, length: int) -> Examples:
    inputs = records.find_parts([path], PART_BYTES, None)
    records = records.dated(newest_time(inputs))
    nbytes = sum(piece.nbytes for part in inputs for piece in part)
    if nbytes > MOST_BYTES:
        raise ValueError(
            f"{path} has {nbytes:,} bytes of records, more than the {MOST_BYTES:,} that a run reads itself; make "
            f"shards with `{_prepare_command(path, records.task)}`, and give --data.path prepared"
        )
    left_out = LeftOut(empty=0, skipped=[], bad=0, passed=[])
    dtype = "uint16" if records.tokenizer.vocab_size <= 2**16 else "uint32"
    parts, places, digest = [], [], hashlib.sha256()
    for part in inputs:
        entries = list(records.entries(part, left_out))
        places += [entry.place for entry in entries]
        arrays = Arrays.of(entries, dtype)
        for each in (arrays.tokens, arrays.masks, arrays.ends, arrays.labels):
            digest.update(each.tobytes())
        parts.append(PartInMemory(arrays))
    return _cut(
        parts,
        places,
        skip_bad=records.skip_bad,
        num_bad=left_out.bad,
        folder=path,
        task=records.task,
        tokenizer=records.tokenizer,
        length=length,
        sha256=digest.hexdigest(),
        skipped=tuple(map(Path, left_out.skipped)),
        passed=tuple(left_out.passed),
    )


def open_prepared(
    folder: Path,
    task: Task,
    *,
    tokenizer: Tokenizer | None = None,
    length: int = sys.maxsize,
    skip_bad: bool = False,
) -> Examples:
    """The examples of a prepared folder.

    tokenizer: the model's, which must be the folder's; None: not checked. length, skip_bad: as for `find_examples`.
    Raises ValueError as `find_examples` does.
    """
    found = find_prepared(folder)
    manifest = found.manifest
    if manifest.task != task:
        raise ValueError(
            f"{folder} was prepared for --task {manifest.task}, not {task}; give --task {manifest.task}, or prepare "
            f"the records with `{_prepare_command('FILE_OR_FOLDER', task)}`"
        )
    own = found.tokenizer
    if tokenizer is not None and not (have_same_tokens(own, tokenizer) and own.end == tokenizer.end):
        raise ValueError(
            f"{folder} was prepared with another tokenizer than the model's, or another end token; prepare the records "
            f"again with `{_prepare_command('FILE_OR_FOLDER', task)}`, and give --data.path prepared"
        )
    parts = [PartOnDisk(folder, shard, task, manifest.dtype, manifest.vocab_size) for shard in manifest.shards]
    return _cut(
        parts,
        None,
        skip_bad=skip_bad,
        num_bad=0,
        folder=folder,
        task=task,
        tokenizer=found.tokenizer,
        length=length,
        sha256=found.sha256,
        manifest=manifest,
    )


def _cut(
    parts: Sequence[UncutExamples],
    places: Sequence[object] | None,
    *,
    task: Task,
    length: int,
    folder: Path,
    skip_bad: bool,
    num_bad: int,
    **fields: Any,
) -> Examples:
    """Cut the examples of the parts to `length`; an example with nothing to learn after the cut is left out or refused.

    places: where each record is, for errors; None for a prepared folder. fields: further fields of `Examples`.
    """
    shape = (-1, SEGMENTS[task])
    if not any(len(part.arrays.ends) for part in parts):
        raise ValueError(f"{folder} holds no example of {task}; give records of examples")
    whole = np.concatenate([part.arrays.find_lengths() for part in parts]).reshape(shape)
    learned = np.concatenate([part.arrays.count_learned(length) for part in parts]).reshape(shape)
    labels = np.concatenate([part.arrays.labels for part in parts]).astype(np.bool_)
    empty = (learned == 0).any(1)
    if empty.any() and not skip_bad:
        number = int(np.argmax(empty))
        place = f"{folder}: example {number + 1}" if places is None else places[number]
        raise BadExample(
            f"{place} has no token to learn among the first {length:,} of its {whole[number].max():,} tokens; give a "
            f"longer --data.sequence-length, or leave the record out"
        )
    if task == "dpo" and (equal := _find_equal(parts, whole, length)).any():
        if not skip_bad:
            number = int(np.argmax(equal))
            place = f"{folder}: example {number + 1}" if places is None else places[number]
            raise BadExample(
                f"{place} has chosen and rejected answers that are equal in their first {length:,} tokens, of "
                f"{whole[number].max():,}; give a longer --data.sequence-length, or leave the record out"
            )
        empty |= equal
    numbers = np.flatnonzero(~empty)
    if not len(numbers):
        raise ValueError(
            f"{folder} has no example with a token to learn among its first {length:,}; give a longer length"
        )
    whole = whole[numbers]
    return Examples(
        folder=folder,
        task=task,
        length=length,
        parts=tuple(parts),
        numbers=numbers,
        lengths=np.minimum(whole, length),
        learned=learned[numbers],
        labels=labels[numbers] if task == "kto" else np.zeros(len(numbers), dtype=np.bool_),
        num_cut=int((whole > length).any(1).sum()),
        num_bad=num_bad + int(empty.sum()),
        **fields,
    )


def _find_equal(parts: Sequence[UncutExamples], lengths: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    """[n] bool: the pairs (dpo) whose two segments are equal after the cut. lengths: [n, 2], of the uncut segments."""
    equal = np.zeros(len(lengths), dtype=np.bool_)
    cut = np.minimum(lengths, length)
    candidates = np.flatnonzero((lengths > length).any(1) & (cut[:, 0] == cut[:, 1]))
    first = 0
    for part in parts:
        arrays, count = part.arrays, len(part.arrays.ends) // 2
        for number in candidates[(candidates >= first) & (candidates < first + count)]:
            chosen, rejected = (int(arrays.ends[2 * (number - first) + k]) - int(lengths[number, k]) for k in (0, 1))
            size = int(cut[number, 0])
            equal[number] = np.array_equal(
                arrays.tokens[chosen : chosen + size], arrays.tokens[rejected : rejected + size]
            )
        first += count
    return equal


def _prepare_command(path: Path | str, task: Task) -> str:
    return f"{PROGRAM} data prepare {shlex.quote(str(path))} --task {task} --tokenizer FOLDER --output prepared"
