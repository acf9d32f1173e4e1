"""The manifest of a checkpoint: the tensors, which file holds which part of each, and the checksums of all files.

The manifest is JSON and is written last: a folder with a manifest is complete. Reading a manifest also checks that the
parts of each tensor cover the tensor exactly once. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..safe_files import as_type, check_plain_name, parse_json, read_plain

# The most elements of a tensor: torch counts elements in 64 bits.
_MOST_ELEMENTS = 2**62
_MOST_DIMS = 64  # torch's own bound
# The most dims cut by the parts of a tensor. Each axis of a mesh cuts a single dim, and meshes have fewer axes.
_MOST_CUT = 8
Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, and a shape

MANIFEST = "manifest.json"
CHECKSUMS = "checksums.json"  # the name of the manifest in a Hugging Face folder
RUN = "run.json"  # facts of the run behind the checkpoint: step, seed, config, versions
CONFIG = "config.json"  # the model's config in Hugging Face's format
ADAPTERS = "adapters.json"  # rank, alpha, dropout and targets of the model's LoRA adapters, if the model has some
FORMAT = "weft checkpoint"
VERSION = 1
MODEL, OPTIMIZER = "model.", "optimizer."  # prefixes of tensor names
# Bytes of an element, by safetensors' names of the dtypes.
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
    """A checkpoint, or a file of the checkpoint, was changed after the save; the message names the file."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor, stored as a safetensors tensor."""

    offsets: tuple[int, ...]  # where the part begins in the tensor
    shape: tuple[int, ...]
    file: str
    sum: int  # checksum of the part's values, by `positional_sum` in shards.py

    def key(self, name: str) -> str:
        """The part's name in the safetensors file. name: the tensor's name."""
        return key_of(name, self.offsets)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its parts, which cover each element exactly once."""

    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the folder."""

    nbytes: int
    sha256: str  # of the whole file; for a safetensors file, of the header


def key_of(name: str, offsets: tuple[int, ...]) -> str:
    """The name under which a safetensors file holds a part of tensor `name`: "model.embed.weight[0,64]".

    offsets: where the part begins in the tensor.
    """
    return f"{name}[{','.join(map(str, offsets))}]"


def as_document(value: Mapping[str, Any]) -> bytes:
    """`value` as the bytes of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint, or of a Hugging Face folder that Weft wrote."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    name: str = MANIFEST  # of the manifest's own file: MANIFEST or CHECKSUMS
    # From `describe_optimizer`; None without an optimizer and in older checkpoints.
    optimizer: Mapping[str, Any] | None = None

    @property
    def remedy(self) -> str:
        """How an error about a changed file ends: the user's next step."""
        return REMEDIES[self.name]

    def text(self) -> str:
        """The manifest as JSON. The field "sha256" is the digest of the JSON under "holds"."""
        holds: dict[str, Any] = {
            "tensors": {name: asdict(tensor) for name, tensor in sorted(self.tensors.items())},
            "files": {name: asdict(file) for name, file in sorted(self.files.items())},
        }
        if self.optimizer is not None:
            holds["optimizer"] = dict(self.optimizer)
        return _to_json(holds)

    @classmethod
    def read(cls, folder: Path, name: str = MANIFEST) -> Manifest:
        """Reads and checks the manifest of a folder; the listed files must exist with their sizes.

        name: CHECKSUMS for a Hugging Face folder.
        Raises ValueError for a manifest of a newer version; DamagedCheckpoint for an absent or changed manifest and
        for an incomplete folder.
        """
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(
                f"{folder} is no complete checkpoint: it has no {name}, which a save writes last; give another folder"
            )
        text = read_plain(path)
        try:
            value = parse_json(text, str(path), REMEDIES[name])
            if value.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            version = as_type(int, value.get("version"), "version")
            if version > VERSION:
                raise _NewerVersion
            holds = as_type(_Content, value.get("holds"), "holds")
            _check(holds)
            if text != _to_json(value["holds"]).encode():
                raise ValueError("its sha256 does not match its content")
        except _NewerVersion:
            raise ValueError(
                f"{path} has version {version}, and this Weft reads up to version {VERSION}; install a newer Weft"
            ) from None
        except ValueError as error:
            raise DamagedCheckpoint(f"{path} was changed after it was written: {error}; {REMEDIES[name]}") from None
        optimizer = None if holds.optimizer is None else asdict(holds.optimizer)
        found = cls(holds.tensors, holds.files, name, optimizer)
        for each, file in found.files.items():
            if not (folder / each).is_file():
                raise DamagedCheckpoint(f"{folder / each} is missing, which {name} names; {found.remedy}")
            if (nbytes := (folder / each).stat().st_size) != file.nbytes:
                raise DamagedCheckpoint(f"{folder / each} has {nbytes} bytes instead of {file.nbytes}; {found.remedy}")
        return found

    def document(self, folder: Path, name: str) -> dict[str, Any]:
        """A JSON file of the folder, parsed. Raises DamagedCheckpoint where the file was changed, or is not JSON."""
        content = self.content(folder, name)
        try:
            return parse_json(content, str(folder / name), self.remedy)
        except ValueError as error:
            raise DamagedCheckpoint(str(error)) from None

    def content(self, folder: Path, name: str) -> bytes:
        """The bytes of a file without tensors. Raises DamagedCheckpoint where the file was changed."""
        content = read_plain(folder / name)
        self.check(folder, name, content)
        return content

    def check_documents(self, folder: Path) -> None:
        """Raises DamagedCheckpoint where any file without tensors was changed after the save."""
        for name in self.files.keys() - {part.file for tensor in self.tensors.values() for part in tensor.parts}:
            self.content(folder, name)

    def check(self, folder: Path, name: str, content: bytes) -> None:
        """Raises DamagedCheckpoint unless `content` (the header, for a safetensors file) has the recorded digest."""
        if hashlib.sha256(content).hexdigest() != self.files[name].sha256:
            raise DamagedCheckpoint(f"{folder / name} was changed after it was written; {self.remedy}")


