"""Llama's config and parameter names, as Hugging Face writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import Llama3RopeScaling, LlamaConfig
from .model import Llama

MODEL_TYPE = "llama"
MODEL = Llama

_CONFIG_NAMES = {  # ours: Hugging Face's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "initializer_range": "initializer_range",
    "attention_dropout": "attention_dropout",
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SCALING_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}


def make(config: Mapping[str, Any]) -> Llama:
    """The model of a config.json, its parameters unset."""
    return Llama(read_config(config))


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The config of a config.json, with rotary settings under the keys of transformers 4 or 5.

    Raises ValueError for a setting that this Llama does not have.
    """
    for name in _REQUIRED:
        if config.get(name) is None:
            raise ValueError(f"config.json has no {name!r}; a Llama needs {', '.join(_REQUIRED)}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"config.json: hidden_act {activation!r} is not supported; Llama's is 'silu'")
    if config.get("quantization_config"):
        raise ValueError("config.json: quantized weights are not supported; save the model dequantized")
    values = {ours: config[theirs] for ours, theirs in _CONFIG_NAMES.items() if config.get(theirs) is not None}
    return LlamaConfig(**values, **_read_rope(config))


def write_config(model: Llama) -> dict[str, Any]:
    """What config.json says of the model, but for its dtype."""
    config = model.config
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        scaling = {theirs: getattr(config.rope_scaling, ours) for ours, theirs in _SCALING_NAMES.items()}
        scaling["rope_type"] = "llama3"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": MODEL_TYPE,
        "hidden_act": "silu",
        **{theirs: getattr(config, ours) for ours, theirs in _CONFIG_NAMES.items()},
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        # transformers would take 1 and 2 where these are absent, whatever those tokens mean here.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def tensor_name(parameter: str) -> str:
    """Name in the safetensors files of a parameter of ours."""
    return parameter if parameter.startswith("lm_head.") else f"model.{parameter}"


def is_ignored(tensor: str, model: Llama) -> bool:
    """True for a tensor that files may hold and the model has no use for."""
    return tensor.endswith("rotary_emb.inv_freq") or (tensor == "lm_head.weight" and model.config.tie_embeddings)


def _read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = settings.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        rope["rope_theta"] = theta
    fraction = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1, 1.0):
        raise ValueError(f"config.json: partial_rotary_factor {fraction} is not supported; Llama turns whole heads")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "llama3":
        missing = [name for name in _SCALING_NAMES.values() if settings.get(name) is None]
        if missing:
            raise ValueError(f"config.json: the 'llama3' rope scaling has no {', '.join(missing)}; add it")
        rope["rope_scaling"] = Llama3RopeScaling(**{ours: settings[name] for ours, name in _SCALING_NAMES.items()})
    elif kind != "default":
        raise ValueError(f"config.json: rope type {kind!r} is not supported; use 'default' or 'llama3'")
    return rope
