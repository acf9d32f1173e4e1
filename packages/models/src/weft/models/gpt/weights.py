"""GPT-2 in Hugging Face's format: fields of config.json, and where files store each parameter.

The files store q, k and v joined in a tensor, and weights transposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checkpoint.fields import Fields, Repeats, Stored, tied_head
from .config import GPTConfig

if TYPE_CHECKING:
    from torch import Tensor

    from .model import GPT

PREFIX = "transformer."  # of all tensor names except the head's
_DEFAULT_DROPOUT = 0.1
FIELDS = Fields(
    model="GPT-2",
    config=GPTConfig,
    names={
        "vocab_size": "vocab_size",
        "n_positions": "max_seq_len",
        "n_embd": "hidden_size",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "n_inner": "intermediate_size",
        "activation_function": "activation",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_embeddings",
        "scale_attn_weights": "scale_attention",
        "scale_attn_by_inverse_layer_idx": "scale_attention_by_layer",
        "embd_pdrop": "embedding_dropout",
        "attn_pdrop": "attention_dropout",
        "resid_pdrop": "dropout",
    },
    required=("vocab_size", "n_embd", "n_layer", "n_head"),
    nullable=("n_inner",),
    defaults=dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), _DEFAULT_DROPOUT),
    ignored=(
        "n_ctx",  # repeats n_positions
        "reorder_and_upcast_attn",  # order and precision of computing the same scores
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
)
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}  # further names of the same function


def read_config(config: Mapping[str, Any]) -> GPTConfig:
    """Our config from a config.json. Raises ValueError for an unsupported setting."""
    values = FIELDS.read(config)
    if "activation" in values:
        values["activation"] = _ACTIVATIONS.get(values["activation"], values["activation"])
    return GPTConfig(**values)


def write_config(model: GPT) -> dict[str, Any]:
    """config.json for a model, without the dtype."""
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **FIELDS.write(model.config)}


def stored(parameter: str) -> Stored:
    """Where Hugging Face's files store one of our parameters."""
    if parameter.startswith("lm_head."):
        return Stored(parameter)
    name, transposed = f"{PREFIX}{parameter}", bool(re.search(r"(_proj|c_fc)\.weight$", parameter))
    part = re.search(r"\.attn\.([qkv])_proj\.", name)
    if part is None:
        return Stored(name, transposed=transposed)
    return Stored(name.replace(f"{part[1]}_proj", "c_attn"), part="qkv".index(part[1]), parts=3, transposed=transposed)


def repetition(tensor: str, config: GPTConfig) -> Repeats | None:
    """The values required of a stored tensor without a parameter, like a tied head; None for an unknown tensor."""
    if tensor == "lm_head.weight" and config.tie_embeddings:
        return tied_head(f"{PREFIX}wte.weight")
    if re.search(r"\.attn\.bias$", tensor):
        return Repeats(
            what="the mask of causal attention, ones on and below the diagonal",
            remedy="another mask is not supported here",
            accepts=_is_causal,
        )
    if re.search(r"\.attn\.masked_bias$", tensor):
        return Repeats(
            what="a score of masked keys, -10000 or less",
            remedy="a higher score of masked keys is not supported here",
            accepts=lambda stored: bool((stored <= -1e4).all()),
        )
    return None


def _is_causal(stored: Tensor) -> bool:
    """Whether a stored mask is causal. stored: [1, 1, T, T], of booleans or numbers."""
    square = stored.ndim == 4 and stored.shape[:2] == (1, 1) and stored.shape[2] == stored.shape[3]
    return square and bool((stored[0, 0] == stored[0, 0].new_ones(stored.shape[2:]).tril()).all())
