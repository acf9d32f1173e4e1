"""The data of a run: text, bytes of records (JSON, CSV, Parquet), a prepared folder, or a weighted mixture of these.

`find_data` finds the data. `check_share` verifies a rank's share of prepared data: the checksums of files, and the
content of the shards.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from os.path import lexists
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .byte_tokens import BYTE_END
from .inputs import Columns, InputPart, LeftOut, find_parts, read_part
from .kinds import FileKind, kind_of
from .manifest import MANIFEST, TOKENIZER_FOLDER, DataManifest, TokenShard, check_tokenizer, read_manifest
from .text import BytesOfText, Corpus, entries_under, find_corpus, first_words
from .tokenizer import Tokenizer, find_tokenizer

if TYPE_CHECKING:
    from .streams import RecordStream, ShardStream, Stream

COLUMNS = Columns()  # the field "text"
# A weight as in "0.7", "2/3" or "1e-2". Without a bound, the digits of "1e999999999" would fill the memory.
_WEIGHT = r"[0-9./]{1,20}([eE][+-]?[0-9]{1,2})?"
MOST_BYTES = 1 << 30  # each process holds the texts in memory


@dataclass(frozen=True, slots=True)
class Records(BytesOfText):
    """The texts of a file or folder with records, read by a run itself; a token is a byte. Made by `_find_records`."""

    name: str
    parts: tuple[InputPart, ...]
    num_tokens: int  # the end of each document included
    sha256: str  # of the texts, when they were found
    prompt: str  # the first words of the texts: the beginning of a run's sample
    skipped: tuple[Path, ...]  # files without text
    passed: tuple[str, ...]  # descriptions of folder entries passed over because they are no files, such as pipes

    def open(self) -> RecordStream:
        """The tokens, read again. Raises ValueError where the files have changed since they were found."""
        import numpy as np

        from .streams import RecordStream

        tokens, ends = np.empty(self.num_tokens, dtype=np.uint16), []
        place = 0
        for text in _texts_of(self.parts, LeftOut(empty=0, skipped=[], bad=0, passed=[])):
            content = text.encode()
            stop = place + len(content)
            if stop < self.num_tokens:
                tokens[place:stop] = np.frombuffer(content, dtype=np.uint8)
                tokens[stop] = BYTE_END
            place = stop + 1
            ends.append(place)
        if place != self.num_tokens:
            raise ValueError(f"{self.name} has changed since the run began: {place} tokens for {self.num_tokens}")
        return RecordStream(tokens, np.array(ends, dtype=np.int64))


def _holds_records(path: Path) -> bool:
    """Whether a file, or any file of a folder, holds records of JSON, CSV or Parquet.

    Raises ValueError as `kind_of` does.
    """
    found = entries_under(path).files
    kinds = {kind_of(file, (COLUMNS.field,), is_named=path.is_file()) for file in found}
    return bool(kinds - {FileKind.TEXT, FileKind.NONE})


def _find_records(path: Path) -> Records:
    """The documents under `path`: texts, and records with a text in the field or column "text".

    Raises ValueError for a record without the field, a file that cannot be read, and more than 1 GiB.
    """
    try:
        parts = tuple(find_parts([path], COLUMNS, MOST_BYTES))
        nbytes = sum(piece.nbytes for part in parts for piece in part)
        if nbytes > MOST_BYTES:
            raise ValueError(
                f"{path} has {nbytes:,} bytes of records, more than the {MOST_BYTES:,} that are read at once"
            )
        left_out, digest, num_tokens, prompt = LeftOut(empty=0, skipped=[], bad=0, passed=[]), hashlib.sha256(), 0, ""
        for text in _texts_of(parts, left_out):
            content = text.encode()
            digest.update(content + b"\xff")  # a byte absent from UTF-8 marks the end
            num_tokens += len(content) + 1
            prompt = prompt or first_words(text)
    except ValueError as error:
        raise ValueError(
            f"data.path: {error}; weft data prepare makes tokens of any field, of any size, that --data.path takes"
        ) from None
    if not num_tokens:
        raise ValueError(f"data.path {path} holds no text: {left_out.empty} empty documents; give files that do")
    skipped = tuple(map(Path, left_out.skipped))
    return Records(str(path), parts, num_tokens, digest.hexdigest(), prompt or " ", skipped, tuple(left_out.passed))


def _texts_of(parts: tuple[InputPart, ...], left_out: LeftOut) -> Iterator[str]:
    """The texts of all parts. left_out: an empty `LeftOut`, which is filled while the texts are read."""
    for part in parts:
        yield from read_part(part, COLUMNS, left_out)


class Source(Protocol):
    """Documents for a run to train on."""

    @property
    def name(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...  # the end of each document included
    @property
    def sha256(self) -> str: ...  # of the content
    @property
    def prompt(self) -> str: ...  # with which a sample of similar text may begin
    @property
    def skipped(self) -> tuple[Path, ...]: ...  # files without text
    @property
    def begin(self) -> tuple[int, ...]: ...  # the tokens before each document
    @property
    def passed(self) -> tuple[str, ...]: ...  # entries of folders that are no files
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def is_prepared(self) -> bool: ...  # whether the tokens come from token shards, not from text
    @property
    def shards(self) -> Sequence[tuple[Path, TokenShard, DataManifest]]: ...  # of prepared data, each with its folder
    def open(self) -> Stream:
        """The tokens, read on demand."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder made by `weft data prepare`."""

    folder: Path
    manifest: DataManifest
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including the end of each document."""
        return sum(shard.tokens for shard in self.manifest.shards)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the shards' checksums."""
        return _sha256_of(name for shard in self.manifest.shards for name in shard.sha256)

    @property
    def prompt(self) -> str:
        """Words with which a sample of similar text may begin."""
        return next((shard.prompt for shard in self.manifest.shards if shard.prompt), " ")

    @property
    def skipped(self) -> tuple[Path, ...]:
        """Empty: `weft data prepare` reported the skipped files."""
        return ()

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document, by the manifest; none in older manifests."""
        return tuple(self.manifest.request.get("before_each", ()))

    @property
    def passed(self) -> tuple[str, ...]:
        """Empty, as `skipped` is."""
        return ()

    @property
    def is_prepared(self) -> bool:
        """True: the tokens come from token shards."""
        return True

    @property
    def shards(self) -> Sequence[tuple[Path, TokenShard, DataManifest]]:
        """The shards, each with the folder and its manifest."""
        return [(self.folder, shard, self.manifest) for shard in self.manifest.shards]

    def open(self) -> ShardStream:
        """The tokens, memory-mapped."""
        from .streams import ShardStream

        return ShardStream(self.folder, self.manifest.shards, self.manifest.dtype, self.manifest.vocab_size)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several sources with equal tokenizers; samples are taken by weight."""

    parts: tuple[tuple[Source, Fraction], ...]

    @property
    def name(self) -> str:
        """The names and weights of the sources."""
        return " + ".join(f"{float(weight):g} x {source.name}" for source, weight in self.parts)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all sources."""
        return sum(source.num_tokens for source, _ in self.parts)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the sources' checksums."""
        return _sha256_of(source.sha256 for source, _ in self.parts)

    @property
    def prompt(self) -> str:
        """The prompt of the first source."""
        return self.parts[0][0].prompt

    @property
    def skipped(self) -> tuple[Path, ...]:
        """The skipped files of all sources."""
        return tuple(path for source, _ in self.parts for path in source.skipped)

    @property
    def begin(self) -> tuple[int, ...]:
        """The tokens before each document of the first source, to go with `prompt`."""
        return self.parts[0][0].begin

    @property
    def passed(self) -> tuple[str, ...]:
        """The passed entries of all sources."""
        return tuple(entry for source, _ in self.parts for entry in source.passed)

    @property
    def tokenizer(self) -> Tokenizer:
        """The common tokenizer."""
        return self.parts[0][0].tokenizer

    @property
    def is_prepared(self) -> bool:
        """Whether any source is prepared."""
        return any(source.is_prepared for source, _ in self.parts)


