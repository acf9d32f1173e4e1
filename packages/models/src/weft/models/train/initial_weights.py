"""A run's initial weights: drawn from the seed, or loaded from the folder of `--from`.

The folder of `--from`, with a new run's model: find it, read its config, and compare it with the run.

The command calls these functions before torch is imported; the weights are loaded later, by beginning.py.

Initial weights of a run: drawn from the seed, or loaded from a folder. Called by `Trainer`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from weft.mesh import ProcessMesh

from ..checkpoint.companions import companions_of, keep_companions
from ..checkpoint.configs import config_of, differences
from ..checkpoint.huggingface import from_pretrained
from ..checkpoint.manifest import CONFIG, MANIFEST, MODEL
from ..checkpoint.states import check_model, load_checkpoint
from ..checkpoint.storage import FolderReader
from ..config import ModelConfig
from ..data.sources import Data
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer, find_tokenizer
from ..initialization import initialize
from ..losses import local_value
from ..parallel import ParallelPlan
from ..terminal import PROGRAM
from .folder import find_checkpoint


def find_origin(path: Path, going_on: Path | None = None) -> Path:
    """The folder of the model named by `--from PATH`: `path` itself, or the last checkpoint of the run in `path`.

    going_on: the checkpoint to resume from, or None. A checkpoint contains the model: the function returns
    `going_on`, and does not read `path`.
    Raises ValueError for a path without a model.
    """
    if going_on is not None:
        return going_on
    if not path.is_dir():
        raise ValueError(
            f"--from {path} is not a folder; give a Hugging Face folder, a checkpoint, or the folder of a run"
        )
    found = path if (path / MANIFEST).is_file() or (path / CONFIG).is_file() else find_checkpoint(path)
    if not ((found / MANIFEST).is_file() or (found / CONFIG).is_file()):
        raise ValueError(
            f"--from {path} has no model: no {CONFIG}, and no complete checkpoint of a run; give a Hugging Face "
            f"folder, a checkpoint, or the folder of a run"
        )
    return found


def model_of(folder: Path) -> ModelConfig:
    """The config of the model in a folder. Raises ValueError if the folder has no config."""
    found = find_model(folder)
    if found is None:
        raise ValueError(
            f"{folder} has no {CONFIG}, because its model is a class of your own; name the class with "
            f"--model MODULE:CLASS"
        )
    return found


def find_model(folder: Path) -> ModelConfig | None:
    """The config of the model in a folder, or None for a checkpoint of a model class of the user.

    The latter has no config.json. Raises as `config_of`.
    """
    try:
        return config_of(folder)
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from None


def check_same_model(folder: Path, model: ModelConfig) -> None:
    """Raise ValueError if a checkpoint to resume from holds another model than the run's.

    The error lists each differing field with both values.
    folder: the checkpoint. Without a config.json, as for a model class of the user, there is nothing to compare.
    """
    saved = find_model(folder)
    found = {} if saved is None else differences(saved, model)
    if found:
        listed = "; ".join(f"{name} {there!r}, but this run has {here!r}" for name, (there, here) in found.items())
        raise ValueError(
            f"{folder} has another model than this run: it has {listed}; give the model as it was saved, or begin a "
            f"new run from it with `{PROGRAM} train --from {folder}`"
        )


def contradictions(model: ModelConfig, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, the model's value, the given value) for each given value in conflict with the model.

    values: values by field name. Each is judged alone, beside the model's values for the remaining fields.
    """
    for name, value in values.items():
        try:
            differs = bool(differences(model, dataclasses.replace(model, **{name: value})))
        except ValueError:  # the value does not fit the rest of the model
            differs = True
        if differs:
            yield name, getattr(model, name), value


def check_tokens(option: str, folder: Path, model: ModelConfig, data: Data) -> None:
    """Raise ValueError if the data was tokenized with another tokenizer than the folder's.

    option: the option naming the folder, as "--from llama", for the error.
    A folder without a tokenizer accepts prepared data, and text only if the model's vocabulary is as large as the
    byte tokenizer's (tokens of a text are bytes).
    """
    if not (folder / TOKENIZER_FILE).is_file():
        if data.tokenizer.is_bytes and model.vocab_size != data.tokenizer.vocab_size:
            raise ValueError(
                f"{option} has a model of {model.vocab_size} tokens but no {TOKENIZER_FILE}, and {data.name} would be "
                f"read as bytes, {data.tokenizer.vocab_size} tokens; put the model's own {TOKENIZER_FILE} into {folder}"
            )
        return
    if have_same_tokens(find_tokenizer(folder), data.tokenizer):
        return
    prepare = f"`{PROGRAM} data prepare FILE_OR_FOLDER --tokenizer {folder} --output prepared`"
    if data.is_prepared:
        raise ValueError(
            f"{data.name} was prepared with another tokenizer than that of {option}; prepare it again with {prepare}, "
            f"and give --data.path prepared"
        )
    raise ValueError(
        f"{data.name} is text, which would be read as bytes, but {option} has a tokenizer; tokenize the text with "
        f"{prepare}, and give --data.path prepared"
    )


def have_same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens.

    Settings of truncation and padding, and the end token of documents, may differ.
    """
    contents = [dict(each.files)[TOKENIZER_FILE] for each in (first, second)]
    if contents[0] == contents[1]:
        return True
    settings = [
        {name: value for name, value in json.loads(content).items() if name not in ("truncation", "padding")}
        for content in contents
    ]
    return bool(settings[0] == settings[1])


def filled(model: nn.Module, device: torch.device, seed: int) -> nn.Module:
    """Allocate the model on `device`, draw the weights from `seed`, and return the model. Communication: none."""
    model = model.to_empty(device=device)
    initialize(model, seed)
    return model


def loaded(model: nn.Module, folder: Path, device: torch.device, mesh: ProcessMesh, plan: ParallelPlan) -> nn.Module:
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


def loaded_alone(model: nn.Module, folder: Path, device: torch.device) -> nn.Module:
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
    keep_companions(target, companions_of(source))
