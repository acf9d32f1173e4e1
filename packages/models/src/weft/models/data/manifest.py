"""The manifest of a prepared folder, and the tokens around each document.

The manifest lists the contents of the folder's shards, with checksums, and is written last. `boundary_tokens` gives
the tokens that `prepare` puts before and after each document.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..safe_files import as_type, check_plain_name, parse_json, read_plain
from .examples.example import SEGMENTS, Task
from .tokenizer import TOKENIZER_FILE, Tokenizer

MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT = "weft-tokens"
VERSION = 1
READ_BYTES = 1 << 20
ANEW = "remove the folder and prepare it again"  # a folder with a manifest counts as complete and is not made again
TOKENS = {"uint16": 2**16, "uint32": 2**32}  # the number of values of each dtype
# A shard has the first files of FILES, as many as _NUM_FILES says.
FILES = ("tokens", "documents", "masks", "labels")
_NUM_FILES = {"pretrain": 2, "sft": 3, "dpo": 3, "kto": 4}
_COUNTS = ("tokens", "documents", "empty")  # counts of shards whose sums are in the manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShard:
    """The entry of a manifest about a part's files: tokens; and the end of each document, as 64-bit numbers.

    Examples have a document for each segment, and a file of masks, a byte a token (1: learned). Examples of kto have a
    file of labels, a byte an example (1: desirable). Left-out input is counted here, and is not among the documents.
    """

    number: int
    tokens: int
    documents: int
    sha256: tuple[str, ...]  # of the files
    empty: int  # documents without text
    skipped: tuple[str, ...]  # files without text
    bad: int  # records left out under skip_bad
    prompt: str  # the first words of a document; the sample shown by a training run begins with these
    passed: tuple[str, ...] = ()  # entries of folders that are no files

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files: of tokens, of documents' ends, of masks, of labels, as far as the shard has them."""
        return tuple(f"{name}-{self.number:05}.bin" for name in FILES[: len(self.sha256)])

    def check_files(self, task: Task) -> None:
        """Raises ValueError where the number of files, or of documents, is not that of a shard of the task."""
        if len(self.sha256) != num_files(task):
            raise ValueError(f"has {len(self.sha256)} checksums, and a shard of {task} has {num_files(task)} files")
        if self.documents % SEGMENTS.get(task, 1):
            raise ValueError(f"has {self.documents} documents, and an example of {task} has {SEGMENTS[task]}")

    def check_sizes(self, folder: Path, dtype: str) -> None:
        """Raises ValueError where a file is missing, or its size contradicts the counts. dtype: of tokens."""
        width = int(dtype.removeprefix("uint")) // 8
        sizes = (self.tokens * width, self.documents * 8, self.tokens, self.documents // SEGMENTS["kto"])
        for name, size in zip(self.names, sizes, strict=False):
            file = folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, and the manifest says {size}"
                raise ValueError(f"{file} {what}; copy it again, or {ANEW}")


def num_files(task: Task) -> int:
    """The number of files of a shard."""
    return _NUM_FILES[task]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataManifest:
    """The contents of a prepared folder. Written by `prepare`, read by `read_manifest`."""

    dtype: str  # of tokens, little-endian: uint16 or uint32
    vocab_size: int
    end: int  # the token that ends a document
    tokenizer: str  # `Tokenizer.sha256`
    shards: tuple[TokenShard, ...]
    # All that determines the shards' bytes: the arguments of `prepare`, and versions. Under "tokenizer": the SHA-256 of
    # each file of the tokenizer, by the file's name.
    request: dict[str, Any]
    task: Task = "pretrain"  # older manifests name none

    def write(self, folder: Path) -> None:
        """Write the file, complete or not at all."""
        counts = {name: sum(getattr(shard, name) for shard in self.shards) for name in ("tokens", "documents", "empty")}
        content = {"format": FORMAT, "version": VERSION, **counts, **asdict(self)}
        content["sha256"] = digest_of(content)
        write_whole(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def digest_of(content: dict[str, Any]) -> str:
    """The SHA-256 of `content` as JSON, taken before a file's own digest is added to the content."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(folder: Path) -> DataManifest:
    """The manifest of a prepared folder.

    Raises ValueError for a folder without a manifest; for a manifest of a newer version, changed since, or
    contradicting itself; and for files of another size than the manifest's counts imply.
    """
    path = folder / MANIFEST
    try:
        text = read_plain(path)
    except OSError as error:
        raise ValueError(
            f"{folder} holds no prepared data: {error.strerror} ({MANIFEST}); run weft data prepare"
        ) from None
    try:
        content = parse_json(text, "the file", ANEW)
    except ValueError as error:
        raise ValueError(f"{path} is not a manifest of prepared data: {error}") from None
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a manifest of prepared data; {ANEW}")
    version = content.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{path} is of version {version!r:.60}; this reads version {VERSION}: update weft, or {ANEW}")
    if "sha256" in content and content.pop("sha256") != digest_of({"format": FORMAT, "version": version, **content}):
        raise ValueError(f"{path} was changed after it was written; copy it again, or {ANEW}")
    sums = {name: content.pop(name, None) for name in _COUNTS}
    try:
        known = {name: content[name] for name in DataManifest.__dataclass_fields__ if name in content}
        manifest = as_type(DataManifest, known, "the manifest")
        check_request(manifest.request)
    except ValueError as error:
        raise ValueError(f"{path} lacks a part, or has a wrong value for a part: {error}; {ANEW}") from None
    if (contradiction := _contradiction(manifest, sums)) is not None:
        raise ValueError(f"{path} contradicts itself: {contradiction}; {ANEW}")
    for shard in manifest.shards:
        shard.check_sizes(folder, manifest.dtype)
    return manifest


def check_request(request: Mapping[str, Any]) -> None:
    """Raises ValueError where an entry of a request has a wrong type, or a file name leads out of the folder.

    request: from a manifest, or from the progress file of an unfinished preparation.
    """
    where = "the manifest.request"
    names = as_type(dict[str, str], request.get("tokenizer"), f"{where}.tokenizer")
    for name in names:
        check_plain_name(name, f"{where}.tokenizer")
    if TOKENIZER_FILE not in names:
        raise ValueError(f"{where}.tokenizer has no {TOKENIZER_FILE!r}")
    as_type(tuple[str, ...], request.get("inputs", []), f"{where}.inputs")
    for name in ("task", "template"):  # of examples
        as_type(str, request.get(name, ""), f"{where}.{name}")
    for name in ("before_each", "after_each"):  # older requests have neither
        as_type(tuple[int, ...], request.get(name, []), f"{where}.{name}")


def _contradiction(manifest: DataManifest, sums: Mapping[str, Any]) -> str | None:
    """The first contradiction among the numbers of a manifest, in words; None without any.

    sums: the sums over shards, as written in the manifest.
    """
    if manifest.dtype not in TOKENS:
        return f"dtype is {manifest.dtype[:60]!r}, and {' and '.join(TOKENS)} are known"
    if not 0 < manifest.vocab_size <= TOKENS[manifest.dtype]:
        return f"vocab_size is {manifest.vocab_size}, and {manifest.dtype} has 1 to {TOKENS[manifest.dtype]}"
    if manifest.task not in _NUM_FILES:
        return f"task is {manifest.task[:60]!r}, and {', '.join(_NUM_FILES)} are known"
    boundary = [*manifest.request.get("before_each", ()), manifest.end, *manifest.request.get("after_each", ())]
    if outside := [token for token in boundary if not 0 <= token < manifest.vocab_size]:
        return f"token {outside[0]} stands around documents, and vocab_size is {manifest.vocab_size}"
    for place, shard in enumerate(manifest.shards):
        if shard.number != place:
            return f"shards[{place}] has the number {shard.number}"
        if not 0 <= shard.documents <= shard.tokens or (shard.tokens and not shard.documents):
            return f"shards[{place}] has {shard.documents} documents of {shard.tokens} tokens"
        try:
            shard.check_files(manifest.task)
        except ValueError as error:
            return f"shards[{place}] {error}"
        if least := [name for name in ("empty", "bad") if getattr(shard, name) < 0]:
            return f"shards[{place}] has {getattr(shard, least[0])} as {least[0]}"
    for name in _COUNTS:
        total = sum(getattr(shard, name) for shard in manifest.shards)
        if sums[name] is not None and sums[name] != total:
            return f"{name} is {sums[name]!r:.60}, and its shards have {total}"
    if not any(shard.tokens for shard in manifest.shards):
        return "it has no tokens"
    return None


def check_tokenizer(folder: Path, manifest: DataManifest) -> None:
    """Read the tokenizer's files, whenever prepared data is opened or verified.

    Raises ValueError where a file differs from the manifest's, and for a file not in the manifest.
    """
    expected: dict[str, str] = manifest.request["tokenizer"]
    tokenizer_folder = folder / TOKENIZER_FOLDER
    for name, digest in expected.items():
        check_sum(tokenizer_folder / name, digest)
    for path in sorted(tokenizer_folder.iterdir()):
        if path.name not in expected and not path.name.startswith("."):
            raise ValueError(f"{path} was not written by weft data prepare; remove it")


def check_sum(path: Path, expected: str) -> None:
    """Read a file. Raises ValueError where its SHA-256 is not `expected`."""
    if not path.is_file() or file_sha256(path) != expected:
        raise ValueError(f"{path} is not what was prepared: its SHA-256 differs; copy it again, or {ANEW}")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON with its SHA-256, complete or not at all.

    `prepare` records its request and each complete shard in this way, to continue after an interruption.
    """
    write_whole(path, json.dumps({"sha256": digest_of(content), "holds": content}).encode())


def read_record(path: Path) -> dict[str, Any] | None:
    """The content written by `write_record`; None where there is no plain file at `path`, or the file was changed."""
    try:
        found = parse_json(read_plain(path), str(path), ANEW)
    except (OSError, ValueError):
        return None
    content = found.get("holds")
    return content if isinstance(content, dict) and found.get("sha256") == digest_of(content) else None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync and rename; the file appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        finish(file, path)


def finish(file: Any, path: Path) -> None:
    """Sync an open file with a temporary name, and rename the file to `path`."""
    file.flush()
    os.fsync(file.fileno())
    os.rename(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTokens:
    """The tokens before and after each document."""

    begin: tuple[int, ...]
    end: tuple[int, ...]


def boundary_tokens(tokenizer: Tokenizer, *, bos: bool | None = None, eos: bool = True) -> BoundaryTokens:
    """The tokens to put before and after each document.

    bos: True begins documents with the tokenizer's BOS token, False with no token. None begins documents as prompts
        begin: with the tokens that the tokenizer puts before a prompt, if any.
    eos: whether documents end with the tokenizer's end token.
    Raises ValueError for bos=True where the tokenizer names no BOS token.
    """
    begin = tokenizer.begin
    if bos is False:
        begin = ()
    elif bos and not begin:
        if tokenizer.bos is None:
            raise ValueError(
                "--bos puts the tokenizer's bos_token before each document, and the tokenizer names none; "
                "leave out --bos"
            )
        begin = (tokenizer.bos,)
    return BoundaryTokens(begin=begin, end=(tokenizer.end,) if eos else ())
