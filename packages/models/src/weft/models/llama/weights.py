"""Llama in Hugging Face's format: fields of config.json, and where files store each parameter."""

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
from .config import LlamaConfig

if TYPE_CHECKING:
    from .model import Llama

__all__ = ["PREFIX", "read_config", "repetition", "stored", "write_config"]

FIELDS = Fields(
    model="Llama",
    config=LlamaConfig,
    names={**NAMES, "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    required=REQUIRED,
    nullable=NULLABLE,
    defaults={"max_position_embeddings": 2048},
    fixed={"hidden_act": ACTIVATIONS},
    read_by_family=ROPE_FIELDS,
    ignored=("pretraining_tp",),  # about Llama 1's training
)


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Our config from a config.json. Raises ValueError for an unsupported setting."""
    values = FIELDS.read(config)
    return LlamaConfig(**values, **read_rope(config, values["max_seq_len"]))


def write_config(model: Llama) -> dict[str, Any]:
    """config.json for a model, without the dtype."""
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return {**kind, **FIELDS.write(model.config), **write_rope(model.config)}
