"""The manifest of a checkpoint: which file holds which part of which tensor, and how each file is known to be whole.

It is JSON and is written last, so a folder that has one is complete. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"  # the manifest of a folder for transformers
RUN = "run.json"  # the run that it was saved by: step, seed, config, versions
CONFIG = "config.json"  # the model's, as Hugging Face writes it
FORMAT = "weft checkpoint"
VERSION = 1
MODEL, OPTIMIZER = "model.", "optimizer."  # how the names of tensors begin
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
        try:
            text = path.read_bytes().decode()
            value = json.loads(text)
            if value["format"] != FORMAT:
                raise ValueError
            if value["version"] > VERSION:
                raise _Newer
            found = cls(*_parsed(value["holds"]), name, value["holds"].get("optimizer"))
        except _Newer:
            raise ValueError(
                f"{path} is of version {value['version']}, and this Weft reads up to {VERSION}; install a newer one"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedCheckpoint(f"{path} was changed after it was written; {REMEDIES[name]}") from None
        if text != _as_written(value["holds"]):
            raise DamagedCheckpoint(f"{path} was changed after it was written; {REMEDIES[name]}")
        for each, file in found.files.items():
            if not (folder / each).is_file():
                raise DamagedCheckpoint(f"{folder / each} is missing, which {name} names; {found.remedy}")
            if (nbytes := (folder / each).stat().st_size) != file.nbytes:
                raise DamagedCheckpoint(f"{folder / each} has {nbytes} bytes of {file.nbytes}; {found.remedy}")
        return found

    def document(self, folder: Path, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint. Raises as `content`."""
        value: dict[str, Any] = json.loads(self.content(folder, name))
        return value

    def content(self, folder: Path, name: str) -> bytes:
        """A file of the checkpoint that holds no tensors. Raises DamagedCheckpoint where it is not as it was written."""
        content = (folder / name).read_bytes()
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


def _parsed(holds: Mapping[str, Any]) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    tensors = {}
    for name, tensor in holds["tensors"].items():
        parts = tuple(
            StoredPart(tuple(part["offsets"]), tuple(part["shape"]), part["file"], part["sum"])
            for part in tensor["parts"]
        )
        tensors[name] = StoredTensor(tensor["dtype"], tuple(tensor["shape"]), parts)
    return tensors, {name: StoredFile(**file) for name, file in holds["files"].items()}
