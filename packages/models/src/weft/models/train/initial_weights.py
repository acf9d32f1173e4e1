"""Initial weights of a run: drawn from the seed, or loaded from a folder. Called by `Trainer`."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from weft.mesh import ProcessMesh

from ..checkpoint.adapter_tensors import add_adapters
from ..checkpoint.adapters import load_lora
from ..checkpoint.companions import attach_companions, companions_of
from ..checkpoint.configs import base_folder, checkpoint_config, is_adapter_folder
from ..checkpoint.huggingface import from_pretrained
from ..checkpoint.manifest import ADAPTERS, MANIFEST, MODEL, Manifest
from ..checkpoint.states import check_model, fill_from
from ..checkpoint.storage import FolderReader
from ..families import make_model
from ..initialization import initialize
from ..losses import local_value
from ..parallel import ParallelPlan
from ..parallel.lora import adapter_names, draw_adapters, merged_parameter


def draw_weights(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Allocate the model on `device`, draw the weights from `seed`, and return the model. Communication: none."""
    model = model.to_empty(device=device)
    initialize(model, seed)
    return model


def load_weights(
    model: nn.Module, folder: Path, device: torch.device, mesh: ProcessMesh, plan: ParallelPlan, *, seed: int = 0
) -> nn.Module:
    """Allocate a model already laid out on `mesh` by `plan`, load the weights from `folder`, and return the model.

    folder: a Hugging Face folder, a Weft checkpoint, or a folder of adapters, whose base is loaded with these adapters
        folded in. Adapters in a checkpoint are folded in likewise.
    seed: of adapters that `lora` added to the model before `parallelize`: the adapters are drawn, and the folder's
        weights become the base's.
    The parameters keep their dtype. Communication and ValueError: as `from_pretrained` or `load_checkpoint`; for
    adapters to fold in, an all-gather of the adapters stored sharded.
    """
    model = model.to_empty(device=device)
    if _is_plain_checkpoint(folder):
        fill_from(model, folder, absent=adapter_names(model))
    else:
        # Only weights are copied: the folder's model may have another dropout or length than the run's.
        _copy(from_pretrained(folder, mesh, plan, device=device, dtype=torch.float32), model)
    draw_adapters(model, seed)
    return model


def load_unsharded_weights(model: nn.Module, folder: Path, device: torch.device, *, seed: int = 0) -> nn.Module:
    """Allocate an unsharded model on `device`, load the weights from `folder`, and return the model.

    folder, seed: as for `load_weights`.
    Communication: none. `Trainer` calls it on rank 0 alone, to compute the loss of a single process.
    Raises ValueError as `from_pretrained`, DamagedCheckpoint as `FolderReader`.
    """
    model = model.to_empty(device=device)
    adapters = adapter_names(model)
    draw_adapters(model, seed)
    if not _is_plain_checkpoint(folder):
        _copy(_read_alone(folder), model)
        return model
    with FolderReader(folder) as reader:
        _fill_alone(model, reader, adapters)
    return model


def _read_alone(folder: Path) -> nn.Module:
    """The model of a folder, with its adapters, on the CPU. Communication: none, unlike `from_pretrained`."""
    if is_adapter_folder(folder):
        return load_lora(_read_alone(base_folder(folder)), folder)
    if not (folder / MANIFEST).is_file():
        return from_pretrained(folder, dtype=torch.float32)
    with FolderReader(folder) as reader:
        config = checkpoint_config(reader.manifest, folder)
        if config is None:
            raise ValueError(f"{folder} is of a model of no family with adapters; merge_lora(model), and save it again")
        model = make_model(config)
        if ADAPTERS in reader.manifest.files:
            add_adapters(model, reader.manifest.document(folder, ADAPTERS), folder / ADAPTERS)
        _fill_alone(model, reader)
    return model


@torch.no_grad()
def _fill_alone(model: nn.Module, reader: FolderReader, absent: Collection[str] = ()) -> None:
    """Read an unsharded model's parameters from a checkpoint. absent: names of parameters not in the checkpoint."""
    check_model(model, reader, absent)
    for name, parameter in model.named_parameters():
        if name not in absent:
            reader.read_into(f"{MODEL}{name}", parameter)


def _is_plain_checkpoint(folder: Path) -> bool:
    """Whether a folder is a Weft checkpoint of a model without adapters."""
    return (folder / MANIFEST).is_file() and ADAPTERS not in Manifest.read(folder).files


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters and the companions (tokenizer, chat template, ...) of `source` to `target`.

    Adapters of `source` are folded into the copied weights; adapters of `target` stay as they are. Apart from
    adapters, both models have the same parameters in the same layouts.
    """
    adapters = adapter_names(target)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name not in adapters:
                local_value(parameter).copy_(local_value(merged_parameter(source, name)))
    attach_companions(target, companions_of(source))
