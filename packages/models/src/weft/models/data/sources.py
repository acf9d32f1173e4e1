"""What a run is trained on: text, a prepared folder, or several of them by weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .manifest import MANIFEST, TOKENIZER_FOLDER, Manifest, check_tokenizer, read_manifest
from .records import Records, find_records, holds_records
from .text import Corpus, find_corpus
from .tokenizer import Tokenizer, find_tokenizer

if TYPE_CHECKING:
    from .streams import ShardStream, Stream


class Source(Protocol):
    """Documents that a run may be trained on.

    sha256: of what they are. is_prepared: from token shards, not from text. skipped: files that are no text. passed: entries of
    folders that are no files. begin: the tokens before each document.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sha256(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def skipped(self) -> tuple[Path, ...]: ...
    @property
    def begin(self) -> tuple[int, ...]: ...
    @property
    def passed(self) -> tuple[str, ...]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def is_prepared(self) -> bool: ...
    def open(self) -> Stream:
        """The tokens, of which what is asked for is read."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder that `weft data prepare` has made."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def num_tokens(self) -> int:
        """Ends of documents included."""
        return sum(shard.tokens for shard in self.manifest.shards)

    @property
    def sha256(self) -> str:
        """Of the sums of the shards' tokens and documents."""
        return _sha256_of(name for shard in self.manifest.shards for name in shard.sha256)

    @property
    def prompt(self) -> str:
        """What a sample of such text may begin with."""
        return next((shard.prompt for shard in self.manifest.shards if shard.prompt), " ")

    @property
    def skipped(self) -> tuple[Path, ...]:
        """None: what was left out was said when it was prepared."""
        return ()

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document, by the manifest; older manifests are of documents without."""
        return tuple(self.manifest.request.get("before_each", ()))

    @property
    def passed(self) -> tuple[str, ...]:
        """None, as of `skipped`."""
        return ()

    @property
    def is_prepared(self) -> bool:
        """Whether it is of token shards."""
        return True

    def open(self) -> ShardStream:
        """The tokens, memory-mapped."""
        from .streams import ShardStream

        return ShardStream(self.folder, self.manifest.shards, self.manifest.dtype, self.manifest.vocab_size)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several sources, of which samples are taken by weight; all of one tokenizer."""

    parts: tuple[tuple[Source, Fraction], ...]

    @property
    def name(self) -> str:
        """Each with its weight."""
        return " + ".join(f"{float(weight):g} x {source.name}" for source, weight in self.parts)

    @property
    def num_tokens(self) -> int:
        """Of all sources."""
        return sum(source.num_tokens for source, _ in self.parts)

    @property
    def sha256(self) -> str:
        """Of the sums of the sources."""
        return _sha256_of(source.sha256 for source, _ in self.parts)

    @property
    def prompt(self) -> str:
        """That of the first."""
        return self.parts[0][0].prompt

    @property
    def skipped(self) -> tuple[Path, ...]:
        """Of all sources."""
        return tuple(path for source, _ in self.parts for path in source.skipped)

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document of the first source, of which the prompt is."""
        return self.parts[0][0].begin

    @property
    def passed(self) -> tuple[str, ...]:
        """Of all sources."""
        return tuple(entry for source, _ in self.parts for entry in source.passed)

    @property
    def tokenizer(self) -> Tokenizer:
        """That of all."""
        return self.parts[0][0].tokenizer

    @property
    def is_prepared(self) -> bool:
        """Whether any source is."""
        return any(source.is_prepared for source, _ in self.parts)


Data = Corpus | Records | Prepared | Mixture


def find_data(path: Path | None, mixture: Sequence[str] = ()) -> Data:
    """The text, the records or the prepared folder at `path`, or what `mixture` names with weights, as "books=0.7".

    Raises ValueError for what cannot be read, weights that are none, both at once, and sources of several tokenizers.
    """
    if not mixture:
        return _find(path)
    if path is not None:
        raise ValueError(f"data.path {path} and data.mixture are both given; give one of the two")
    parts = []
    for item in mixture:
        name, _, number = item.rpartition("=")
        try:
            weight = Fraction(number)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not name or weight <= 0:
            raise ValueError(
                f"{item!r} in data.mixture is not FOLDER=WEIGHT with a weight above 0; write it like books=0.7"
            )
        parts.append((_find(Path(name)), weight))
    first = parts[0][0]
    for source, _ in parts[1:]:
        if source.tokenizer.sha256 != first.tokenizer.sha256:
            raise ValueError(
                f"data.mixture: {source.name} and {first.name} have different tokenizers; prepare both with one"
            )
    return Mixture(tuple(parts))


def check_share(data: Data, share: int, shares: int) -> int:
    """Reads of the token shards each `shares`-th, from number `share` on; the bytes that were read.

    Raises ValueError as `check_shard`.
    """
    from .verify import check_shard  # not sooner, as numpy takes a tenth of a second

    shards = [
        (each.folder, shard, each.manifest)
        for each in _sources_of(data)
        if isinstance(each, Prepared)
        for shard in each.manifest.shards
    ]
    nbytes = 0
    for folder, shard, manifest in shards[share::shares]:
        check_shard(folder, shard, manifest)
        nbytes += sum((folder / name).stat().st_size for name in shard.names)
    return nbytes


def _sources_of(data: Data) -> Sequence[Source]:
    return [each for each, _ in data.parts] if isinstance(data, Mixture) else [data]


def _sha256_of(sums: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()


def _find(path: Path | None) -> Corpus | Records | Prepared:
    if path is None or not path.exists():
        return find_corpus(path)
    if not (lexists(path / MANIFEST) or any(path.glob("tokens-*.bin"))):
        return find_records(path) if holds_records(path) else find_corpus(path)
    manifest = read_manifest(path)
    check_tokenizer(path, manifest)
    tokenizer = find_tokenizer(path / TOKENIZER_FOLDER)
    found = (tokenizer.sha256, tokenizer.end, tokenizer.vocab_size)
    if found != (manifest.tokenizer, manifest.end, manifest.vocab_size):
        raise ValueError(f"{path / TOKENIZER_FOLDER} is not the tokenizer that {path} was prepared with; copy it again")
    return Prepared(path, manifest, tokenizer)


def check_enough(data: Data, sequence_length: int) -> None:
    """Raises ValueError where a source has not two whole sequences: one to train on, one to hold out."""
    for source in _sources_of(data):
        if source.num_tokens <= 2 * sequence_length:
            raise ValueError(
                f"{source.name} has {source.num_tokens} tokens, fewer than two sequences of data.sequence_length "
                f"{sequence_length} and the next token, to train on one and hold one out; give more text or a shorter sequence"
            )


def repeats(data: Data, sequence_length: int, batch_size: int) -> list[str]:
    """What is to be said of each source of which a step takes more sequences than there are to train on; else nothing."""
    parts = data.parts if isinstance(data, Mixture) else ((data, Fraction(1)),)
    total, said = sum(weight for _, weight in parts), []
    for source, weight in parts:
        wanted = ceil(batch_size * weight / total)
        if source.num_tokens > 4 * wanted * sequence_length:  # at least about half of them is trained on
            continue
        from .split import split

        there = len(split(source.open(), sequence_length).trained)
        if there < wanted:
            said.append(
                f"a step takes {wanted:,} sequences of {source.name}, which has {there:,} to train on: some are taken "
                f"{ceil(wanted / there)} times in it; give more text, or a smaller --data.batch-size"
            )
    return said


def check_vocabulary(data: Data, size: int) -> None:
    """Raises ValueError where a model of `size` tokens has not all that the data may have."""
    tokenizer = data.tokenizer
    if size < tokenizer.vocab_size:
        what = (
            "a text's tokens are its bytes, 0 to 255, and the end of a document"
            if tokenizer.is_bytes
            else f"the tokens of {data.name}"
        )
        raise ValueError(
            f"model.vocab_size {size} is below {tokenizer.vocab_size}: {what}; give --model.vocab-size {tokenizer.vocab_size} or more"
        )
