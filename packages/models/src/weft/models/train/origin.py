"""The folder of the model with which a new run begins: config and tokenizer, read before torch is imported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.configs import config_of, differences
from ..checkpoint.manifest import CONFIG, MANIFEST
from ..config import ModelConfig
from ..data.sources import Data
from ..data.tokenizer import TOKENIZER_FILE, Tokenizer, find_tokenizer
from ..terminal import PROGRAM
from .folder import find_checkpoint


def find_origin(path: Path, going_on: Path | None = None) -> Path:
    """The folder with the model of a run begun with `path`: `path` itself, or the last checkpoint of the run in `path`.

    going_on: the checkpoint of a run begun earlier; the checkpoint knows the model, and `path` is not read again.
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
            f"--from {path} has no model: no {CONFIG}, and no complete checkpoint of a run; give a Hugging Face folder, a "
            f"checkpoint, or the folder of a run"
        )
    return found


def model_of(folder: Path) -> ModelConfig:
    """The config of the model in a folder. Raises ValueError where the folder has no config."""
    found = find_model(folder)
    if found is None:
        raise ValueError(
            f"{folder} has no {CONFIG}, as its model is from outside; give that model by --model MODULE:CLASS"
        )
    return found


def find_model(folder: Path) -> ModelConfig | None:
    """The config of the model in a folder; None for a checkpoint of a model from outside. Raises as `config_of`."""
    try:
        return config_of(folder)
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder}: {error}") from None


def check_same_model(folder: Path, model: ModelConfig) -> None:
    """Raises ValueError where a checkpoint to go on with is of another model than the run's, with each field and both values.

    folder: a checkpoint; the checkpoint of a model from outside has no config to compare. model: the run's.
    """
    saved = find_model(folder)
    found = {} if saved is None else differences(saved, model)
    if found:
        listed = "; ".join(f"{name} {there!r}, and this run has {here!r}" for name, (there, here) in found.items())
        raise ValueError(
            f"{folder} has another model than this run: it has {listed}; give the model as it was saved, or begin a new run with "
            f"it by `{PROGRAM} train --from {folder}`"
        )


def contradictions(model: ModelConfig, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Each field whose given value changes the model, with the model's value and the given one.

    given: values by the names of the model's fields; each is judged alone, beside the rest of the model's values.
    """
    for name, value in given.items():
        try:
            is_other = bool(differences(model, dataclasses.replace(model, **{name: value})))
        except ValueError:  # the value does not fit the rest of the model
            is_other = True
        if is_other:
            yield name, getattr(model, name), value


def check_tokens(option: str, folder: Path, model: ModelConfig, data: Data) -> None:
    """Raises ValueError where the data has other tokens than the folder's tokenizer.

    option: the option with the folder, for the message, as "--from llama". A folder without a tokenizer takes prepared data, and the
    bytes of a text where the model has as many tokens as there are bytes.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        if data.tokenizer.is_bytes and model.vocab_size != data.tokenizer.vocab_size:
            raise ValueError(
                f"{option} has a model of {model.vocab_size} tokens and no {TOKENIZER_FILE}, and {data.name} would be trained "
                f"as {data.tokenizer.vocab_size} tokens, its bytes; put the model's own {TOKENIZER_FILE} into {folder}"
            )
        return
    if is_same(find_tokenizer(folder), data.tokenizer):
        return
    prepare = f"`{PROGRAM} data prepare FILE_OR_FOLDER --tokenizer {folder} --output prepared`"
    if data.is_prepared:
        raise ValueError(
            f"{data.name} was prepared with another tokenizer than that of {option}; prepare it anew by {prepare}, and give "
            f"--data.path prepared"
        )
    raise ValueError(
        f"{data.name} is text, which is trained as bytes, and {option} has a tokenizer; make tokens of the text by {prepare}, "
        f"and give --data.path prepared"
    )


def is_same(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers give the same tokens. Another token may end a document."""
    contents = [dict(each.files)[TOKENIZER_FILE] for each in (first, second)]
    if contents[0] == contents[1]:
        return True
    settings = [
        {name: value for name, value in json.loads(content).items() if name not in ("truncation", "padding")}
        for content in contents
    ]
    return bool(settings[0] == settings[1])
