"""The layers that models are made of: torch's own modules, computed by Weft's ops."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache
from weft.kernels.order import Runs

Kind = TypeVar("Kind", bound=type[nn.Module])
ROWWISE: set[type[nn.Module]] = set()


def rowwise(kind: Kind) -> Kind:
    """A decorator of a class of modules that compute each row of a batch [B, T, ...] by itself, and communicate nothing.

    On a mesh that divides nothing but rows a block of such modules computes on local tensors. It is said of a class, not of those
    that are derived from it. Where a config lets a module read other rows, the module's `reads_other_rows` is True.
    """
    ROWWISE.add(kind)
    return kind


@rowwise
class Linear(nn.Linear):
    """nn.Linear whose parameters are left unset: `initialize` or a checkpoint fills them, once.

    unit: how many neighbours of the outputs stay together where they are sharded, as those of a head do.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, unit: int = 1) -> None:
        super().__init__(in_features, out_features, bias)
        self.unit = unit

    def reset_parameters(self) -> None:
        """Nothing: the values come later."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return kernels.linear(input, self.weight, self.bias)


@rowwise
class Embedding(nn.Embedding):
    """nn.Embedding whose table is left unset: `initialize` or a checkpoint fills it, once."""

    def reset_parameters(self) -> None:
        """Nothing: the values come later."""

    def forward(self, input: Tensor) -> Tensor:
        """tokens [...] -> [..., embedding_dim]"""
        return kernels.embedding(input, self.weight, padding_idx=self.padding_idx)


@rowwise
class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the last dim; its weight is left unset, as the other layers' are."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., size] -> [..., size]; with a residual of that shape (input + residual, norm of that), in one pass"""
        if residual is None:
            return kernels.rms_norm(input, self.weight, self.eps)
        return kernels.add_rms_norm(input, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@rowwise
class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over the last dim; its parameters are left unset too."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., size] -> [..., size]; with a residual of that shape (input + residual, norm of that), in one pass"""
        if residual is None:
            return kernels.layer_norm(input, self.weight, self.bias, self.eps)
        return kernels.add_layer_norm(input, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@rowwise
class HeadNorm(nn.Module):
    """An RMSNorm of each head alone, and the rotation of what it gives: of the last dim `size` elements, all heads by one weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., T, heads * size] -> [..., T, heads * size]. cos, sin: as of `kernels.rope`."""
        return kernels.rms_norm_rope(input, self.weight, cos, sin, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@rowwise
class Dropout(nn.Module):
    """Zeroes elements with probability p while training, by (key, name, global element index); see `kernels.dropout`.

    name: the module's own in the model, which tells its mask from those of other layers wherever it is run.
    The key comes with each call, as the arguments of a layer do, and is kept nowhere: what recomputes the layer later,
    when other microbatches have gone by, has the same arguments, and so the same mask.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p, self.name = p, name

    def forward(
        self, input: Tensor, key: int | Tensor | None, order: Runs | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[...] -> [...]; the input itself where p is 0, and in eval mode; with a residual, what that and this make together.

        key: of this step and microbatch; compiled, a tensor of one uint64 on the CPU. order, residual: as of `kernels.dropout`.
        Raises RuntimeError where elements are to be dropped and the key is None.
        """
        options = self.options(key)
        if not options:
            return input if residual is None else kernels.add(input, residual)
        p, key = options["dropout"], options["dropout_key"]
        return kernels.dropout(input, p, key, self.name, order=order, residual=residual)

    def options(self, key: int | Tensor | None) -> dict[str, Any]:
        """What `kernels.attention` is given, which drops its weights itself; nothing where p is 0, and in eval mode.

        Raises RuntimeError where elements are to be dropped and the key is None.
        """
        if not self.drops:
            return {}
        if key is None:
            raise RuntimeError(
                f"{self.name} drops elements with p={self.p} while training, but the model was given no key: call "
                f'model(tokens, dropout_key=derive_key(seed, "dropout", step)), or model.eval() first'
            )
        return {"dropout": self.p, "dropout_key": key, "dropout_name": self.name}

    @property
    def drops(self) -> bool:
        """Whether any element may be zeroed."""
        return self.p > 0 and self.training

    def extra_repr(self) -> str:
        return f"p={self.p}"


@rowwise
class KeysAndValues(nn.Module):
    """Keys and values on their way to the queries, as they are.

    A layer gives them here as soon as they are there, computes its queries, and hands what comes back on to its attention,
    unread: where they are brought from elsewhere, it is done meanwhile.
    """

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key and value [B, T, kv_heads * D]"""
        return key, value


@rowwise
class DotProductAttention(nn.Module):
    """Causal attention of queries to keys, between a layer's projections; it has no parameters.

    Keys and values may go through its `keys_and_values` before the queries are computed.
    window: how many of the last keys a query sees; all where None. scale: of the scores; 1 / sqrt(head_dim) where None.
    name: its own in the model.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        dropout: float = 0.0,
        window: int | None = None,
        scale: float | None = None,
        name: str,
    ) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale = head_dim, window, scale
        self.dropout = Dropout(dropout, f"{name}.dropout")
        self.keys_and_values = KeysAndValues()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        order: Runs | None = None,
    ) -> Tensor:
        """query [B, T, heads * D], key and value [B, T, kv_heads * D] -> [B, T, heads * D]; see `kernels.attention`."""
        options: dict[str, Any] = {"window": self.window, "scale": self.scale, **self.dropout.options(dropout_key)}
        options |= {"documents": documents, "cache": cache, "order": order}
        return kernels.attention(query, key, value, head_dim=self.head_dim, **options)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, window={self.window}, scale={self.scale}"


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def projects_at_once(attention: nn.Module) -> bool:
    """Whether an attention's PROJECTIONS may be one op: nobody sees them, or comes between keys and values and queries."""
    attend: Any = attention._modules["attend"]
    return all(map(is_bare, map(attention._modules.get, PROJECTIONS))) and is_bare(
        attend.keys_and_values, KeysAndValues
    )


def project_at_once(
    attention: nn.Module, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T, H] -> queries, keys and values of an attention that `projects_at_once`. cos, sin: as of `kernels.qkv_linear`."""
    layers: list[Any] = [attention._modules[name] for name in PROJECTIONS]
    return kernels.qkv_linear(x, *[each.weight for each in layers], *[each.bias for each in layers], cos=cos, sin=sin)


@rowwise
class Attention(nn.Module):
    """Causal attention with grouped queries and rotary positions.

    qk_norm_eps: of a norm over each head of queries and keys, before they are turned; no such norm where None.
    window: as of `DotProductAttention`. name: its own in the model.
    """

    sharing_input = PROJECTIONS  # the layers that are given what this module is given

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
        self.q_norm = None if qk_norm_eps is None else HeadNorm(head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else HeadNorm(head_dim, qk_norm_eps)
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
        """[B, T, H] -> [B, T, H]. cos, sin: as of `kernels.rope`. The others: as of `DotProductAttention`."""
        if not projects_at_once(self):
            key = _rotated(self.k_proj(x), self.k_norm, cos, sin)  # [B, T, kv_heads * D]
            key, value = self.attend.keys_and_values(key, self.v_proj(x))
            query = _rotated(self.q_proj(x), self.q_norm, cos, sin)  # [B, T, heads * D]
        elif self.q_norm is None or self.k_norm is None:
            query, key, value = project_at_once(self, x, cos, sin)
        else:
            query, key, value = project_at_once(self, x)
            query, key = self.q_norm(query, cos, sin), self.k_norm(key, cos, sin)
        mixed = self.attend(query, key, value, dropout_key, documents, cache)  # [B, T, heads * D]
        output: Tensor = self.o_proj(mixed)
        return output


def _rotated(heads: Tensor, norm: HeadNorm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys at their positions, normalised before where the model does so."""
    turned: Tensor = kernels.rope(heads, cos, sin) if norm is None else norm(heads, cos, sin)
    return turned


@rowwise
class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are computed together where nobody comes between."""

    sharing_input = ("gate_proj", "up_proj")  # the layers that are given what this module is given

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


def is_bare(layer: nn.Module | None, kind: type[nn.Module] = Linear) -> bool:
    """Whether a layer's call is no more than what its class computes: no hook or adapter, not another's class or forward.

    Then the call may be left out, and nobody misses it.
    """
    if type(layer) is not kind or "forward" in layer.__dict__:
        return False
    return not any(hooks_of(layer))


def hooks_of(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """What is called when the layer is, or when backward comes to it."""
    return layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks


def join(
    dropout: Dropout, norm: nn.Module, output: Tensor, residual: Tensor, key: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """A layer's output joins the residual stream: the stream, and its norm; in one pass, in two where elements are dropped."""
    if dropout.drops:
        stream = dropout(output, key, residual=residual)
        return stream, norm(stream)
    stream, normal = norm(output, residual)
    return stream, normal


@rowwise
class Block(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)); with dropout on what is added, as in GPT-2.

    name: the block's own in the model.
    """

    def __init__(self, attention: Attention, mlp: GatedMLP, *, norm_eps: float, dropout: float, name: str) -> None:
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
        """[B, T, H] -> [B, T, H]; the other arguments as of `Attention`."""
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, dropout_key, documents, cache)
        x, normal = join(self.self_attn_dropout, self.post_attention_layernorm, mixed, x, dropout_key)
        return cast(Tensor, self.mlp_dropout(self.mlp(normal), dropout_key, residual=x))
