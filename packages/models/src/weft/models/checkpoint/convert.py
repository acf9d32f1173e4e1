"""Converts checkpoints of a run to Hugging Face folders and back, tensor by tensor."""

from __future__ import annotations

import fcntl
import os
import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.tokenizer import CHAT_FOLDER, FILES
from ..families import make_model
from ..safe_files import links_outside
from .companions import GENERATION_FILE, Companions
from .configs import check_layers, is_adapter_folder, read_config, weights_of
from .fields import StoredGroup, common_dtype
from .huggingface import SHARD_BYTES, finish_pretrained, from_pretrained, group_into_files, save_pretrained
from .manifest import (
    ADAPTERS,
    CHECKSUMS,
    CONFIG,
    MANIFEST,
    MODEL,
    RUN,
    Manifest,
    StoredFile,
    StoredPart,
    StoredTensor,
    as_document,
    key_of,
)
from .shards import NAMES, STORED_DTYPES, positional_sum, sync_folder, write_safetensors
from .states import check_model
from .storage import FolderReader, begin_folder, finish_folder, partial_path
from .tensors import (
    INDEX_FILE,
    FolderChecksums,
    check_tensors,
    open_tensors,
    read_parameter,
    weight_files,
    write_with_checksums,
)


def convert(source: Path, target: Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Converts a checkpoint of a run to a Hugging Face folder, or a Hugging Face folder to a checkpoint.

    Memory holds a single written tensor and the tensor's source values at a time. A converted checkpoint has no
    optimizer state and is at step 0: a resumed run starts with the converted weights. The tokenizer's files,
    generation_config.json and the token ids in config.json are carried over.
    LoRA adapters, in a checkpoint or in a folder of their own, are folded into the weights of a Hugging Face folder;
    the model is then in memory.
    shard_bytes: the largest size of a weights file, unless a single tensor is larger.
    Returns the names of the source's files left behind, for example code.
    Raises ValueError for a source that is incomplete or of neither kind, and for a target already existing or being
    made by another process; OSError where the target cannot be written.
    """
    if is_adapter_folder(source) or ((source / MANIFEST).is_file() and ADAPTERS in Manifest.read(source).files):
        save_pretrained(from_pretrained(source), target, shard_bytes=shard_bytes)
        return []
    if (source / MANIFEST).is_file():
        return _to_huggingface(source, target, shard_bytes)
    return _to_checkpoint(source, target, shard_bytes)


def copy_folder(source: Path, target: Path) -> None:
    """Copies the files of a Hugging Face folder. The target appears complete or not at all.

    Raises ValueError for a target already existing or being made by another process, and for a link out of the source,
    a pipe or a folder in the source; OSError where the target cannot be written.
    """
    paths = sorted(source.iterdir())
    for path in paths:
        if not path.is_file() or links_outside(path):
            raise ValueError(f"{path} is no plain file of its folder; put a copy in its place, or remove it")
    with _partial_folder(target):
        for path in paths:
            with path.open("rb") as source_file, (partial_path(target) / path.name).open("wb") as target_file:
                shutil.copyfileobj(source_file, target_file)
                target_file.flush()
                os.fsync(target_file.fileno())
        sync_folder(partial_path(target))
        partial_path(target).rename(target)
        sync_folder(target.parent)


@contextmanager
def _partial_folder(target: Path) -> Iterator[None]:
    """Makes and locks the target's partial folder, and removes the folder where the body fails.

    Raises ValueError where the target exists, or is being made by another process.
    """
    if partial_path(target).exists():
        os.close(_lock(target))
    begin_folder(target, partial_path(target))
    descriptor = _lock(target)
    try:
        yield
    except BaseException:
        shutil.rmtree(partial_path(target), ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def _lock(target: Path) -> int:
    descriptor = os.open(partial_path(target), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{target} is being made by another process; wait for it, or give another OUT") from None
    return descriptor


def _to_huggingface(source: Path, target: Path, shard_bytes: int) -> list[str]:
    with ExitStack() as opened:
        reader = opened.enter_context(FolderReader(source))
        if CONFIG not in reader.manifest.files:
            raise ValueError(f"{source} is of a model of no family, which has no Hugging Face form")
        config = reader.manifest.document(source, CONFIG)
        weights, model = _make_model(source, config, reader.manifest.tensors)
        check_model(model, reader)
        stored = {name: reader.manifest.tensors[f"{MODEL}{name}"] for name, _ in model.named_parameters()}
        dtypes = {name: STORED_DTYPES[each.dtype] for name, each in stored.items()}
        # On the meta device: only the sizes are used.
        parameters = {name: parameter.to(dtypes[name]) for name, parameter in model.named_parameters()}
        opened.enter_context(_partial_folder(target))
        files: dict[str, StoredFile] = {}
        stored_tensors: dict[str, StoredTensor] = {}
        for filename, groups in group_into_files(parameters, weights, shard_bytes).items():
            shapes = {
                tensor: (
                    common_dtype(dtypes[name] for name in group.parameters),
                    weights.stored(group.parameters[0]).shape(tuple(parameters[group.parameters[0]].shape)),
                )
                for group in groups
                for tensor in group.tensors
            }

            def values(
                groups: Iterable[StoredGroup] = groups,
                shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = shapes,
            ) -> Iterator[Tensor]:
                for group in groups:
                    dtype, shape = shapes[group.tensors[0]]
                    if weights.stored(group.parameters[0]).stacked:
                        stack = torch.empty(parameters[group.parameters[0]].shape, dtype=dtype)
                        reader.read_into(f"{MODEL}{group.parameters[0]}", stack)
                        yield from stack
                        del stack  # freed before the next tensor is made
                        continue
                    whole = torch.empty(shape, dtype=dtype)
                    for name in group.parameters:
                        place = weights.stored(name).place(whole)
                        part = place if dtypes[name] == dtype else torch.empty_like(place, dtype=dtypes[name])
                        reader.read_into(f"{MODEL}{name}", part)
                        if part is not place:
                            place.copy_(part)
                    yield whole
                    del whole  # freed before the next tensor is made

            files[filename], found = write_with_checksums(partial_path(target) / filename, shapes, values())
            stored_tensors.update(found)
        companions = Companions.saved(source, config, reader.manifest)
        manifest = Manifest(stored_tensors, files, CHECKSUMS)
        finish_pretrained(config, manifest, companions.files, partial_path(target), target)
        return _unknown_files(source, {MANIFEST, *reader.manifest.files})


def _to_checkpoint(source: Path, target: Path, shard_bytes: int) -> list[str]:
    config = read_config(source)
    prefix, sums = weights_of(source, config).PREFIX, FolderChecksums(source)
    with ExitStack() as opened:
        tensors = open_tensors(source, opened, prefix, sums)
        weights, model = _make_model(source, config, tensors)
        check_tensors(model, tensors, source, weights)
        opened.enter_context(_partial_folder(target))
        files: dict[str, StoredFile] = {}
        found: dict[str, StoredTensor] = {}
        for filename, names in _assign_files(model, shard_bytes).items():
            shapes = {
                key_of(f"{MODEL}{name}", (0,) * len(shape)): (
                    common_dtype(
                        STORED_DTYPES[tensors[each]().get_dtype()] for each in weights.stored(name).names(shape)
                    ),
                    shape,
                )
                for name, shape in names.items()
            }

            def values(filename: str = filename, names: Mapping[str, tuple[int, ...]] = names) -> Iterator[Tensor]:
                for name, shape in names.items():
                    starts = (0,) * len(shape)
                    whole = read_parameter(weights.stored(name), tensors, tuple(map(slice, starts, shape)), shape)
                    part = StoredPart(starts, shape, filename, positional_sum(whole, shape, starts))
                    found[f"{MODEL}{name}"] = StoredTensor(NAMES[whole.dtype], shape, (part,))
                    yield whole
                    del whole  # freed before the next tensor is made

            files[filename] = write_safetensors(partial_path(target) / filename, shapes, values())
        sums.check(None, torch.device("cpu"))
        companions = Companions.read(source, config, sums.check_content)
        own_config = companions.in_config(weights.write_config(model))
        documents = {RUN: as_document({}), CONFIG: as_document(own_config), **companions.files}
        finish_folder(target, found, files, documents)
        for path in (source / name for name in weight_files(source)):
            if links_outside(path):  # weights often lie on a second disk, so such a link is read
                text = f"{path} is a link out of its folder: the weights in {path.resolve()} are read"
                warnings.warn(text, stacklevel=3)
        return _unknown_files(source, {CHECKSUMS, INDEX_FILE, CHAT_FOLDER, *FILES, *weight_files(source), *documents})


def _unknown_files(source: Path, known: Iterable[str]) -> list[str]:
    """The visible files of a folder outside `known`, sorted; and companions of `known` linking out of the folder."""
    carried = {name for name in known if not (name in (*FILES, GENERATION_FILE) and links_outside(source / name))}
    return sorted(path.name for path in source.iterdir() if path.name not in carried and not path.name.startswith("."))


def _make_model(source: Path, config: Mapping[str, Any], tensors: Collection[str]) -> tuple[Any, nn.Module]:
    """The family's module `weights`, and the model on the meta device. tensors: names of the folder's tensors."""
    weights = weights_of(source, config)
    own = weights.read_config(config)
    check_layers(own, tensors, source)
    with torch.device("meta"):
        return weights, make_model(own)


def _assign_files(model: nn.Module, shard_bytes: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """{file name: {parameter: shape}}. A file holds up to `shard_bytes` of float32, or a single larger parameter."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    file_bytes = 0
    for name, parameter in model.named_parameters():
        if files[-1] and file_bytes + parameter.nbytes > shard_bytes:
            files.append({})
            file_bytes = 0
        files[-1][name] = tuple(parameter.shape)
        file_bytes += parameter.nbytes
    return {f"part-{number:05}.safetensors": names for number, names in enumerate(files)}
