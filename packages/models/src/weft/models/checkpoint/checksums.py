"""Writes and checks checksums.json in Weft's Hugging Face folders: a manifest, ignored by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.reshard.extension import as_process_mesh, axis_group, device_mesh

from ..safe_files import read_plain
from .manifest import CHECKSUMS, CONFIG, DamagedCheckpoint, Manifest, StoredFile, StoredPart, StoredTensor
from .shards import NAMES, positional_sum, read_header, write_safetensors
from .storage import Piece, check_sums

INDEX_FILE = "model.safetensors.index.json"


def write_with_checksums(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], tensors: Iterable[Tensor]
) -> tuple[StoredFile, dict[str, StoredTensor]]:
    """Writes a safetensors file by `write_safetensors`. Returns the manifest's entries: the file's, and by name the
    tensors'.
    """
    stored: dict[str, StoredTensor] = {}

    def add_checksums() -> Iterable[Tensor]:
        each = iter(tensors)  # `zip` would keep a tensor alive until the next is made
        for name, (dtype, sizes) in shapes.items():
            shape = tuple(sizes)
            starts = (0,) * len(shape)
            tensor = next(each)
            part = StoredPart(starts, shape, path.name, positional_sum(tensor, shape, starts))
            stored[name] = StoredTensor(NAMES[dtype], shape, (part,))
            yield tensor
            del tensor

    return write_safetensors(path, shapes, add_checksums()), stored


class FolderChecksums:
    """Verifies reads from a Hugging Face folder against the folder's checksums.json; does nothing without this file.

    The caller reads tensors through `of`, and calls `check` after the last read.
    Raises DamagedCheckpoint where config.json or the index was changed, and where a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = Manifest.read(folder, CHECKSUMS) if (folder / CHECKSUMS).is_file() else None
        self._pieces: dict[tuple[str, int, Piece], int] = {}
        for name in (CONFIG, INDEX_FILE):
            if (folder / name).is_file():
                self.check_content(name, read_plain(folder / name))

    def check_content(self, name: str, content: bytes) -> None:
        """Raises DamagedCheckpoint where a file without tensors was changed after the save."""
        if self._manifest is not None and name in self._manifest.files:
            self._manifest.check(self._folder, name, content)

    def check_header(self, filename: str) -> None:
        """Raises DamagedCheckpoint where the header of a safetensors file was changed after the save."""
        if self._manifest is not None and filename in self._manifest.files:
            self._manifest.check(self._folder, filename, read_header(self._folder / filename))

    def wrap(self, name: str, stored: Any) -> Any:
        """Wraps a tensor's safetensors slices; each read adds a checksum for `check` to compare.

        Raises DamagedCheckpoint where the tensor's dtype or shape in the file differs from checksums.json.
        """
        if self._manifest is None or name not in self._manifest.tensors:
            return stored
        recorded, actual = self._manifest.tensors[name], (stored.get_dtype(), tuple(stored.get_shape()))
        if actual != (recorded.dtype, recorded.shape):
            raise DamagedCheckpoint(
                f"{self._folder} has {name} as {actual}, and {CHECKSUMS} as {(recorded.dtype, recorded.shape)}; "
                f"{self._manifest.remedy}"
            )
        return _ChecksummedSlices(name, stored, self._pieces)

    def check(self, mesh: ProcessMesh | DeviceMesh | None, device: torch.device) -> None:
        """Raises DamagedCheckpoint where a tensor was changed after the save; only tensors read whole, by all ranks
        together, are checked.

        mesh: of the ranks that read the tensors together; None: this process alone.
        Communication: with a mesh and checksums, an all-gather of the checksums along each axis, on `device`.
        """
        if self._manifest is None:
            return
        pieces = self._pieces
        process_mesh = None if mesh is None or not dist.is_initialized() else as_process_mesh(mesh)
        if process_mesh is not None and process_mesh.coordinate(dist.get_rank()) is not None:
            groups = device_mesh(process_mesh, device.type)
            for axis in process_mesh.axis_names:
                of_ranks: list[dict[tuple[str, int, Piece], int]] = [{} for _ in range(process_mesh.axis_size(axis))]
                dist.all_gather_object(of_ranks, pieces, group=axis_group(groups, axis))
                pieces = {key: each for of_rank in of_ranks for key, each in of_rank.items()}
        check_sums(self._folder, self._manifest, pieces)


class _ChecksummedSlices:
    """A tensor's safetensors slices. Each read records a checksum in `pieces`."""

    def __init__(self, name: str, stored: Any, pieces: dict[tuple[str, int, Piece], int]) -> None:
        self._name, self._stored, self._pieces = name, stored, pieces

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._stored.get_dtype()
        return dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self._stored[part]
        starts = tuple(each.start for each in part)
        piece = starts, tuple(tensor.shape)
        self._pieces[self._name, 0, piece] = positional_sum(tensor, self.get_shape(), starts)
        return tensor
