"""config.json: read into the config of a family, and compared with a model's config. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..families import FAMILIES
from ..safe_files import read_json
from .adapter_config import base_folder, is_adapter_folder
from .manifest import CHECKSUMS, CONFIG, MANIFEST, Manifest


def _always(saved: ModelConfig, target: ModelConfig) -> bool:
    return True


def _may_lengthen(saved: ModelConfig, target: ModelConfig) -> bool:
    return saved.is_length_independent and target.is_length_independent and target.max_seq_len >= saved.max_seq_len


# Fields that may differ between two configs under which equal weights compute equal outputs; each with a condition.
MAY_DIFFER: Mapping[str, Callable[[ModelConfig, ModelConfig], bool]] = {
    "initializer_range": _always,  # for drawing fresh weights, which a checkpoint replaces
    # Dropout acts in training only: a run may choose its own, as fine-tuning commonly does.
    "attention_dropout": _always,
    "dropout": _always,
    "embedding_dropout": _always,
    # Only chooses the model_type of a Hugging Face folder. A Mistral's attention window is a field of its own.
    "mistral": _always,
    # Of the routers' losses, in training only.
    "router_aux_loss_coef": _always,
    "seq_aux": _always,
    "router_z_loss_coef": _always,
    "max_seq_len": _may_lengthen,  # may grow, where each position is computed the same for every max_seq_len
}


def differences(saved: ModelConfig, target: ModelConfig) -> dict[str, tuple[object, object]]:
    """The differences because of which equal weights compute different outputs under the two configs.

    Returns {field: (saved value, target value)}; for configs of two families only the entry "family". A field in
    MAY_DIFFER is left out where the condition holds.
    """
    if type(saved) is not type(target):
        return {"family": (saved.title, target.title)}
    pairs = {field.name: (getattr(saved, field.name), getattr(target, field.name)) for field in fields(saved)}
    return {
        name: values
        for name, values in pairs.items()
        if values[0] != values[1] and not (name in MAY_DIFFER and MAY_DIFFER[name](saved, target))
    }


def check_config(saved: ModelConfig, target: ModelConfig, folder: Path, *, further_difference: str = "") -> None:
    """Raises ValueError, naming the `differences`, where equal weights would compute different outputs.

    saved: the folder's config, from `config_of`. target: the config of the model to fill with the folder's weights.
    further_difference: added to the differences in the message.
    """
    differing = differences(saved, target)
    if differing:
        listed = [
            f"{name} is {saved_value!r} in the folder, and {model_value!r} here"
            for name, (saved_value, model_value) in differing.items()
        ]
        listed_text = "; ".join([*listed, *filter(None, [further_difference])])
        raise ValueError(
            f"{folder} is of another model: {listed_text}. Make the model with the folder's config, or read the "
            f"model by from_pretrained({str(folder)!r})"
        )


def config_of(folder: str | Path) -> ModelConfig | None:
    """The config of a checkpoint or of a Hugging Face folder; None for a checkpoint of a model outside the families.

    A folder of LoRA adapters has the config of the base model.
    Raises ValueError for an absent or incomplete folder and for an unknown model; DamagedCheckpoint for a config.json
    changed after the save.
    """
    folder = Path(folder)
    if is_adapter_folder(folder):
        folder = base_folder(folder)
    if (folder / MANIFEST).is_file():
        return checkpoint_config(Manifest.read(folder), folder)
    config = read_config(folder)
    if (folder / CHECKSUMS).is_file() and CONFIG in (manifest := Manifest.read(folder, CHECKSUMS)).files:
        config = manifest.document(folder, CONFIG)
    return _parse_config(folder, config)


def checkpoint_config(manifest: Manifest, folder: Path) -> ModelConfig | None:
    """The config of a checkpoint; None for a model outside the families. Raises as `config_of`."""
    return _parse_config(folder, manifest.document(folder, CONFIG)) if CONFIG in manifest.files else None


def model_config(model: object) -> ModelConfig | None:
    """`model.config`, if the config's class is a family's config class; None for a subclass or any other value."""
    config = getattr(model, "config", None)
    known = {family.config_class for family in FAMILIES.values()}
    return config if isinstance(config, ModelConfig) and type(config) in known else None


def _parse_config(folder: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The family's config from a config.json. Raises ValueError for an unknown model."""
    read: ModelConfig = weights_of(folder, config).read_config(config)
    return read


def check_layers(config: ModelConfig, tensors: Collection[str], folder: Path) -> None:
    """Raises ValueError where config.json has more layers than the folder has tensors.

    Called before the model is built, so a wrong number of layers cannot build millions of modules.
    tensors: the names of the folder's tensors. Every layer has at least one.
    """
    if config.num_layers > len(tensors):
        raise ValueError(
            f"{folder / CONFIG} says {config.num_layers:,} layers, and the files hold {len(tensors):,} tensors, of "
            f"which each layer has some; check the config against the files"
        )


def weights_of(folder: Path, config: Mapping[str, Any]) -> Any:
    """The module `weights` of config.json's family. Raises ValueError for an unknown model_type."""
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"{folder / CONFIG}: model_type {kind!r} is not supported; use one of {', '.join(FAMILIES)}")
    return FAMILIES[kind].weights


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json of a Hugging Face folder. Raises ValueError where the folder or the file is missing."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with config.json and safetensors files")
    return read_json(folder / CONFIG, "give a folder that transformers or Weft saved a model in")
