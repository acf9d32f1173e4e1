"""The config.json of a folder: read as the config of a family, and compared with the config of a model. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..documents import read_json
from ..families import FAMILIES
from .manifest import CHECKSUMS, CONFIG, MANIFEST, Manifest


def _always(saved: ModelConfig, given: ModelConfig) -> bool:
    return True


def _longer_alike(saved: ModelConfig, given: ModelConfig) -> bool:
    return saved.is_longer_alike and given.is_longer_alike and given.max_seq_len >= saved.max_seq_len


# Fields that do not change the function of the weights, and when they may differ. All fields outside this table must be equal.
MAY_DIFFER: Mapping[str, Callable[[ModelConfig, ModelConfig], bool]] = {
    "initializer_range": _always,  # for drawing fresh weights; a checkpoint replaces these
    # Dropout acts in training alone: a run may choose its own regularization, as fine-tuning commonly does.
    "attention_dropout": _always,
    "dropout": _always,
    "embedding_dropout": _always,
    "max_seq_len": _longer_alike,  # every position is computed in the same way
}


def differences(saved: ModelConfig, given: ModelConfig) -> dict[str, tuple[object, object]]:
    """The fields by which two configs make different functions of the same weights: by name, the saved and the given value.

    Two families give the single entry "family". MAY_DIFFER lists the fields that are left out.
    """
    if type(saved) is not type(given):
        return {"family": (saved.title, given.title)}
    pairs = {field.name: (getattr(saved, field.name), getattr(given, field.name)) for field in fields(saved)}
    return {
        name: values
        for name, values in pairs.items()
        if values[0] != values[1] and not (name in MAY_DIFFER and MAY_DIFFER[name](saved, given))
    }


def check_config(saved: ModelConfig, given: ModelConfig, folder: Path, *, beside: str = "") -> None:
    """Raises ValueError, with each differing field and both values, unless two configs make the same function of the weights.

    saved: the folder's config, from `config_of`. given: the config of the model that takes the folder's weights.
    beside: further differences, for the message.
    """
    found = differences(saved, given)
    if found:
        listed = [f"{name} is {there!r} in the folder, and {here!r} here" for name, (there, here) in found.items()]
        raise ValueError(
            f"{folder} is of another model: {'; '.join([*listed, *filter(None, [beside])])}. Make the model with the folder's config, "
            f"or read the model by from_pretrained({str(folder)!r})"
        )


def config_of(folder: str | Path) -> ModelConfig | None:
    """The config of a checkpoint or of a Hugging Face folder; None for a checkpoint of a model of no family.

    Raises ValueError for an absent or incomplete folder and for an unknown model; DamagedCheckpoint for a config.json that was
    changed after Weft wrote the file.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return saved_config(Manifest.read(folder), folder)
    config = read_config(folder)
    if (folder / CHECKSUMS).is_file() and CONFIG in (manifest := Manifest.read(folder, CHECKSUMS)).files:
        config = manifest.document(folder, CONFIG)
    return as_config(folder, config)


def saved_config(manifest: Manifest, folder: Path) -> ModelConfig | None:
    """The config of a checkpoint; None for a model of no family. Raises as `config_of`."""
    return as_config(folder, manifest.document(folder, CONFIG)) if CONFIG in manifest.files else None


def own_config(model: object) -> ModelConfig | None:
    """The config of a model whose network follows from it; None for a model without such a config."""
    config = getattr(model, "config", None)
    known = {family.config_class for family in FAMILIES.values()}
    return config if isinstance(config, ModelConfig) and type(config) in known else None


def as_config(folder: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The config in a config.json. Raises ValueError for an unknown model."""
    read: ModelConfig = weights_of(folder, config).read_config(config)
    return read


def check_layers(config: ModelConfig, tensors: Collection[str], folder: Path) -> None:
    """Raises ValueError where a config has more layers than a folder has tensors, so before a module of each is made.

    tensors: the names of the folder's tensors. Each layer has one or more of its own.
    """
    if config.num_layers > len(tensors):
        raise ValueError(
            f"{folder / CONFIG} says {config.num_layers:,} layers, and the files hold {len(tensors):,} tensors, of which each layer "
            f"has some; check the config against the files"
        )


def weights_of(folder: Path, config: Mapping[str, Any]) -> Any:
    """The module `weights` of the family in a config.json. Raises ValueError for an unknown family."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"{folder / CONFIG}: model_type {kind!r} is not supported; use one of {', '.join(FAMILIES)}")
    return FAMILIES[kind].weights


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises ValueError where the file is missing."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with config.json and safetensors files")
    return read_json(folder / CONFIG, "give a folder that transformers or Weft saved a model in")
