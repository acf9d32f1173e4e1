"""Checkpoints of a run made into Hugging Face folders, and back, a tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.tokenizer import FILES
from ..families import make_model
from .checksums import Sums, write_summed
from .huggingface import (
    SHARD_BYTES,
    check_tensors,
    finish_pretrained,
    open_tensors,
    read_config,
    read_slices,
    shards_of,
    start_folder,
    weights_of,
)
from .manifest import (
    CHECKSUMS,
    CONFIG,
    MANIFEST,
    MODEL,
    RUN,
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    StoredPart,
    StoredTensor,
    as_document,
    key_of,
)
from .shards import DTYPES, positional_sum, write_shard
from .states import check_model
from .storage import FolderReader, begin_folder, beside, finish_folder
from .stored import joined


def convert(source: Path, target: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the weights of a checkpoint of a run as a Hugging Face folder, or those of such a folder as a checkpoint.

    What was read is in memory a tensor at a time, of those that Hugging Face's model has. A checkpoint made so has no
    optimizer's state, and is of step 0: a run that is resumed from it begins with its weights.
    shard_bytes: of a file, at most, but for one of a single tensor.
    Raises ValueError for a source that is neither or not whole, and where the target exists; OSError where it cannot be written.
    """
    try:
        if (source / MANIFEST).is_file():
            _to_huggingface(source, target, shard_bytes)
        else:
            _to_checkpoint(source, target, shard_bytes)
    except (OSError, DamagedCheckpoint):
        shutil.rmtree(beside(target), ignore_errors=True)
        raise


def _to_huggingface(source: Path, target: Path, shard_bytes: int) -> None:
    with FolderReader(source) as reader:
        if CONFIG not in reader.manifest.files:
            raise ValueError(f"{source} is of a model of no family, which has no Hugging Face form")
        config = reader.manifest.document(source, CONFIG)
        weights, model = _model(source, config)
        check_model(model, reader)
        stored = {name: reader.manifest.tensors[f"{MODEL}{name}"] for name, _ in model.named_parameters()}
        dtypes = {name: DTYPES[each.dtype] for name, each in stored.items()}
        parameters = {
            name: parameter.to(dtypes[name]) for name, parameter in model.named_parameters()
        }  # without data: for their sizes
        start_folder(target, beside(target))
        files: dict[str, StoredFile] = {}
        stored_tensors: dict[str, StoredTensor] = {}
        for filename, tensors in shards_of(parameters, weights, shard_bytes).items():

            def values(tensors: Mapping[str, list[str]] = tensors) -> Iterator[Tensor]:
                for names in tensors.values():
                    yield joined([(weights.stored(name), reader.read_whole(f"{MODEL}{name}")) for name in names])

            shapes = {
                tensor: (dtypes[names[0]], weights.stored(names[0]).shape(tuple(parameters[names[0]].shape)))
                for tensor, names in tensors.items()
            }
            files[filename], found = write_summed(beside(target) / filename, shapes, values())
            stored_tensors.update(found)
        documents = {name: reader.manifest.content(source, name) for name in FILES if name in reader.manifest.files}
        manifest = Manifest(stored_tensors, files, CHECKSUMS)
        finish_pretrained(parameters, config, manifest, documents, beside(target), target)


def _to_checkpoint(source: Path, target: Path, shard_bytes: int) -> None:
    config = read_config(source)
    weights, model = _model(source, config)
    sums = Sums(source)
    with ExitStack() as opened:
        tensors = open_tensors(source, opened, weights.PREFIX, sums)
        check_tensors(model, tensors, source, weights)
        begin_folder(target)
        files: dict[str, StoredFile] = {}
        found: dict[str, StoredTensor] = {}
        for filename, names in _files(model, shard_bytes).items():
            shapes = {
                key_of(f"{MODEL}{name}", (0,) * len(shape)): (
                    DTYPES[tensors[weights.stored(name).name]().get_dtype()],
                    shape,
                )
                for name, shape in names.items()
            }

            def values(filename: str = filename, names: Mapping[str, tuple[int, ...]] = names) -> Iterator[Tensor]:
                for name, shape in names.items():
                    stored = weights.stored(name)
                    file = tensors[stored.name]()
                    whole = stored.restored(
                        read_slices(file, stored.slices(tuple(map(slice, [0] * len(shape), shape)), shape))
                    )
                    starts = (0,) * len(shape)
                    part = StoredPart(starts, shape, filename, positional_sum(whole, shape, starts))
                    found[f"{MODEL}{name}"] = StoredTensor(file.get_dtype(), shape, (part,))
                    yield whole

            files[filename] = write_shard(beside(target) / filename, shapes, values())
        sums.check(None, torch.device("cpu"))
        documents = {RUN: as_document({}), CONFIG: as_document(weights.write_config(model))}
        documents |= {name: sums.content(name) for name in FILES if (source / name).is_file()}
        finish_folder(target, found, files, documents)


def _model(source: Path, config: Mapping[str, Any]) -> tuple[Any, nn.Module]:
    """What is known of its files, and the model without data."""
    weights = weights_of(source, config)
    with torch.device("meta"):
        return weights, make_model(weights.read_config(config))


def _files(model: nn.Module, shard_bytes: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """By file, the parameters in it and their shapes: up to `shard_bytes` of float32, or one."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, parameter in model.named_parameters():
        if files[-1] and held + parameter.nbytes > shard_bytes:
            files.append({})
            held = 0
        files[-1][name] = tuple(parameter.shape)
        held += parameter.nbytes
    return {f"part-{number:05}.safetensors": names for number, names in enumerate(files)}
