"""The configs in a folder: config.json of a model, and adapter_config.json, peft's description of LoRA adapters.

config.json is read into the config of a family, and compared with a model's config. adapter_config.json is read and
checked. Nothing here needs torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..families import FAMILIES
from ..safe_files import as_type, read_json
from .manifest import CHECKSUMS, CONFIG, MANIFEST, Manifest

ADAPTER_CONFIG = "adapter_config.json"
_BASE = "base_model_name_or_path"
# `load_lora` knows the fields of adapter_config.json in the three tables below; any further field is an error.
# _IGNORED: fields that affect only training, or nothing beyond the tensors and the scale.
_IGNORED = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",  # like target_modules: the file has tensors for the chosen layers only
        "fan_in_fan_out",  # whether the base layer stores a transposed weight; used for merging
        "inference_mode",
        "layers_pattern",  # goes with layers_to_transform
        "megatron_core",  # goes with megatron_config
        "peft_version",
        "qalora_group_size",  # goes with use_qalora
        "revision",
        "target_modules",
    ]
)
_READ = ("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern")
_OFF: tuple[Any, ...] = (None, {}, [], False)
# Fields that change the adapters' output, except with the listed values.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # pissa, olora, corda, eva, loftq and lora_ga start from the base model's weights, which the folder does not hold.
    "init_lora_weights": (True, False, "gaussian"),
    **dict.fromkeys(
        [
            "use_rslora",
            "use_dora",
            "use_qalora",
            "use_bdlora",
            "lora_bias",
            "modules_to_save",
            "layers_to_transform",
            "layer_replication",
            "trainable_token_indices",
            "target_parameters",
            "alora_invocation_tokens",
            "arrow_config",
            "corda_config",
            "ensure_weight_tying",
            "eva_config",
            "kasa_config",
            "loftq_config",
            "lora_ga_config",
            "megatron_config",
            "monteclora_config",
            "velora_config",
        ],
        _OFF,
    ),
}


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds LoRA adapters alone, without the base model."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """The folder of the base model for a folder of adapters, from base_model_name_or_path.

    A relative path counts from the working folder, as in peft.
    Raises ValueError where the field names no folder on this machine, or again a folder of adapters.
    """
    file = folder / ADAPTER_CONFIG
    name = read_json(file, "save or fetch the adapters again").get(_BASE)
    remedy = f"fetch or save the base model, and write the path of its folder into {_BASE} of {file}"
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file}: {_BASE} is {name!r}, and names no model; {remedy}")
    try:
        base = Path(name)
        if not base.is_dir():
            raise ValueError(f"{folder} holds adapters of the model {name}, which is not a folder here; {remedy}")
    except OSError as error:
        raise ValueError(f"{file}: {_BASE} {name!r:.200} cannot be read: {error.strerror}; {remedy}") from None
    if is_adapter_folder(base):
        raise ValueError(f"{folder} holds adapters of {name}, which itself holds adapters alone; {remedy}")
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json.

    Raises ValueError for a folder without LoRA adapters, an unknown field, and an unsupported value.
    """
    config = read_json(folder / ADAPTER_CONFIG, "give a folder that save_lora or peft saved adapters in")
    _check_config(config, folder / ADAPTER_CONFIG)
    return config


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raises ValueError for an unknown field of adapter_config.json, or an unsupported value."""
    for field, value in config.items():
        if field in _IGNORED or field in _READ:
            continue
        if field not in _PLAIN:
            raise ValueError(
                f"{file}: {field!r}, which is {value!r}, is not a known field; remove the field if it does not affect "
                f"the adapters' output"
            )
        if not any(value is plain or (value == plain and type(value) is type(plain)) for plain in _PLAIN[field]):
            allowed = (
                _PLAIN[field] if _PLAIN[field] is not _OFF else (type(value)() if isinstance(value, bool) else None,)
            )
            raise ValueError(
                f"{file}: {field} {value!r} is not supported; it may be {' or '.join(map(repr, allowed))}. Merge the "
                f"adapters into the base model in peft, and read that model"
            )
    for field, kinds in (("r", int), ("lora_alpha", int | float)):
        value = config.get(field)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"{file}: {field} is {value!r}; it must be a number above 0")
    dropout = config.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise ValueError(f"{file}: lora_dropout is {dropout!r}; it must be a number from 0 to below 1")


def check_patterns(config: dict[str, Any], ranks: Mapping[str, int], file: Path) -> None:
    """Raises ValueError unless rank_pattern and alpha_pattern are as `save_lora` writes them.

    The patterns name the layers of Hugging Face that are n > 1 layers in Weft, as q, k and v in one. The adapter of
    such a layer joins n adapters, and has n times the config's rank and n times the config's alpha.
    ranks: {name of Hugging Face's layer: rank of the adapter in the file}.
    """
    multiples = {name: rank // config["r"] for name, rank in ranks.items()}
    for field, value_per_part in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        value = config.get(field)
        pattern = {} if value is None else as_type(dict[str, Any], value, f"{file}: {field}")
        own = {name: n * value_per_part for name, n in multiples.items() if n > 1}
        if pattern != own:
            raise ValueError(f"{file}: {field} {pattern!r} is not supported; it may be {own!r}")


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
    """The config of a checkpoint; None for a model outside the families. Raises ValueError as `config_of`."""
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
