"""The fields, tensor names and rotary settings common to files of the rotary families, as of transformers 4 and 5."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import RotaryConfig
from ..rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeScaling,
    YarnRopeScaling,
    magnitude,
)
from ..safe_files import as_type, types_of
from .fields import Repeats, Stored, tied_head

if TYPE_CHECKING:
    from torch import Tensor

REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES = {  # Hugging Face's name: our name
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "initializer_range",
    "attention_dropout": "attention_dropout",
}
NULLABLE = ("num_key_value_heads", "head_dim")
ACTIVATIONS = ("silu", "swish")  # two names of a single function

# The fields of config.json that `read_rope` reads.
ROPE_FIELDS = ("partial_rotary_factor", "rope_interleaved", "rope_parameters", "rope_scaling", "rope_theta")

PREFIX = "model."  # of all tensor names except the head's


def stored(parameter: str) -> Stored:
    """Where Hugging Face's files store a parameter of ours."""
    return Stored(parameter if parameter.startswith("lm_head.") else f"{PREFIX}{parameter}")


def repetition(tensor: str, config: RotaryConfig) -> Repeats | None:
    """The values required of a stored tensor without a parameter, like a tied head; None for an unknown tensor.

    Called by `check_tensors`. tensor: the stored tensor's name. config: ours.
    """
    if tensor == "lm_head.weight" and config.tie_embeddings:
        return tied_head(f"{PREFIX}embed_tokens.weight")
    if tensor.endswith("rotary_emb.inv_freq"):
        return Repeats(
            what="the rotary frequencies of config.json",
            remedy="set rope_theta and rope_scaling in config.json as the model was trained, or remove the tensor",
            accepts=partial(_are_frequencies, config),
        )
    return None


def _are_frequencies(config: RotaryConfig, stored: Tensor) -> bool:
    """Whether a stored tensor holds the config's rotary frequencies, scaled or unscaled, within 16-bit rounding."""
    import torch

    from ..rope import compute_rotary_frequencies

    settings = replace(config.rotary, scaling=None), config.rotary
    expected = [compute_rotary_frequencies(each, torch.device("cpu")) for each in settings]
    allowed = 4 * torch.finfo(stored.dtype).eps
    return any(
        stored.shape == each.shape and torch.allclose(stored.float(), each, rtol=max(allowed, 1e-5), atol=1e-7)
        for each in expected
    )


# Types of the settings outside the scaling classes.
_TYPES: Mapping[str, Any] = {
    "partial_rotary_factor": float | None,
    "rope_interleaved": bool | None,
    "rope_theta": float | None,
    "rope_type": str | None,
    "type": str | None,
    "mscale": float | None,
    "mscale_all_dim": float | None,
}
_ANYWHERE = ("partial_rotary_factor", "rope_theta", "rope_type", "type")  # allowed with every kind of scaling
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class _ScalingKind:
    """A kind of rope scaling: which settings in config.json become which fields of our class."""

    make: type[Any]  # our class
    names: Mapping[str, str]  # Hugging Face's name -> our field
    optional: tuple[str, ...] = ()  # keys of `names` not required
    unmapped: tuple[str, ...] = field(default=())  # further known settings, without a field of ours


_KINDS: Mapping[str, _ScalingKind] = {
    "linear": _ScalingKind(LinearRopeScaling, {"factor": "factor"}),
    "dynamic": _ScalingKind(DynamicRopeScaling, {"factor": "factor"}, unmapped=(_ORIGINAL,)),
    "llama3": _ScalingKind(
        Llama3RopeScaling,
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            _ORIGINAL: "original_max_seq_len",
        },
    ),
    "yarn": _ScalingKind(
        YarnRopeScaling,
        {
            "factor": "factor",
            _ORIGINAL: "original_max_seq_len",
            "attention_factor": "attention_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "truncate": "truncate",
        },
        optional=(_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
        unmapped=("mscale", "mscale_all_dim"),
    ),
}


