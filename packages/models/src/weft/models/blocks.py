"""The attention layer, the gated MLP and the transformer block of decoders, made of the layers in layers.py."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache

from .layers import (
    DotProductAttention,
    Dropout,
    HeadNormRope,
    KeysAndValues,
    Linear,
    RMSNorm,
    is_bare,
    row_independent,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def can_fuse_qkv(attention: nn.Module) -> bool:
    """Whether a single op may compute q, k and v, as `project_qkv` does.

    True if no projection has a hook or adapter, and the module `attend.keys_and_values` has no hook.
    """
    attend: Any = attention._modules["attend"]  # faster than `attention.attend`, found by a __getattr__ in Python
    return all(map(is_bare, map(attention._modules.get, PROJECTIONS))) and is_bare(
        attend.keys_and_values, KeysAndValues
    )


def project_qkv(
    attention: nn.Module, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, H] -> queries [B, T, heads * D], keys, values [B, T, kv_heads * D], in one op; see `can_fuse_qkv`.

    cos, sin: of the rotary angles, [T, D // 2] or [B, T, D // 2], to rotate queries and keys; None: not rotated.
    """
    layers: list[Any] = [attention._modules[name] for name in PROJECTIONS]
    return kernels.qkv_linear(x, *[each.weight for each in layers], *[each.bias for each in layers], cos=cos, sin=sin)


@row_independent
class Attention(nn.Module):
    """Causal attention layer with grouped queries and rotary positions.

    qk_norm_eps: epsilon of the norm over each query and key head before rotation; None: no such norm.
    window: as for `DotProductAttention`. name: the module's path in the model.
    """

    sharing_input = PROJECTIONS  # submodules whose input is this module's input

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm_eps: float | None,
        window: int | None,
        dropout: float,
        name: str,
    ) -> None:
        super().__init__()
        self.q_proj = Linear(hidden_size, num_heads * head_dim, bias=qkv_bias, unit=head_dim)
        self.k_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, unit=head_dim)
        self.v_proj = Linear(hidden_size, num_kv_heads * head_dim, bias=qkv_bias, unit=head_dim)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, bias=output_bias)
        self.q_norm = None if qk_norm_eps is None else HeadNormRope(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else HeadNormRope(head_dim, qk_norm_eps)
        self.attend = DotProductAttention(head_dim, dropout=dropout, window=window, name=f"{name}.attend")

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x [B, T, H] -> [B, T, H].

        cos, sin: of the rotary angles, [T, D // 2] or [B, T, D // 2].
        dropout_key, documents, cache: as for `DotProductAttention.forward`.
        """
        if not can_fuse_qkv(self):
            # keys and values first: a hook on `keys_and_values` communicates while the queries are computed
            key = _rotate(self.k_proj(x), self.k_norm, cos, sin)  # [B, T, kv_heads * D]
            key, value = self.attend.keys_and_values(key, self.v_proj(x))
            query = _rotate(self.q_proj(x), self.q_norm, cos, sin)  # [B, T, heads * D]
        elif self.q_norm is None or self.k_norm is None:
            query, key, value = project_qkv(self, x, cos, sin)
        else:
            query, key, value = project_qkv(self, x)
            query, key = self.q_norm(query, cos, sin), self.k_norm(key, cos, sin)
        mixed = self.attend(query, key, value, dropout_key, documents, cache)  # [B, T, heads * D]
        output: Tensor = self.o_proj(mixed)
        return output


def _rotate(heads: Tensor, norm: HeadNormRope | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to queries or keys, after a norm of each head where the model has one."""
    rotated: Tensor = kernels.rope(heads, cos, sin) if norm is None else norm(heads, cos, sin)
    return rotated


@row_independent
class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). One op computes gate and up, unless there is a bias, hook or adapter."""

    sharing_input = ("gate_proj", "up_proj")  # submodules whose input is this module's input

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]"""
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is None and up.bias is None and is_bare(gate) and is_bare(up):
            hidden = kernels.swiglu_linear(x, gate.weight, up.weight)
        else:
            hidden = kernels.swiglu(gate(x), up(x))
        output: Tensor = self.down_proj(hidden)
        return output


def add_and_norm(
    dropout: Dropout, norm: nn.Module, output: Tensor, residual: Tensor, key: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds a layer's output, after dropout, to the residual stream; returns (new stream, its norm).

    key: as for `Dropout.forward`; None where nothing is dropped.
    """
    if dropout.is_active:
        stream = dropout(output, key, residual=residual)
        return stream, norm(stream)
    stream, normed = norm(output, residual)
    return stream, normed


@row_independent
class Block(nn.Module):
    """One transformer block: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    name: the block's path in the model.
    """

    def __init__(self, attention: Attention, mlp: nn.Module, *, norm_eps: float, dropout: float, name: str) -> None:
        super().__init__()
        hidden_size = attention.o_proj.out_features
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.self_attn = attention
        self.self_attn_dropout = Dropout(dropout, f"{name}.self_attn_dropout")
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)
        self.mlp = mlp
        self.mlp_dropout = Dropout(dropout, f"{name}.mlp_dropout")

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """x [B, T, H] -> [B, T, H]. Further arguments: as for `Attention`."""
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, dropout_key, documents, cache)
        x, normed = add_and_norm(self.self_attn_dropout, self.post_attention_layernorm, mixed, x, dropout_key)
        return cast(Tensor, self.mlp_dropout(self.mlp(normed), dropout_key, residual=x))
