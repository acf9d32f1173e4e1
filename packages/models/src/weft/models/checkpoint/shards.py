"""Safetensors files, written a tensor at a time, and sums by which a part of a tensor is known to be as it was written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..terminal import one_line
from .manifest import StoredFile

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNED = 64  # bytes, as torch's own memory: on a tensor that lies otherwise it adds up in another order
_LONGEST_HEADER = 100_000_000  # bytes, as the safetensors library reads them
_BLOCK = 1 << 20  # elements that are added up at once: their words take 8 MiB


def write_shard(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], tensors: Iterable[Tensor]
) -> StoredFile:
    """Writes a safetensors file, and returns when the disk has it.

    tensors: those of `shapes`, in its order, on any device; each is asked for when the one before is written.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors:
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next is made
        file.flush()
        os.fsync(file.fileno())
    assert path.stat().st_size == len(header) + end, "every tensor is of the shape that was said"
    return StoredFile(len(header) + end, hashlib.sha256(header).hexdigest())


def read_header(path: Path) -> bytes:
    """What stands before the tensors of a safetensors file, its length too; no more than such a file may have there."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))


def open_shard(path: Path, remedy: str) -> Any:
    """A safetensors file, opened by `safe_open` on the CPU.

    remedy: how the error ends.
    Raises ValueError for a file that is missing, no plain file, or in another format.
    """
    if not path.is_file():  # a pipe would block
        raise ValueError(f"{path} is {'no plain file' if path.exists() else 'missing'}; {remedy}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a safetensors file: {one_line(str(error))}; {remedy}") from None


def write_file(path: Path, content: bytes) -> StoredFile:
    """Writes a file, and returns when the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def write_documents(folder: Path, documents: Mapping[str, bytes]) -> dict[str, StoredFile]:
    """Writes files by name, of a folder within this one too, and returns when the disk has them."""
    files = {}
    for name, content in documents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        files[name] = write_file(path, content)
        if path.parent != folder:
            sync_folder(path.parent)
    return files


def sync_folder(folder: Path) -> None:
    """Returns when the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def positional_sum(values: Tensor, shape: Sequence[int], starts: Sequence[int]) -> int:
    """The sum over elements of w (2 i + 1) modulo 2**64, where w are an element's bits and i its index in a part of `shape`.

    values: of that part what begins at `starts`. So the sums of pieces that cover the part once add up to the sum of the part,
    and each of several readers sums up what it reads alone. A changed bit changes the sum, as 2 i + 1 is odd; that words were
    exchanged or lost shows since each counts by its place, as in Fletcher's checksum (1982).
    """
    if not values.numel():
        return 0
    sizes = tuple(values.shape) or (1,)
    whole, starts = tuple(shape) or (1,), tuple(starts) or (0,)
    if len(sizes) == 1:
        sizes, whole, starts = (1, *sizes), (1, *whole), (0, *starts)
    words = values.detach().cpu().contiguous().reshape(sizes[0], -1)
    words = words.view(_WORDS[values.element_size()])
    index = torch.zeros(sizes[1:], dtype=torch.int64)
    stride = 1
    for dim in range(len(sizes) - 1, 0, -1):
        along = (torch.arange(sizes[dim]) + starts[dim]) * stride
        index += along.reshape(-1, *[1] * (len(sizes) - 1 - dim))
        stride *= whole[dim]
    weights = 2 * index.reshape(-1) + 1
    rows = max(1, _BLOCK // max(1, weights.numel()))
    total = 0
    for first in range(0, sizes[0], rows):
        block = words[first : first + rows].long()
        before = (torch.arange(first, first + block.shape[0]) + starts[0]) * (2 * stride)
        total += int((block * weights).sum() + (block.sum(1) * before).sum())
    return total % 2**64
