"""Initial weights of a run: drawn from the seed, or loaded from a folder. Called by `Trainer`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from weft.mesh import ProcessMesh

from ..checkpoint.companions import attach_companions, companions_of
from ..checkpoint.huggingface import from_pretrained
from ..checkpoint.manifest import MANIFEST, MODEL
from ..checkpoint.states import check_model, load_checkpoint
from ..checkpoint.storage import FolderReader
from ..initialization import initialize
from ..losses import local_value
from ..parallel import ParallelPlan


def draw_weights(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Allocate the model on `device`, draw the weights from `seed`, and return the model. Communication: none."""
    model = model.to_empty(device=device)
    initialize(model, seed)
    return model


def load_weights(
    model: nn.Module, folder: Path, device: torch.device, mesh: ProcessMesh, plan: ParallelPlan
) -> nn.Module:
    """Allocate a model already laid out on `mesh` by `plan`, load the weights from `folder`, and return the model.

    folder: a Hugging Face folder or a Weft checkpoint.
    The parameters keep their dtype. Communication and ValueError: as `from_pretrained` or `load_checkpoint`.
    """
    model = model.to_empty(device=device)
    if (folder / MANIFEST).is_file():
        load_checkpoint(model, folder)
    else:
        # Only weights are copied: the folder's model may have another dropout or length than the run's.
        _copy(from_pretrained(folder, mesh, plan, device=device, dtype=torch.float32), model)
    return model


def load_unsharded_weights(model: nn.Module, folder: Path, device: torch.device) -> nn.Module:
    """Allocate an unsharded model on `device`, load the weights from `folder`, and return the model.

    folder: a Hugging Face folder or a Weft checkpoint.
    Communication: none. `Trainer` calls it on rank 0 alone, to compute the loss of a single process.
    Raises ValueError as `from_pretrained`, DamagedCheckpoint as `FolderReader`.
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
    """Copy the parameters and the companions (tokenizer, chat template, ...) of `source` to `target`.

    Both models have the same parameters in the same layouts.
    """
    with torch.no_grad():
        for parameter, value in zip(target.parameters(), source.parameters(), strict=True):
            local_value(parameter).copy_(local_value(value))
    attach_companions(target, companions_of(source))
