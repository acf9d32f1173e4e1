"""Storage for torch's distributed checkpoint (DCP): a folder of safetensors files and JSON.

A folder is written under a temporary name, and every file is synced. The manifest is written last; then the folder is
renamed. A folder under its final name is therefore complete, whenever the process is stopped.
Reading never runs code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..terminal import one_line
from .manifest import MANIFEST, DamagedCheckpoint, Manifest, StoredFile, StoredPart, StoredTensor, key_of
from .shards import (
    NAMES,
    STORED_DTYPES,
    open_safetensors,
    positional_sum,
    read_header,
    sync_folder,
    write_documents,
    write_file,
    write_safetensors,
)

# A slice of a stored part: offsets, counted from the part's beginning, and shape.
Piece = tuple[tuple[int, ...], tuple[int, ...]]


class FolderWriter(StorageWriter):
    """Writes a checkpoint into `folder`: one safetensors file for each rank with something to write, and `documents`.

    Made by `Snapshot.write` on every rank, for torch's `save`, which calls the methods. Rank 0 alone runs
    `prepare_global_plan`, which names each rank's file, and `finish`. In between each rank runs `write_data`.
    documents: contents by file name, written by rank 0.
    optimizer: the manifest's entry, from `describe_optimizer`; None for a checkpoint without optimizer state.
    torch's `save` raises a CheckpointException with the writer's errors: ValueError where the folder exists, OSError
    where writing fails.
    """

    def __init__(
        self, folder: Path, documents: Mapping[str, bytes], optimizer: Mapping[str, Any] | None = None
    ) -> None:
        self._folder, self._documents, self._optimizer = folder, documents, optimizer
        self._partial = partial_path(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        begin_folder(self._folder, self._partial)
        return [replace(plan, storage_data=f"part-{number:05}.safetensors") for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write(plan.storage_data, plan.items, planner) if plan.items else [])
        return written

    def _write(self, filename: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        sums: list[int] = []

        def values() -> Iterator[Tensor]:
            for item in items:
                data = planner.resolve_data(item)
                assert isinstance(data, Tensor), "a checkpoint holds tensors alone"
                sums.append(positional_sum(data, data.shape, [0] * data.ndim))
                yield data

        shapes = {
            key_of(item.index.fqn, _offsets(item)): (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
            for item in items
            if item.tensor_data is not None
        }
        file = write_safetensors(self._partial / filename, shapes, values())
        return [
            WriteResult(item.index, item.tensor_storage_size() or 0, (filename, file, each))
            for item, each in zip(items, sums, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, StoredFile] = {}
        parts: dict[str, list[StoredPart]] = {}
        for result in (each for of_rank in results for each in of_rank):
            filename, file, total = result.storage_data
            files[filename] = file
            stored = metadata.state_dict_metadata[result.index.fqn]
            assert isinstance(stored, TensorStorageMetadata) and result.index.index is not None, "as planned"
            chunk = stored.chunks[result.index.index]
            part = StoredPart(tuple(chunk.offsets), tuple(chunk.sizes), filename, total)
            parts.setdefault(result.index.fqn, []).append(part)
        tensors = {
            name: StoredTensor(NAMES[stored.properties.dtype], tuple(stored.size), tuple(parts.get(name, ())))
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        finish_folder(self._folder, tensors, files, self._documents, self._optimizer)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def partial_path(folder: Path) -> Path:
    """The temporary path of a folder being written, the same in every process: for checkpoints, and for `convert`."""
    return folder.with_name(f".{folder.name}.partial")


def own_partial_path(folder: Path) -> Path:
    """`partial_path` with this process's id (PID), for a folder that rank 0 alone writes.

    Called by `save_pretrained` and `save_lora`.
    Two programs writing the same `folder` at once then share no file.
    """
    return folder.with_name(f"{partial_path(folder).name}-{os.getpid()}")


def begin_folder(folder: Path, temporary: Path) -> None:
    """Makes the temporary folder, after removing an earlier one. Called by a single process before any file.

    temporary: from `partial_path` or `own_partial_path`.
    Raises ValueError where `folder` exists, OSError as `mkdir`.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; give another folder, or remove it")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
    temporary.mkdir(parents=True)


def finish_folder(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    files: Mapping[str, StoredFile],
    documents: Mapping[str, bytes],
    optimizer: Mapping[str, Any] | None = None,
) -> None:
    """Writes the documents and the manifest into `partial_path(folder)`, and renames the temporary folder to `folder`.

    Called when all tensors are written, by `FolderWriter.finish` on rank 0 and by `convert`. `begin_folder` made the
    temporary folder. Returns when everything is on disk.
    """
    written = write_documents(partial_path(folder), documents)
    manifest = Manifest(tensors, {**files, **written}, optimizer=optimizer)
    write_file(partial_path(folder) / MANIFEST, manifest.text().encode())
    sync_folder(partial_path(folder))
    partial_path(folder).rename(folder)
    sync_folder(folder.parent)


