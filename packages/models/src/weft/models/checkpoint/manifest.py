"""The manifest of a checkpoint: which file holds which part of which tensor, and how each file is known to be whole.

It is JSON and is written last, so a folder that has one is complete. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..documents import as_type, check_plain_name, parse_json, read_plain
from .tiling import uncovered

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"  # the manifest of a folder for transformers
RUN = "run.json"  # the run that it was saved by: step, seed, config, versions
CONFIG = "config.json"  # the model's, as Hugging Face writes it
FORMAT = "weft checkpoint"
VERSION = 1
MODEL, OPTIMIZER = "model.", "optimizer."  # how the names of tensors begin
# Bytes of an element, by the names that safetensors has for the dtypes that are written here.
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
REMEDIES = {
    MANIFEST: "resume from an older checkpoint, or copy this one again",
    CHECKSUMS: f"copy it again, or, where it is meant to be another, remove {CHECKSUMS}",
}


class DamagedCheckpoint(ValueError):
    """A checkpoint is not as it was written; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, one tensor of a safetensors file. sum: as of `positional_sum`."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    sum: int

    def key(self, name: str) -> str:
        """Its name in the file."""
        return key_of(name, self.offsets)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its parts, which cover it once. dtype: as safetensors calls it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """nbytes: its size. sha256: of all of it, or of what stands before the tensors of a safetensors file."""

    nbytes: int
    sha256: str


def key_of(name: str, offsets: tuple[int, ...]) -> str:
    """What the part of a tensor that begins at `offsets` is called in its file: "model.embed.weight[0,64]"."""
    return f"{name}[{','.join(map(str, offsets))}]"


def as_document(value: Mapping[str, Any]) -> bytes:
    """A JSON file's content."""
    return (json.dumps(value, indent=2) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. name: of its file. optimizer: what is said of the optimizer beside its state; None of older ones."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    name: str = MANIFEST
    optimizer: Mapping[str, Any] | None = None

    @property
    def remedy(self) -> str:
        """For files that are not as they were written."""
        return REMEDIES[self.name]

    def text(self) -> str:
        """As it is written. The digest is of what stands under "holds", as it is written there."""
        holds: dict[str, Any] = {
            "tensors": {name: asdict(tensor) for name, tensor in sorted(self.tensors.items())},
            "files": {name: asdict(file) for name, file in sorted(self.files.items())},
        }
        if self.optimizer is not None:
            holds["optimizer"] = dict(self.optimizer)
        return _as_written(holds)

    @classmethod
    def read(cls, folder: Path, name: str = MANIFEST) -> Manifest:
        """The manifest of a checkpoint, whose files are there in their sizes.

        name: CHECKSUMS, of a folder for transformers.
        Raises ValueError for one of a newer version, DamagedCheckpoint for a folder that has none, or is not whole.
        """
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(
                f"{folder} is no complete checkpoint: it has no {name}, which is written last; give another"
            )
        text = read_plain(path)
        try:
            value = parse_json(text, str(path), REMEDIES[name])
            if value.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            version = as_type(int, value.get("version"), "version")
            if version > VERSION:
                raise _Newer
            holds = as_type(_Holds, value.get("holds"), "holds")
            _check(holds)
            if text != _as_written(value["holds"]).encode():
                raise ValueError("its digest is of another content")
        except _Newer:
            raise ValueError(
                f"{path} is of version {version}, and this Weft reads up to {VERSION}; install a newer one"
            ) from None
        except ValueError as error:
            raise DamagedCheckpoint(f"{path} was changed after it was written: {error}; {REMEDIES[name]}") from None
        optimizer = None if holds.optimizer is None else asdict(holds.optimizer)
        found = cls(holds.tensors, holds.files, name, optimizer)
        for each, file in found.files.items():
            if not (folder / each).is_file():
                raise DamagedCheckpoint(f"{folder / each} is missing, which {name} names; {found.remedy}")
            if (nbytes := (folder / each).stat().st_size) != file.nbytes:
                raise DamagedCheckpoint(f"{folder / each} has {nbytes} bytes of {file.nbytes}; {found.remedy}")
        return found

    def document(self, folder: Path, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint. Raises as `content`, and DamagedCheckpoint for a file that is not JSON."""
        content = self.content(folder, name)
        try:
            return parse_json(content, str(folder / name), self.remedy)
        except ValueError as error:
            raise DamagedCheckpoint(str(error)) from None

    def content(self, folder: Path, name: str) -> bytes:
        """A file of the checkpoint that holds no tensors. Raises DamagedCheckpoint where it is not as it was written."""
        content = read_plain(folder / name)
        self.check(folder, name, content)
        return content

    def check_documents(self, folder: Path) -> None:
        """Raises DamagedCheckpoint unless all files that hold no tensors are as they were written."""
        for name in self.files.keys() - {part.file for tensor in self.tensors.values() for part in tensor.parts}:
            self.content(folder, name)

    def check(self, folder: Path, name: str, content: bytes) -> None:
        """Raises DamagedCheckpoint unless that is what was written of a file: all, or what stands before the tensors."""
        if hashlib.sha256(content).hexdigest() != self.files[name].sha256:
            raise DamagedCheckpoint(f"{folder / name} was changed after it was written; {self.remedy}")


def find_manifest(folder: Path) -> Manifest | None:
    """That of a checkpoint, or of a folder for transformers that Weft wrote; None of another folder. Raises as `Manifest.read`."""
    return next((Manifest.read(folder, name) for name in REMEDIES if (folder / name).is_file()), None)


class _Newer(Exception):
    pass


def _as_written(holds: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(holds).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest, "holds": holds}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class _Holds:
    """What a manifest's digest is of."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    optimizer: _Optimizer | None = None


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """What is said of an optimizer: its class, and its groups of parameters."""

    kind: str
    groups: int | None


def _check(holds: _Holds) -> None:
    """Raises ValueError unless the files have plain names, and the parts of each tensor cover it once, within files that are listed."""
    for name, file in holds.files.items():
        check_plain_name(name, "it")
        if file.nbytes < 0:
            raise ValueError(f"{name} has {file.nbytes} bytes")
    for name, tensor in holds.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{name} has the dtype {tensor.dtype!r}, which is none of {', '.join(ITEM_BYTES)}")
        if wrong := uncovered(tensor.shape, [(part.offsets, part.shape) for part in tensor.parts]):
            raise ValueError(f"{name}: {wrong}")
        for part in tensor.parts:
            if part.file not in holds.files:
                raise ValueError(f"{name} lies in {part.file!r}, which is none of its files")
            if math.prod(part.shape) * ITEM_BYTES[tensor.dtype] > holds.files[part.file].nbytes:
                raise ValueError(f"a part of {name} has more bytes than {part.file}, which holds it")
            if not 0 <= part.sum < 2**64:
                raise ValueError(f"{name} has the sum {part.sum}, which is none of 64 bits")