def find_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint, or of a Hugging Face folder that Weft wrote; None for a folder without a manifest.

    Raises ValueError and DamagedCheckpoint as `Manifest.read`.
    """
    return next((Manifest.read(folder, name) for name in REMEDIES if (folder / name).is_file()), None)


class _NewerVersion(Exception):
    pass


def _to_json(holds: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(holds).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest, "holds": holds}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class _Content:
    """The part of a manifest covered by the sha256."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    optimizer: _Optimizer | None = None


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer's class name and number of parameter groups, see `describe_optimizer`."""

    kind: str
    groups: int | None


def _check(holds: _Content) -> None:
    """Raises ValueError unless file names are plain, and each tensor is covered once by parts in listed files."""
    for name, file in holds.files.items():
        check_plain_name(name, "it")
        if file.nbytes < 0:
            raise ValueError(f"{name} has {file.nbytes} bytes")
    for name, tensor in holds.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{name} has the dtype {tensor.dtype!r}, which is none of {', '.join(ITEM_BYTES)}")
        if error_text := coverage_error(tensor.shape, [(part.offsets, part.shape) for part in tensor.parts]):
            raise ValueError(f"{name}: {error_text}")
        for part in tensor.parts:
            if part.file not in holds.files:
                raise ValueError(f"{name} is in {part.file!r}, which is not among the listed files")
            if math.prod(part.shape) * ITEM_BYTES[tensor.dtype] > holds.files[part.file].nbytes:
                raise ValueError(f"a part of {name} has more bytes than {part.file}, which holds it")
            if not 0 <= part.sum < 2**64:
                raise ValueError(f"{name} has the sum {part.sum}, which is not a number of 64 bits")


def coverage_error(shape: tuple[int, ...], parts: Sequence[Region]) -> str | None:
    """The reason, in words, why the parts do not cover a tensor of this shape exactly once; None if the parts do.

    Method: give each box a signed count at each corner. The counts of the parts add up to the counts of the whole
    tensor exactly if the parts cover each element once, because a box's corners determine the indicator function
    (mixed differences over all dims lose nothing of a function with bounded support). This takes 2**d steps a part,
    for parts that cut d dims.
    """
    if not _is_size(shape):
        return f"its shape {_format_sizes(shape)} is not the shape of a tensor"
    for offsets, sizes in parts:
        part_text = f"the part at {_format_sizes(offsets)} of shape {_format_sizes(sizes)}"
        if len(offsets) != len(shape) or len(sizes) != len(shape) or not _is_size(sizes):
            return f"{part_text} does not fit a tensor of shape {_format_sizes(shape)}"
        if any(not 0 <= start <= whole - size for start, size, whole in zip(offsets, sizes, shape, strict=True)):
            return f"{part_text} reaches beyond the shape {_format_sizes(shape)}"
    if not math.prod(shape):
        return None
    cut = [dim for dim, whole in enumerate(shape) if any(sizes[dim] != whole for _, sizes in parts)]
    if len(cut) > _MOST_CUT:
        return f"its parts cut {len(cut)} dims, and {_MOST_CUT} may be cut at most"
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offsets, sizes) in [(-1, ((0,) * len(shape), shape)), *((1, part) for part in parts)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    if any(corners.values()):
        return f"its {len(parts)} parts do not cover the shape {_format_sizes(shape)} exactly once"
    return None


def _is_size(shape: Sequence[int]) -> bool:
    if len(shape) > _MOST_DIMS or not all(0 <= size <= _MOST_ELEMENTS for size in shape):
        return False
    return math.prod(max(size, 1) for size in shape) <= _MOST_ELEMENTS


def _format_sizes(sizes: Sequence[int]) -> str:
    listed = [str(size) if abs(size) < 10**20 else "…" for size in sizes[:8]]
    return f"[{', '.join([*listed, *['…'] * (len(sizes) > 8)])}]"
