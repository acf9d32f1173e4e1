"""GPT-2, written for one device (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache

from ..blocks import PROJECTIONS, add_and_norm, can_fuse_qkv, project_qkv
from ..decoder import CausalModel
from ..layers import DotProductAttention, Dropout, Embedding, Head, LayerNorm, Linear, is_bare, row_independent
from ..parallel.plan import ParallelPlan
from ..parallel.styles import ColwiseParallel, PositionParallel, RowwiseParallel, VocabParallel
from .config import Activation, GPTConfig

PLAN = ParallelPlan(
    tensor={
        "wte": VocabParallel(),
        "wpe": PositionParallel(),
        "h.*.attn.[qkv]_proj": ColwiseParallel(),
        "h.*.attn.c_proj": RowwiseParallel(),
        "h.*.mlp.c_fc": ColwiseParallel(),
        "h.*.mlp.c_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(),
    },
    blocks=("h.*",),
)

# The config's name of an activation -> (`kernels.linear`'s name, `kernels.gelu`'s name of the approximation).
ACTIVATIONS: Mapping[Activation, tuple[str, str]] = {"gelu_new": ("gelu_tanh", "tanh"), "gelu": ("gelu", "none")}


@row_independent
class GPT(CausalModel[GPTConfig]):
    """GPT-2: tokens [B, T] int64 -> logits [B, T, V].

    Parameters are unset until `initialize` or a checkpoint fills them. Parameter names are as in Hugging Face's GPT2,
    except for q, k and v: three layers here, each sharded by heads.
    In training, a config with dropout needs a `dropout_key` in each call, derived from the seed and the step.
    """

    residual_outputs = ("c_proj.weight",)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_seq_len, config.hidden_size)
        self.drop = Dropout(config.embedding_dropout, "drop")
        self.h = nn.ModuleList(GPTBlock(config, i) for i in range(config.num_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self._tie()

    @property
    def embedding(self) -> Embedding:
        """The token table, which the head may share."""
        return self.wte

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        return self.h

    @property
    def final_norm(self) -> LayerNorm:
        """The norm before the head."""
        return self.ln_f

    def embed(
        self, tokens: Tensor, positions: Tensor | None, first: int, dropout_key: int | Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Token embedding plus position embedding, [B, T, H]; no further arguments for blocks.

        positions: below max_seq_len; None: counted from `first`. Raises ValueError for a count beyond max_seq_len.
        dropout_key: None where nothing is dropped.
        """
        if positions is None:
            positions = self._counted(tokens, first)  # [T]
        return self.drop(kernels.add(self.wte(tokens), self.wpe(positions)), dropout_key), ()

    def _counted(self, tokens: Tensor, first: int) -> Tensor:
        """The tokens' positions, counted from `first`: [T]."""
        stop = first + tokens.shape[-1]
        if stop > self.config.max_seq_len:
            raise ValueError(
                f"a GPT with max_seq_len {self.config.max_seq_len} has no position {stop - 1}; give at most "
                f"{self.config.max_seq_len} tokens, those in the cache included"
            )
        return torch.arange(first, stop, device=tokens.device)

    def parallel_plan(self) -> ParallelPlan:
        """The default plan of `parallelize`."""
        return PLAN


@row_independent
class GPTBlock(nn.Module):
    """One transformer block: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    index: the block's number, from 0.
    """

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = GPTAttention(config, index)
        self.attn_dropout = Dropout(config.dropout, f"h.{index}.attn_dropout")
        self.ln_2 = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = GPTMLP(config)
        self.mlp_dropout = Dropout(config.dropout, f"h.{index}.mlp_dropout")

    def forward(
        self,
        x: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x [B, T, H] -> [B, T, H]. Further arguments: as for `DotProductAttention`."""
        mixed = self.attn(self.ln_1(x), dropout_key, documents, cache)
        x, normed = add_and_norm(self.attn_dropout, self.ln_2, mixed, x, dropout_key)
        return cast(Tensor, self.mlp_dropout(self.mlp(normed), dropout_key, residual=x))


@row_independent
class GPTAttention(nn.Module):
    """Causal attention layer with biases in all projections. index: the number of the layer's block, from 0."""

    sharing_input = PROJECTIONS

    def __init__(self, config: GPTConfig, index: int) -> None:
        super().__init__()
        H, head_dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(H, H, unit=head_dim)
        self.k_proj = Linear(H, H, unit=head_dim)
        self.v_proj = Linear(H, H, unit=head_dim)
        self.c_proj = Linear(H, H)
        scale, dropout = config.attention_scale(index), config.attention_dropout
        self.attend = DotProductAttention(head_dim, dropout=dropout, scale=scale, name=f"h.{index}.attn.attend")

    def forward(
        self,
        x: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x [B, T, H] -> [B, T, H]. Further arguments: as for `DotProductAttention`."""
        if can_fuse_qkv(self):
            query, key, value = project_qkv(self, x)  # [B, T, heads * D] each
        else:
            key, value = self.attend.keys_and_values(self.k_proj(x), self.v_proj(x))
            query = self.q_proj(x)
        mixed = self.attend(query, key, value, dropout_key, documents, cache)  # [B, T, heads * D]
        output: Tensor = self.c_proj(mixed)
        return output


@row_independent
class GPTMLP(nn.Module):
    """c_proj(gelu(c_fc(x))). The op of c_proj also computes the gelu, unless c_proj has a hook or adapter."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = Linear(config.intermediate_size, config.hidden_size)
        self.activation, self.approximate = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        inner, second = self.c_fc(x), self.c_proj
        if is_bare(second):
            return kernels.linear(inner, second.weight, second.bias, input_activation=self.activation)
        output: Tensor = second(kernels.gelu(inner, approximate=self.approximate))
        return output
