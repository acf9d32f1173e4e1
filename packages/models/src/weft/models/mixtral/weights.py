"""Mixtral in Hugging Face's format: fields of config.json, and where files store each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoint.fields import Fields, Stored
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
    write_rope,
)
from ..checkpoint.rotary import stored as stored_as_named
from .config import MixtralConfig

if TYPE_CHECKING:
    from .model import Mixtral

__all__ = ["PREFIX", "read_config", "repetition", "stored", "write_config"]

_ROPE_THETA = 1e6  # transformers' default
_FIELDS = {
    "mixtral": Fields(
        model="Mixtral",
        config=MixtralConfig,
        names={
            **NAMES,
            "num_local_experts": "num_experts",
            "num_experts_per_tok": "experts_per_token",
            "router_aux_loss_coef": "router_aux_loss_coef",
        },
        required=REQUIRED,
        nullable=NULLABLE,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        fixed={"hidden_act": ACTIVATIONS, "router_jitter_noise": (0.0, 0)},
        read_by_family=(*ROPE_FIELDS, "sliding_window"),
        ignored=("output_router_logits",),
    )
}
_PROJECTIONS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def read_config(config: Mapping[str, Any]) -> MixtralConfig:
    """Our config from a config.json. Raises ValueError for an unsupported setting."""
    values = _FIELDS["mixtral"].read(config)
    rope = {"rope_theta": _ROPE_THETA, **read_rope(config, values["max_seq_len"])}
    return MixtralConfig(**values, **rope, sliding_window=read_window(config, None))


def write_config(model: Mixtral) -> dict[str, Any]:
    """config.json for a model, without the dtype.

    The z-loss's coefficient and seq_aux, which transformers lacks, are left out.
    """
    config = model.config
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **_FIELDS["mixtral"].write(config),
        **write_rope(config),
        "sliding_window": config.sliding_window or None,
    }


def stored(parameter: str) -> Stored:
    """Where Hugging Face's files store one of our parameters: an expert's matrix as a tensor of its own."""
    path, _, leaf = parameter.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
    if path.endswith(".experts"):
        return Stored(f"{PREFIX}{path}.{{}}.{_PROJECTIONS[leaf]}.weight", stacked=True)
    return stored_as_named(f"{path}.{leaf}")
