"""Qwen 3 with experts in Hugging Face's format: fields of config.json, and where files store each parameter."""

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
from ..safe_files import as_type
from .config import QwenMoeConfig

if TYPE_CHECKING:
    from .model import QwenMoe

__all__ = ["PREFIX", "read_config", "repetition", "stored", "write_config"]

_DEFAULT_WINDOW = 4096  # transformers' default
_LAYERS: Any = tuple[int, ...] | None
_OWN_NAMES = (  # of fields named alike in config.json and our config
    "moe_intermediate_size",
    "num_experts",
    "decoder_sparse_step",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "attention_bias",
)
# Fields of model_type weft_moe alone.
_FURTHER = (
    "seq_aux",
    "router_z_loss_coef",
    "router_score",
    "softmax_after",
    "router_scale",
    "router_bias_rate",
    "shared_expert_size",
    "shared_expert_gate",
)


def _fields(*own: str, read_by_family: tuple[str, ...] = ()) -> Fields:
    return Fields(
        model="Qwen 3 MoE",
        config=QwenMoeConfig,
        names={**NAMES, "num_experts_per_tok": "experts_per_token", **{name: name for name in (*_OWN_NAMES, *own)}},
        required=REQUIRED,
        nullable=NULLABLE,
        # transformers' defaults
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        fixed={"hidden_act": ACTIVATIONS},
        read_by_family=(
            *ROPE_FIELDS, "sliding_window", "use_sliding_window", "mlp_only_layers", *read_by_family
        ),
        ignored=("output_router_logits", "max_window_layers"),  # transformers' Qwen3Moe does not read the latter
    )  # fmt: skip


_FIELDS = {"qwen3_moe": _fields(), "weft_moe": _fields(*_FURTHER, read_by_family=("expert_groups",))}


def read_config(config: Mapping[str, Any]) -> QwenMoeConfig:
    """Our config from a config.json. Raises ValueError for an unsupported setting."""
    values = _FIELDS[config["model_type"]].read(config)
    values |= read_rope(config, values["max_seq_len"])
    dense = as_type(_LAYERS, config.get("mlp_only_layers"), "config.json: mlp_only_layers") or ()
    values["mlp_only_layers"] = tuple(sorted({layer for layer in dense if layer in range(values["num_layers"])}))
    if as_type(bool, config.get("use_sliding_window", False), "config.json: use_sliding_window"):
        values["sliding_window"] = read_window(config, _DEFAULT_WINDOW)
    groups: Any = tuple[int, int] | None
    values["expert_groups"] = as_type(groups, config.get("expert_groups"), "config.json: expert_groups")
    return QwenMoeConfig(**values)


def write_config(model: QwenMoe) -> dict[str, Any]:
    """config.json for a model, without the dtype. A model with options of Weft's own gets model_type weft_moe.

    The z-loss's coefficient and seq_aux, which transformers lacks, are left out of a folder for transformers.
    """
    config = model.config
    kind = "qwen3_moe" if config.is_hugging_face else "weft_moe"
    further = {"expert_groups": None if config.expert_groups is None else [*config.expert_groups]}
    return {
        "architectures": ["Qwen3MoeForCausalLM" if config.is_hugging_face else "QwenMoe"],
        "model_type": kind,
        **_FIELDS[kind].write(config),
        **write_rope(config),
        "mlp_only_layers": [*config.mlp_only_layers],
        "use_sliding_window": config.sliding_window > 0,
        "sliding_window": config.sliding_window or None,
        **({} if config.is_hugging_face else further),
    }


def stored(parameter: str) -> Stored:
    """Where Hugging Face's files store one of our parameters: an expert's matrix as a tensor of its own."""
    path, _, leaf = parameter.rpartition(".")
    return Stored(f"{PREFIX}{path}.{{}}.{leaf}.weight", stacked=True) if path.endswith(".experts") else (
        stored_as_named(parameter)
    )  # fmt: skip
