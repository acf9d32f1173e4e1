"""Llama and Mistral in Hugging Face's format: fields of config.json, and where files store each parameter."""

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
    read_window,
    repetition,
    stored,
    write_rope,
)
from .config import LlamaConfig

if TYPE_CHECKING:
    from .model import Llama

__all__ = ["PREFIX", "read_config", "repetition", "stored", "write_config"]

_WINDOW, _DEFAULT_WINDOW = "sliding_window", 4096  # transformers' default
_FIELDS = {
    "llama": Fields(
        model="Llama",
        config=LlamaConfig,
        names={**NAMES, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
        required=REQUIRED,
        nullable=NULLABLE,
        defaults={"max_position_embeddings": 2048},
        fixed={"hidden_act": ACTIVATIONS},
        read_by_family=ROPE_FIELDS,
        # About Llama 1's training, and the program that trained SmolLM.
        ignored=("pretraining_tp", "is_llama_config"),
    ),
    "mistral": Fields(
        model="Mistral",
        config=LlamaConfig,
        names=NAMES,
        required=REQUIRED,
        nullable=NULLABLE,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
        fixed={"hidden_act": ACTIVATIONS, "attention_bias": (False,), "mlp_bias": (False,)},
        read_by_family=(*ROPE_FIELDS, _WINDOW),
    ),
}


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Our config from a config.json. Raises ValueError for an unsupported setting."""
    kind = config["model_type"]
    values = _FIELDS[kind].read(config)
    if kind == "mistral":
        values |= {"mistral": True, "sliding_window": read_window(config, _DEFAULT_WINDOW)}
    return LlamaConfig(**values, **read_rope(config, values["max_seq_len"]))


def write_config(model: Llama) -> dict[str, Any]:
    """config.json for a model, without the dtype."""
    config = model.config
    kind = "mistral" if config.mistral else "llama"
    return {
        "architectures": [f"{config.title}ForCausalLM"],
        "model_type": kind,
        **_FIELDS[kind].write(config),
        **write_rope(config),
        **({_WINDOW: config.sliding_window or None} if config.mistral else {}),
    }