Data = Corpus | Records | Prepared | Mixture


def find_data(path: Path | None, mixture: Sequence[str] = ()) -> Data:
    """The data of a run: the text, records or prepared folder at `path`; or the mixture given as names with
    weights, "books=0.7".

    Raises ValueError for data that cannot be read, for a bad weight, for both path and mixture, and for sources
    with different tokenizers.
    """
    if not mixture:
        return _find(path)
    parts = [(_find(name), weight) for name, weight in parse_mixture(path, mixture)]
    first = parts[0][0]
    for source, _ in parts[1:]:
        if source.tokenizer.sha256 != first.tokenizer.sha256:
            raise ValueError(
                f"data.mixture: {source.name} and {first.name} have different tokenizers; prepare both with one"
            )
    return Mixture(tuple(parts))


def parse_mixture(path: Path | None, mixture: Sequence[str]) -> list[tuple[Path, Fraction]]:
    """The names and weights of a mixture given as "books=0.7". path: the value of data.path, None where not given.

    Raises ValueError for a bad weight, for a name given twice, and where `path` is given as well.
    """
    if path is not None:
        raise ValueError(f"data.path {path} and data.mixture are both given; give one of the two")
    parts: list[tuple[Path, Fraction]] = []
    for item in mixture:
        name, _, number = item.rpartition("=")
        weight = Fraction(0)
        if re.fullmatch(_WEIGHT, number):
            with suppress(ValueError, ZeroDivisionError):
                weight = Fraction(number)
        if not name or weight <= 0:
            raise ValueError(
                f"{item!r:.200} in data.mixture is not FOLDER=WEIGHT with a weight above 0; write it like books=0.7"
            )
        if Path(name) in dict(parts):
            raise ValueError(f"{name} is given twice in data.mixture; give it once, with the sum of its weights")
        parts.append((Path(name), weight))
    return parts


