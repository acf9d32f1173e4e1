"""Qwen 2 and 3 in Hugging Face's format: fields of config.json, and where files store each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoint.fields import Fields
from ..checkpoint.rotary import (
    ACTIVATIONS,
    NAMES,
    NULLABLE,
    PREFIX,
    REQUIRED,
    ROPE_FIELDS,
    read_rope,
    repetition,
    stored,
    write_rope,
)
from ..checks import MOST_LAYERS
from ..safe_files import as_type
from .config import QwenConfig

if TYPE_CHECKING:
    from .model import Qwen

__all__ = ["PREFIX", "read_config", "repetition", "stored", "write_config"]

_WINDOW_FIELDS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
_WINDOW, _DEFAULT_WINDOW, _DEFAULT_FULL_LAYERS = "sliding_attention", 4096, 28  # transformers' defaults
_WINDOW_TYPES: Mapping[str, Any] = {"use_sliding_window": bool | None, "sliding_window": int | None}
_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}


def _fields(version: int, **options: Any) -> Fields:
    return Fields(
        model=f"Qwen {version}",
        config=QwenConfig,
        required=REQUIRED,
        nullable=NULLABLE,
        fixed={"hidden_act": ACTIVATIONS, "use_mrope": (False,)},
        read_by_family=(*ROPE_FIELDS, *_WINDOW_FIELDS),
        **options,
    )


_FIELDS = {
    "qwen2": _fields(2, names=NAMES, defaults=_DEFAULTS),
    "qwen3": _fields(3, names={**NAMES, "attention_bias": "attention_bias"}, defaults={**_DEFAULTS, "head_dim": 128}),
}


def read_config(config: Mapping[str, Any]) -> QwenConfig:
    """Our config from a config.json. Raises ValueError for an unsupported setting."""
    kind = config["model_type"]
    values = _FIELDS[kind].read(config)
    return QwenConfig(
        version=3 if kind == "qwen3" else 2,
        **values,
        **read_rope(config, values["max_seq_len"]),
        **_read_window(config, values["num_layers"]),
    )


def write_config(model: Qwen) -> dict[str, Any]:
    """config.json for a model, without the dtype."""
    config = model.config
    kind = f"qwen{config.version}"
    return {
        "architectures": [f"Qwen{config.version}ForCausalLM"],
        "model_type": kind,
        **_FIELDS[kind].write(config),
        **write_rope(config),
        "use_sliding_window": config.sliding_window > 0,
        "sliding_window": config.sliding_window or None,
        "layer_types": [
            _WINDOW if layer in config.sliding_layers else "full_attention" for layer in range(config.num_layers)
        ],
    }


def _read_window(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """sliding_window and sliding_layers for our config, from layer_types or from the older fields, as in transformers.

    Raises ValueError where layer_types contradicts the number of layers or the window.
    """
    for name in _WINDOW_TYPES.keys() & config.keys():
        as_type(_WINDOW_TYPES[name], config[name], f"config.json: {name}")
    window = config.get("sliding_window", _DEFAULT_WINDOW) if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", _DEFAULT_FULL_LAYERS)
        if window is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 0):
            raise ValueError(f"config.json: max_window_layers is {first!r}; give the number of layers without a window")
        layers = tuple(range(first, min(num_layers, MOST_LAYERS))) if window is not None else ()
        return {"sliding_window": window, "sliding_layers": layers} if layers else {}
    if not isinstance(kinds, list | tuple):
        raise ValueError(
            f"config.json: layer_types is {kinds!r}; give a list with a kind for each of {num_layers} layers"
        )
    unknown = sorted({str(kind) for kind in kinds} - {_WINDOW, "full_attention"})
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"config.json: layer_types has {len(kinds)} layers{f', some of {unknown}' if unknown else ''}; it needs "
            f"{num_layers}, each full_attention or {_WINDOW}"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOW)
    if layers and window is None:
        raise ValueError(
            "config.json: layer_types has sliding_attention, but no window is set; set use_sliding_window and "
            "sliding_window"
        )
    return {"sliding_window": window, "sliding_layers": layers} if layers else {}
