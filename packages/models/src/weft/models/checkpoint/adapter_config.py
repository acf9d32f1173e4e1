"""Reads and checks adapter_config.json, peft's description of a folder of LoRA adapters. Nothing here needs torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..safe_files import as_type, read_json

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
