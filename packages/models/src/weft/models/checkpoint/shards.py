"""Writes safetensors files tensor by tensor, opens them, and computes checksums of parts of tensors."""

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

STORED_DTYPES = {  # by the name of a dtype in a safetensors header
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
NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}  # the name of a dtype in a safetensors header
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The header is padded to a multiple of these bytes: the data of a mapped file then begins where torch could allocate
# memory. torch's sum over differently aligned memory has a different order and rounding.
ALIGNED = 64
_LONGEST_HEADER = 100_000_000  # bytes; the safetensors library refuses longer headers
_BLOCK = 1 << 20  # elements that `positional_sum` sums at once: 8 MiB of int64


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], tensors: Iterable[Tensor]
) -> StoredFile:
    """Writes a safetensors file; returns when the file is on disk.

    tensors: the tensors named in `shapes`, in the same order, on any device. Each is requested after the previous
        tensor was written.
    Returns the file's size, and the SHA-256 of the header only: the values are checked by `positional_sum`.
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
            del tensor  # freed before the next tensor is made
        file.flush()
        os.fsync(file.fileno())
    assert path.stat().st_size == len(header) + end, "every tensor has the shape given in `shapes`"
    return StoredFile(len(header) + end, hashlib.sha256(header).hexdigest())


def read_header(path: Path) -> bytes:
    """The header of a safetensors file, the 8 bytes of length included; reads no more than the format allows."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER))


def open_safetensors(path: Path, remedy: str) -> Any:
    """Opens a safetensors file on the CPU by `safe_open`.

    remedy: how the error ends.
    Raises ValueError for a missing path, for anything but a plain file, and for a different format.
    """
    if not path.is_file():  # opening a pipe would block
        raise ValueError(f"{path} is {'no plain file' if path.exists() else 'missing'}; {remedy}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a safetensors file: {one_line(str(error))}; {remedy}") from None


def write_file(path: Path, content: bytes) -> StoredFile:
    """Writes a file; returns when the file is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(len(content), hashlib.sha256(content).hexdigest())


def write_documents(folder: Path, documents: Mapping[str, bytes]) -> dict[str, StoredFile]:
    """Writes files by name, also into a direct subfolder; returns when all are on disk."""
    files = {}
    for name, content in documents.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        files[name] = write_file(path, content)
        if path.parent != folder:
            sync_folder(path.parent)
    return files


def sync_folder(folder: Path) -> None:
    """Returns when the folder's entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def positional_sum(values: Tensor, shape: Sequence[int], starts: Sequence[int]) -> int:
    """A checksum of a piece of a stored part of a tensor: the sum over elements of w * (2 i + 1), modulo 2**64.

    A part is a block of a tensor, stored as a tensor of a file. A piece is a block of a part, as read by a rank; a
    writer sums the whole part.
    w: an element's bits, as an integer. i: the element's flat index in the part.
    values: the piece. shape: of the part. starts: where the piece begins in the part.
    The sums of pieces that cover the part exactly once add up to the part's sum, so several readers can each sum a
    piece. A changed bit always changes the sum, because 2 i + 1 is odd. Exchanged or lost elements show because each
    element is weighted by position, as in Fletcher's checksum (1982).
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
        row_weights = (torch.arange(first, first + block.shape[0]) + starts[0]) * (2 * stride)
        total += int((block * weights).sum() + (block.sum(1) * row_weights).sum())
    return total % 2**64
