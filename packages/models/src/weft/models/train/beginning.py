"""The weights at the beginning of a run: drawn by the seed, or read from a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from weft.mesh import ProcessMesh

from ..checkpoint.companions import companions_of, keep_companions
from ..checkpoint.huggingface import from_pretrained
from ..checkpoint.manifest import MANIFEST, MODEL
from ..checkpoint.states import check_model, load_checkpoint
from ..checkpoint.storage import FolderReader
from ..initialization import initialize
from ..losses import local_value
from ..parallel import ParallelPlan


def filled(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """The model on a device, with weights drawn by the seed. Communication: none."""
    model = model.to_empty(device=device)
    initialize(model, seed)
    return model


def loaded(model: nn.Module, folder: Path, device: torch.device, mesh: ProcessMesh, plan: ParallelPlan) -> nn.Module:
    """The model, laid out on `mesh` by `plan`, on a device, with the weights of a Hugging Face folder or a checkpoint.

    The parameters keep their dtype. Communication: as of `from_pretrained`, or of `load_checkpoint`.
    Raises ValueError as these do.
    """
    model = model.to_empty(device=device)
    if (folder / MANIFEST).is_file():
        load_checkpoint(model, folder)
    else:
        # The folder's model may have another dropout or length than the run's: weights alone are taken.
        _copy(from_pretrained(folder, mesh, plan, device=device, dtype=torch.float32), model)
    return model


def loaded_alone(model: nn.Module, folder: Path, device: torch.device) -> nn.Module:
    """A model of plain tensors on a device, with the weights of a Hugging Face folder or a checkpoint.

    Communication: none: a single rank may call this. Raises ValueError as `from_pretrained`, DamagedCheckpoint as `FolderReader`.
    """
    model = model.to_empty(device=device)
    if not (folder / MANIFEST).is_file():
        _copy(from_pretrained(folder, dtype=torch.float32), model)
        return model
    with FolderReader(folder) as reader, torch.no_grad():
        check_model(model, reader)
        for name, parameter in model.named_parameters():
            reader.read_into(f"{MODEL}{name}", parameter)
    return model


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Copies the parameters, which both models have on the same layouts, and what the folder says beside the network."""
    with torch.no_grad():
        for parameter, value in zip(target.parameters(), source.parameters(), strict=True):
            local_value(parameter).copy_(local_value(value))
    keep_companions(target, companions_of(source))
