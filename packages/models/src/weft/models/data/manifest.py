"""The manifest of a prepared folder: what its shards hold, with their checksums. It is written last."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
TOKENIZER_FOLDER = "tokenizer"
FORMAT = "weft-tokens"
VERSION = 1
READ_BYTES = 1 << 20
ANEW = "remove the folder and prepare it again"  # what is whole by its manifest is not made again


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Some documents in two files: their tokens, and as 64-bit numbers where each ends.

    sha256: of both files. empty: documents without text; skipped: files that are no text; bad: records that are left out;
    passed: entries of folders that are no files. None of these is among the documents.
    """

    number: int
    tokens: int
    documents: int
    sha256: tuple[str, str]
    empty: int
    skipped: tuple[str, ...]
    bad: int
    prompt: str
    passed: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, str]:
        """Of the file of tokens, and of that of documents."""
        return f"tokens-{self.number:05}.bin", f"documents-{self.number:05}.bin"

    def check_sizes(self, folder: Path, dtype: str) -> None:
        """Raises ValueError where a file is missing, or of another size than what it holds of `dtype`."""
        width = int(dtype.removeprefix("uint")) // 8
        for name, size in zip(self.names, (self.tokens * width, self.documents * 8), strict=True):
            file = folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, and the manifest says {size}"
                raise ValueError(f"{file} {what}; copy it again, or {ANEW}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a prepared folder holds.

    dtype: of the tokens, little-endian: uint16 or uint32. tokenizer: its sha256. request: what was asked for, as JSON; its
    "tokenizer" are the SHA-256 of the tokenizer's files, by name.
    """

    dtype: str
    vocab_size: int
    end: int
    tokenizer: str
    shards: tuple[Shard, ...]
    request: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Writes the file, whole or not at all."""
        counts = {name: sum(getattr(shard, name) for shard in self.shards) for name in ("tokens", "documents", "empty")}
        content = {"format": FORMAT, "version": VERSION, **counts, **asdict(self)}
        content["sha256"] = digest_of(content)
        write_whole(folder / MANIFEST, (json.dumps(content, indent=1) + "\n").encode())


def digest_of(content: dict[str, Any]) -> str:
    """The SHA-256 of what a file of JSON says, but for this sum itself."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_shard(content: dict[str, Any]) -> Shard:
    """What `asdict` and JSON made of a shard."""
    several: dict[str, Any] = {
        name: tuple(content[name]) for name in ("sha256", "skipped", "passed") if name in content
    }
    return Shard(**{**content, **several})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises ValueError for a folder without one, one of a newer version or that was changed, and files of another size than it says.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise KeyError("format")
    except OSError as error:
        raise ValueError(
            f"{folder} holds no prepared data: {error.strerror} ({MANIFEST}); run weft data prepare"
        ) from None
    except (ValueError, KeyError, AttributeError):
        raise ValueError(f"{path} is not a manifest of prepared data; {ANEW}") from None
    version = content.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}; this reads version {VERSION}: update weft, or {ANEW}")
    if "sha256" in content and content.pop("sha256") != digest_of({"format": FORMAT, "version": version, **content}):
        raise ValueError(f"{path} was changed after it was written; copy it again, or {ANEW}")
    try:
        content = {name: content[name] for name in Manifest.__dataclass_fields__}
        manifest = Manifest(shards=tuple(map(read_shard, content.pop("shards"))), **content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks a part: {error}; {ANEW}") from None
    for shard in manifest.shards:
        shard.check_sizes(folder, manifest.dtype)
    return manifest


def verify(folder: Path) -> Manifest:
    """Reads every file of a prepared folder. Raises ValueError for one whose checksum is not the manifest's."""
    manifest = read_manifest(folder)
    check_tokenizer(folder, manifest)
    for shard in manifest.shards:
        check_shard(folder, shard)
    return manifest


def check_tokenizer(folder: Path, manifest: Manifest) -> None:
    """Reads the tokenizer's files. Raises ValueError where one is another than the manifest's, or more than these are there."""
    wanted: dict[str, str] = manifest.request["tokenizer"]
    for name, digest in wanted.items():
        _check_sum(folder / TOKENIZER_FOLDER / name, digest)
    for path in sorted((folder / TOKENIZER_FOLDER).iterdir()):
        if path.name not in wanted and not path.name.startswith("."):
            raise ValueError(f"{path} is none of what was prepared; remove it")


def check_shard(folder: Path, shard: Shard) -> None:
    """Reads both files of a shard. Raises ValueError where one's checksum is not the manifest's."""
    for name, wanted in zip(shard.names, shard.sha256, strict=True):
        _check_sum(folder / name, wanted)


def _check_sum(path: Path, wanted: str) -> None:
    if not path.is_file() or file_sha256(path) != wanted:
        raise ValueError(f"{path} is not what was prepared: its SHA-256 differs; copy it again, or {ANEW}")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with its own sum, whole or not at all."""
    write_whole(path, json.dumps({"sha256": digest_of(content), "holds": content}).encode())


def read_record(path: Path) -> dict[str, Any] | None:
    """What `write_record` wrote; None where there is no file, or it was changed."""
    try:
        found = json.loads(path.read_bytes())
        content: dict[str, Any] = found["holds"]
        return content if found["sha256"] == digest_of(content) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file aside, syncs it and gives it its name, so that it is there whole or not at all."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with partial.open("wb") as file:
        file.write(content)
        finish(file, path)


def finish(file: Any, path: Path) -> None:
    """Syncs an open file that was written aside, and gives it its name."""
    file.flush()
    os.fsync(file.fileno())
    os.rename(file.name, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