def read_rope(config: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    """rope_theta and rope_scaling for our config, if present in config.json. max_seq_len: the model's.

    Raises ValueError for an unknown kind of scaling or setting, and for a missing setting.
    """
    rope: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        section = config.get(name)
        if not isinstance(section, Mapping | None):
            raise ValueError(f"config.json: {name} is {section!r}; give an object of settings, or null")
        settings |= section or {}
    for name in _TYPES:
        for each in (settings, config):
            as_type(_TYPES[name], each.get(name), f"config.json: {name}")
    if "rope_theta" in settings or "rope_theta" in config:
        rope["rope_theta"] = settings.get("rope_theta", config.get("rope_theta"))
        if rope["rope_theta"] is None:
            raise ValueError("config.json: rope_theta is null; give the base of the wavelengths")
    fraction = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1, 1.0):
        raise ValueError(
            f"config.json: partial_rotary_factor {fraction} is not supported; Weft rotates all elements of a head"
        )
    if config.get("rope_interleaved"):
        raise ValueError("config.json: rope_interleaved is not supported; Weft pairs element i of a head with i + D/2")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        rope["rope_scaling"] = _read_scaling(kind, settings, max_seq_len)
    else:
        _check_known(kind, settings, ())
    return rope


def read_window(config: Mapping[str, Any], default: int | None) -> int:
    """The field sliding_window for our config; 0 for null. default: for an absent field.

    Raises ValueError for a number below 1.
    """
    kind: Any = int | None
    window = config.get("sliding_window", default)
    as_type(kind, window, "config.json: sliding_window")
    if window is not None and window < 1:
        raise ValueError(
            f"config.json: sliding_window is {window}; give the number of keys that a query sees, or null for all keys"
        )
    return window or 0


def write_rope(config: RotaryConfig) -> dict[str, Any]:
    """The rotary settings in config.json, under the keys of transformers 4, which transformers 5 reads too."""
    scaling: dict[str, Any] | None = None
    if config.rope_scaling is not None:
        (name,) = (name for name, kind in _KINDS.items() if isinstance(config.rope_scaling, kind.make))
        values = {key: getattr(config.rope_scaling, own_name) for key, own_name in _KINDS[name].names.items()}
        scaling = {"rope_type": name} | {key: value for key, value in values.items() if value is not None}
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def _read_scaling(name: str, settings: Mapping[str, Any], max_seq_len: int) -> RopeScaling:
    if name not in _KINDS:
        raise ValueError(f"config.json: rope type {name!r} is not supported; use one of default, {', '.join(_KINDS)}")
    kind = _KINDS[name]
    _check_known(name, settings, (*kind.names, *kind.unmapped))
    missing = [key for key in kind.names if key not in kind.optional and settings.get(key) is None]
    if missing:
        raise ValueError(f"config.json: the {name!r} rope scaling has no {', '.join(missing)}; add it")
    if settings.get("truncate", True) is None:  # transformers reads null as false, and an absent field as true
        raise ValueError("config.json: the 'yarn' rope scaling has truncate null; give true or false")
    values = {own_name: settings[key] for key, own_name in kind.names.items() if settings.get(key) is not None}
    for key, own_name in kind.names.items():
        if own_name in values:
            as_type(types_of(kind.make)[own_name], values[own_name], f"config.json: the {name!r} rope scaling: {key}")
    if name == "dynamic":
        _check_original(settings, max_seq_len)
    if name == "yarn":
        values.setdefault("original_max_seq_len", max_seq_len)  # as in transformers
        if any(not 0 <= (settings.get(each) or 0) <= sys.float_info.max for each in ("mscale", "mscale_all_dim")):
            raise ValueError(
                "config.json: the 'yarn' rope scaling has an mscale or mscale_all_dim that is no number >= 0; give one"
            )
        if settings.get("mscale") and settings.get("mscale_all_dim"):
            factor = settings["factor"]
            ratio = magnitude(factor, settings["mscale"]) / magnitude(factor, settings["mscale_all_dim"])
            values.setdefault("attention_factor", ratio)
    scaling: RopeScaling = kind.make(**values)
    return scaling


def _check_known(name: str, settings: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [key for key in settings if key not in known and key not in _ANYWHERE]
    if unknown:
        raise ValueError(
            f"config.json: the {name!r} rope scaling has {', '.join(unknown)}, which is not known; "
            f"its known settings: {', '.join(known) or 'none'}"
        )


def _check_original(settings: Mapping[str, Any], max_seq_len: int) -> None:
    """Raises ValueError where `original_max_position_embeddings` is given and is not max_seq_len.

    With dynamic scaling transformers ignores this setting.
    """
    if settings.get(_ORIGINAL) not in (None, max_seq_len):
        raise ValueError(
            f"config.json: the 'dynamic' rope scaling has {_ORIGINAL} {settings[_ORIGINAL]}, but scaling begins at "
            f"max_position_embeddings, {max_seq_len}; make them equal"
        )
