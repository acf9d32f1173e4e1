"""`--from` begins a run with a folder's model: find the folder, read the model's config, compare both with the run.

The command calls these functions before torch is imported; the weights are loaded later, by initial_weights.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.configs import ADAPTER_CONFIG, config_of, differences, is_adapter_folder
from ..checkpoint.manifest import CONFIG, MANIFEST
from ..config import ModelConfig
from ..data.sources import Data
from ..data.tokenizer import TOKENIZER_FILE, find_tokenizer, have_same_tokens
from ..terminal import PROGRAM
from .folder import find_checkpoint

SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a file, read by `fingerprint`


def find_origin(path: Path, resumed_checkpoint: Path | None = None, *, option: str = "--from") -> Path:
    """The folder of the model named by `--from PATH`: `path` itself, or the last checkpoint of the run in `path`.

    A folder of LoRA adapters counts as the model of its base with the adapters folded in.
    resumed_checkpoint: the checkpoint to resume from, or None. A checkpoint contains the model: the function returns
    `resumed_checkpoint`, and does not read `path`.
    option: that names the path, for errors.
    Raises ValueError for a path without a model.
    """
    if resumed_checkpoint is not None:
        return resumed_checkpoint
    if not path.is_dir():
        raise ValueError(
            f"{option} {path} is not a folder; give a Hugging Face folder, a checkpoint, or the folder of a run"
        )
    folder = path if is_model_folder(path) else find_checkpoint(path)
    if not is_model_folder(folder):
        raise ValueError(
            f"{option} {path} has no model: no {CONFIG}, and no complete checkpoint of a run; give a Hugging Face "
            f"folder, a checkpoint, or the folder of a run"
        )
    return folder


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, a model for transformers, or LoRA adapters."""
    return any((folder / name).is_file() for name in (MANIFEST, CONFIG, ADAPTER_CONFIG))


def model_of(folder: Path) -> ModelConfig:
    """The config of the model in a folder. Raises ValueError if the folder has no config."""
    config = find_model(folder)
    if config is None:
        raise ValueError(
            f"{folder} has no {CONFIG}, because its model is a class of your own; name the class with "
            f"--model MODULE:CLASS"
        )
    return config


def find_model(folder: Path) -> ModelConfig | None:
    """The config of the model in a folder; None for a checkpoint of the user's model class, which has no config.json.

    Raises ValueError and DamagedCheckpoint as `config_of`.
    """
    try:
        return config_of(folder)
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from None


def check_adapters(folder: Path) -> None:
    """Raise ValueError if `folder` has adapters that do not fit the model of their base. Reads headers, no weights."""
    if not is_adapter_folder(folder):
        return
    import torch  # imported here because torch takes seconds

    from ..checkpoint.adapter_tensors import open_adapters
    from ..checkpoint.huggingface import weights_of_model
    from ..families import make_model

    with torch.device("meta"):
        model = make_model(model_of(folder))
    with open_adapters(model, weights_of_model(model), folder):
        pass


def fingerprint(folder: Path) -> str:
    """A SHA-256 that changes with the weights in a folder: of the names and sizes of its files, and of SAMPLES pieces
    of each, evenly spaced, since weights may be of any size.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name.startswith("."):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def check_same_model(folder: Path, model: ModelConfig) -> None:
    """Raise ValueError if a checkpoint to resume from holds another model than the run's.

    The error lists each differing field with both values.
    folder: the checkpoint. Without a config.json, as for a model class of the user, there is nothing to compare.
    """
    saved = find_model(folder)
    differing = {} if saved is None else differences(saved, model)
    if differing:
        listed = "; ".join(
            f"{name} {saved_value!r}, but this run has {own_value!r}"
            for name, (saved_value, own_value) in differing.items()
        )
        raise ValueError(
            f"{folder} has another model than this run: it has {listed}; give the model as it was saved, or begin a "
            f"new run from it with `{PROGRAM} train --from {folder}`"
        )


def contradictions(model: ModelConfig, values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, the model's value, the given value) for each given value in conflict with the model.

    values: by field name. Each is judged alone, beside the model's values for the remaining fields.
    """
    for name, value in values.items():
        try:
            is_other = bool(differences(model, dataclasses.replace(model, **{name: value})))
        except ValueError:  # the value does not fit the rest of the model
            is_other = True
        if is_other:
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
