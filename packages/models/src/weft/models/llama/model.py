"""Llama, written for one device (Touvron et al. 2023; with grouped queries and Llama 3's rotary scaling)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache
from weft.kernels.backend import has_data

from ..initialization import Constant, Initial, Normal
from ..layers import DotProductAttention, Dropout, Embedding, Linear, RMSNorm
from ..parallel.plan import ParallelPlan
from .config import LlamaConfig
from .plan import PLAN


class Llama(nn.Module):
    """tokens [B, T] int64 -> logits [B, T, V].

    The parameters are unset until `initialize` or a checkpoint fills them, and are named as in Hugging Face's Llama.
    Where config.dropout is above 0 a call while training has a `dropout_key`, made of the seed and the step.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.dropout = Dropout(config.dropout, "dropout")
        self.layers = nn.ModuleList(Layer(config, f"layers.{i}") for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        tokens: Tensor,
        dropout_key: int | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """positions: [B, T] of ints, each token's own; where None they count from 0, or on from the tokens in `cache`.

        documents: [B, T] of ints, the same number for the tokens that see one another, as in packed rows; with a cache
        [B, capacity], see `kernels.attention`. cache: of `make_cache`; it is given the tokens' keys and values.
        On a mesh tokens, positions and documents are given in one layout.
        """
        cos, sin = self._tables(tokens, positions, cache[0].length if cache else 0)
        x = self.dropout(self.embed_tokens(tokens), dropout_key)  # [B, T, H]
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, dropout_key, documents, cache[i] if cache else None)
        logits: Tensor = self.lm_head(self.norm(x))  # [B, T, V]
        return logits

    def _tables(self, tokens: Tensor, positions: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the tokens' angles, [T, D // 2] or [B, T, D // 2] each. first: the position of the first one."""
        kept = has_data(tokens) and not torch.compiler.is_compiling()
        if positions is not None:
            frequencies = rotary_frequencies if kept else compute_rotary_frequencies
            return kernels.rope_tables(positions, frequencies(self.config, tokens.device))
        stop = first + tokens.shape[-1]
        length = 1 << max(0, stop - 1).bit_length()  # a power of two: few lengths, so few tables are kept
        tables = rotary_tables if kept else compute_rotary_tables
        cos, sin = tables(self.config, length, tokens.device)
        return cos[first:stop], sin[first:stop]

    def make_cache(self, capacity: int) -> list[KeyValueCache]:
        """A cache for each layer, with room for `capacity` tokens of a sequence."""
        return [KeyValueCache(capacity) for _ in self.layers]

    def initial_value(self, name: str) -> Initial:
        """How parameter `name` starts: norms 1, biases 0, weights normal with initializer_range.

        The two projections that write into the residual stream are scaled by 1 / sqrt(2 * num_layers), so that the
        stream's variance does not grow with depth (Radford et al. 2019, section 2.3).
        """
        if name.endswith(".bias"):
            return Constant(0.0)
        if name.endswith("norm.weight"):
            return Constant(1.0)
        std = self.config.initializer_range
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * self.config.num_layers)
        return Normal(std)

    def parallel_plan(self) -> ParallelPlan:
        """How the model is laid out where no other plan is given."""
        return PLAN

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Llama:
        # to_empty() and to() make one new parameter for each place that holds it; a tied weight stays one.
        tied = self.lm_head.weight is self.embed_tokens.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        return self


class Layer(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)); with dropout on what is added, as in GPT-2.

    name: the block's own in the model.
    """

    def __init__(self, config: LlamaConfig, name: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, f"{name}.self_attn")
        self.self_attn_dropout = Dropout(config.dropout, f"{name}.self_attn_dropout")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp_dropout")

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, dropout_key, documents, cache)
        x = kernels.add(x, self.self_attn_dropout(mixed, dropout_key))
        return kernels.add(x, self.mlp_dropout(self.mlp(self.post_attention_layernorm(x)), dropout_key))


class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions. name: its own in the model."""

    def __init__(self, config: LlamaConfig, name: str) -> None:
        super().__init__()
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        bias, head_dim = config.attention_bias, config.head_dim
        self.q_proj = Linear(config.hidden_size, width, bias=bias, unit=head_dim)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=bias, unit=head_dim)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=bias, unit=head_dim)
        self.o_proj = Linear(width, config.hidden_size, bias=bias)
        self.attend = DotProductAttention(head_dim, dropout=config.attention_dropout, name=f"{name}.attend")

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        query = kernels.rope(self.q_proj(x), cos, sin)  # [B, T, heads * D]
        key = kernels.rope(self.k_proj(x), cos, sin)  # [B, T, kv_heads * D]
        mixed = self.attend(query, key, self.v_proj(x), dropout_key, documents, cache)  # [B, T, heads * D]
        output: Tensor = self.o_proj(mixed)
        return output


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(kernels.swiglu(self.gate_proj(x), self.up_proj(x)))
        return output


def compute_rotary_tables(config: LlamaConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles: [length, D // 2] float32 each.

    Made from the config on demand, so they are right wherever the model was built. In float32 as Hugging Face
    computes them, for that is what the published weights were trained with.
    """
    angle = torch.outer(torch.arange(length, device=device).float(), compute_rotary_frequencies(config, device))
    return angle.cos(), angle.sin()


def compute_rotary_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """By how much the angle of each pair of elements turns from token to token: [D // 2] float32."""
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim  # [D // 2]
    frequency = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # in the context first trained on
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = blend.clamp(0, 1)  # 0: a long wave, stretched; 1: a short one, kept
        frequency = (1 - blend) * frequency / scaling.factor + blend * frequency
    return frequency


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # kept tables must be fit for training, whoever asks first
@torch.no_grad()
def rotary_tables(config: LlamaConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`compute_rotary_tables`, kept; a graph that is traced computes its own."""
    return compute_rotary_tables(config, length, device)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
@torch.no_grad()
def rotary_frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """`compute_rotary_frequencies`, kept as the tables are."""
    return compute_rotary_frequencies(config, device)
