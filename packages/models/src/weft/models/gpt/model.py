"""GPT-2, written for one device (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache

from ..decoder import CausalModel
from ..layers import (
    PROJECTIONS,
    DotProductAttention,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    is_bare,
    join,
    project_at_once,
    projects_at_once,
    rowwise,
)
from ..parallel.plan import ParallelPlan
from .config import Activation, GPTConfig
from .plan import PLAN

# As `kernels.linear` names them, and `kernels.gelu`.
ACTIVATIONS: Mapping[Activation, tuple[str, str]] = {"gelu_new": ("gelu_tanh", "tanh"), "gelu": ("gelu", "none")}


@rowwise
class GPT(CausalModel[GPTConfig]):
    """tokens [B, T] int64 -> logits [B, T, V].

    The parameters are unset until `initialize` or a checkpoint fills them, and are named as in Hugging Face's GPT2, but for
    the projections to queries, keys and values, which are three layers here: each is cut by heads.
    Where a dropout of the config is above 0 a call while training has a `dropout_key`, made of the seed and the step.
    """

    residual_outputs = ("c_proj.weight",)

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_seq_len, config.hidden_size)
        self.drop = Dropout(config.embedding_dropout, "drop")
        self.h = nn.ModuleList(GPTBlock(config, i) for i in range(config.num_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tie()

    @property
    def embedding(self) -> Embedding:
        """The tokens' table, which the head may share."""
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
        """The tokens' rows of the table and their positions', added; nothing beside them. Positions are below max_seq_len.

        Raises ValueError for more tokens than there are positions.
        """
        if positions is None:
            positions = self._counted(tokens, first)  # [T]
        return self.drop(kernels.add(self.wte(tokens), self.wpe(positions)), dropout_key), ()

    def _counted(self, tokens: Tensor, first: int) -> Tensor:
        """The positions from `first` on: [T]."""
        stop = first + tokens.shape[-1]
        if stop > self.config.max_seq_len:
            raise ValueError(
                f"a GPT with max_seq_len {self.config.max_seq_len} has no position {stop - 1}; give at most "
                f"{self.config.max_seq_len} tokens, those in the cache included"
            )
        return torch.arange(first, stop, device=tokens.device)

    def parallel_plan(self) -> ParallelPlan:
        """How the model is laid out where no other plan is given."""
        return PLAN


@rowwise
class GPTBlock(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)), each with dropout. index: which block it is."""

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
        """[B, T, H] -> [B, T, H]; the other arguments as of `DotProductAttention`."""
        mixed = self.attn(self.ln_1(x), dropout_key, documents, cache)
        x, normal = join(self.attn_dropout, self.ln_2, mixed, x, dropout_key)
        return cast(Tensor, self.mlp_dropout(self.mlp(normal), dropout_key, residual=x))


@rowwise
class GPTAttention(nn.Module):
    """Causal attention whose projections all have biases. index: which block it is in."""

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
        """[B, T, H] -> [B, T, H]; the other arguments as of `DotProductAttention`."""
        if projects_at_once(self):
            query, key, value = project_at_once(self, x)  # [B, T, heads * D] each
        else:
            key, value = self.attend.keys_and_values(self.k_proj(x), self.v_proj(x))
            query = self.q_proj(x)
        mixed = self.attend(query, key, value, dropout_key, documents, cache)  # [B, T, heads * D]
        output: Tensor = self.c_proj(mixed)
        return output


@rowwise
class GPTMLP(nn.Module):
    """c_proj(gelu(c_fc(x))); the gelu is part of the second product where nobody sees what that is given."""

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