class FolderReader(StorageReader):
    """Reads pieces of a checkpoint's tensors and records their checksums, for `check_sums` to compare.

    Made by `fill_from` on every rank, for torch's `load`, which calls `read_metadata` and `read_data`. A process alone
    calls `read_into`.
    sums_of_pieces: (tensor, number of its part, piece) -> checksum of the piece.
    nbytes: bytes read by this rank from safetensors files, headers included.
    Raises ValueError and DamagedCheckpoint as `Manifest.read`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, Manifest.read(folder)
        self.sums_of_pieces: dict[tuple[str, int, Piece], int] = {}
        self.nbytes = 0
        self._open: dict[str, Any] = {}
        self._files = ExitStack()

    def __enter__(self) -> FolderReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()
        self._open.clear()

    def read(self, name: str, number: int, piece: Piece) -> Tensor:
        """Read a piece of the `number`-th part of a tensor.

        Raises DamagedCheckpoint where the file's header was changed, or contradicts the manifest.
        """
        whole = self.manifest.tensors[name]
        part = whole.parts[number]
        slices = tuple(slice(start, start + size) for start, size in zip(*piece, strict=True))
        try:
            stored = self._file(part.file).get_slice(part.key(name))
            if (found := (stored.get_dtype(), tuple(stored.get_shape()))) != (whole.dtype, part.shape):
                raise DamagedCheckpoint(
                    f"{self.folder / part.file} has {part.key(name)} as {found}, and {self.manifest.name} as "
                    f"{(whole.dtype, part.shape)}; {self.manifest.remedy}"
                )
            tensor: Tensor = stored[slices] if slices else self._file(part.file).get_tensor(part.key(name))
        except SafetensorError as error:
            raise DamagedCheckpoint(
                f"{self.folder / part.file} cannot be read: {one_line(str(error))}; {self.manifest.remedy}"
            ) from None
        self.nbytes += tensor.nbytes
        self.sums_of_pieces[name, number, piece] = positional_sum(tensor, part.shape, piece[0])
        return tensor

    def read_into(self, name: str, whole: Tensor) -> None:
        """Read a whole tensor into `whole`, part by part, and verify the checksums. whole: of the stored shape.

        Called by a process alone: by `convert`, and for the loss of a single process.
        Empties `sums_of_pieces`: the checksums of earlier calls of `read` are verified too, and forgotten.
        Raises DamagedCheckpoint where the tensor was changed after the save.
        """
        stored = self.manifest.tensors[name]
        assert sum(torch.Size(part.shape).numel() for part in stored.parts) == whole.numel(), "the manifest was checked"
        for number, part in enumerate(stored.parts):
            place = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.shape, strict=True))
            whole[place] = self.read(name, number, ((0,) * len(part.shape), part.shape))
        check_sums(self.folder, self.manifest, self.sums_of_pieces)
        self.sums_of_pieces.clear()

    def _file(self, filename: str) -> Any:
        if filename not in self._open:
            header = read_header(self.folder / filename)
            self.nbytes += len(header)
            self.manifest.check(self.folder, filename, header)
            try:
                file = open_safetensors(self.folder / filename, self.manifest.remedy)
            except ValueError as error:
                raise DamagedCheckpoint(str(error)) from None
            self._open[filename] = self._files.enter_context(file)
        return self._open[filename]

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=STORED_DTYPES[stored.dtype]),
                    size=torch.Size(stored.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in stored.parts
                    ],
                )
                for name, stored in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            number = item.storage_index.index
            assert number is not None, "DCP numbers the chunks that read_metadata lists"
            piece = tuple(item.storage_offsets), tuple(item.lengths)
            target = planner.resolve_tensor(item)
            target.copy_(self.read(item.storage_index.fqn, number, piece))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def check_sums(folder: Path, manifest: Manifest, pieces: Mapping[tuple[str, int, Piece], int]) -> None:
    """Raises DamagedCheckpoint where a stored part was changed after writing, if all of the part was read.

    Called after reading: on rank 0 for a checkpoint, in `FolderReader.read_into`, and for Hugging Face folders.
    pieces: (tensor, number of its part, piece) -> checksum, from all reading ranks. A part read only partially is
    skipped: the checksum of the whole is unknown.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for (name, number, (_, shape)), total in pieces.items():
        entry = found.setdefault((name, number), [0, 0])
        entry[0] += torch.Size(shape).numel()
        entry[1] += total
    for (name, number), (count, total) in found.items():
        part = manifest.tensors[name].parts[number]
        if count == torch.Size(part.shape).numel() and total % 2**64 != part.sum:
            raise DamagedCheckpoint(
                f"{folder / part.file} was changed after it was written: {part.key(name)} has another checksum; "
                f"{manifest.remedy}"
            )


def _offsets(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None, "a checkpoint holds tensors alone"
    return tuple(item.tensor_data.chunk.offsets)
