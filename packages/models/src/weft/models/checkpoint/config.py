"""config.json of a folder: the model's config, read before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..families import FAMILIES
from .manifest import CONFIG, MANIFEST, Manifest


def read_model_config(folder: Path) -> ModelConfig | None:
    """The config of the model in a Hugging Face folder or a checkpoint; None for a checkpoint of a model of no family.

    Raises ValueError for a folder that has no model, or a model with a setting that is not supported; DamagedCheckpoint for
    a checkpoint that is not as it was written.
    """
    if (folder / MANIFEST).is_file():
        manifest = Manifest.read(folder)
        if CONFIG not in manifest.files:
            return None
        config = manifest.document(folder, CONFIG)
    else:
        config = read_config(folder)
    found: ModelConfig = weights_of(folder, config).read_config(config)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with config.json and safetensors files")
    return read_json(folder / "config.json", "give a folder that transformers or Weft saved a model in")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; {remedy}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; fetch or save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object; fetch or save it again")
    return value


def weights_of(folder: Path, config: Mapping[str, Any]) -> Any:
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"{folder / 'config.json'}: model_type {kind!r} is not supported; use one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[kind].weights