def check_share(data: Data, share: int, shares: int) -> int:
    """Verify every `shares`-th token shard, beginning with number `share`. Returns the number of bytes read.

    Raises ValueError as `check_shard` does.
    """
    shards = [each for source in _sources_of(data) for each in source.shards]
    from .shards import check_shard  # imported here because numpy takes a tenth of a second

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
        return _find_records(path) if _holds_records(path) else find_corpus(path)
    found = find_prepared(path)
    if found.manifest.task != "pretrain":
        raise ValueError(f"{path} was prepared for --task {found.manifest.task}; give --task {found.manifest.task}")
    return found


def find_prepared(path: Path) -> Prepared:
    """A folder made by `weft data prepare`, of any task.

    Raises ValueError as `read_manifest` and `check_tokenizer` do.
    """
    manifest = read_manifest(path)
    check_tokenizer(path, manifest)
    tokenizer = find_tokenizer(path / TOKENIZER_FOLDER)
    found = (tokenizer.sha256, tokenizer.end, tokenizer.vocab_size)
    if found != (manifest.tokenizer, manifest.end, manifest.vocab_size):
        raise ValueError(f"{path / TOKENIZER_FOLDER} is not the tokenizer that {path} was prepared with; copy it again")
    return Prepared(path, manifest, tokenizer)


def check_enough(data: Data, sequence_length: int) -> None:
    """Raises ValueError for a source with fewer than two whole sequences: one to train on, one to hold out."""
    for source in _sources_of(data):
        if source.num_tokens <= 2 * sequence_length:
            raise ValueError(
                f"{source.name} has {source.num_tokens} tokens, fewer than two sequences of data.sequence_length "
                f"{sequence_length} and the next token, to train on one and hold one out; give more text or a shorter "
                f"sequence"
            )


def repeats(data: Data, sequence_length: int, batch_size: int) -> list[str]:
    """Warnings, one for each source with fewer training sequences than a step takes from the source."""
    parts = data.parts if isinstance(data, Mixture) else ((data, Fraction(1)),)
    total, warnings = sum(weight for _, weight in parts), []
    for source, weight in parts:
        num_sequences = ceil(batch_size * weight / total)
        if source.num_tokens > 4 * num_sequences * sequence_length:  # at least about half of the tokens is trained on
            continue
        from .streams import split

        available = len(split(source.open(), sequence_length).trained)
        if available < num_sequences:
            warnings.append(
                f"a step takes {num_sequences:,} sequences of {source.name}, which has {available:,} to train on: some "
                f"are taken {ceil(num_sequences / available)} times in it; give more text, or a smaller "
                f"--data.batch-size"
            )
    return warnings


class Tokenized(Protocol):
    """Data of any kind, of texts or of examples."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


def check_vocabulary(data: Tokenized, size: int) -> None:
    """Raises ValueError for a model whose vocabulary of `size` tokens lacks some of the data's tokens."""
    tokenizer = data.tokenizer
    if size < tokenizer.vocab_size:
        what = (
            "a text's tokens are its bytes, 0 to 255, and the end of a document"
            if tokenizer.is_bytes
            else f"the tokens of {data.name}"
        )
        raise ValueError(
            f"model.vocab_size {size} is below {tokenizer.vocab_size}: {what}; give --model.vocab-size "
            f"{tokenizer.vocab_size} or more"
        )
