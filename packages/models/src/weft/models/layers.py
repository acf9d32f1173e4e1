"""The layers of the model families: modules with torch's parameters and names, computed by Weft's ops."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache
from weft.kernels.extension import ReceivedKeys, Runs, attention_to_received

Kind = TypeVar("Kind", bound=type[nn.Module])
ROWWISE: set[type[nn.Module]] = set()


def rowwise(kind: Kind) -> Kind:
    """Class decorator for modules that compute each row of a batch [B, T, ...] independently and communicate nothing.

    On a mesh with data axes only, a block of such modules runs on local tensors (`parallel.rows`). Subclasses are not
    included; decorate them too. Where the config makes a module's rows depend on each other, the module's
    `reads_other_rows` is True.
    """
    ROWWISE.add(kind)
    return kind


@rowwise
class Linear(nn.Linear):
    """nn.Linear without initial values: `initialize` or a checkpoint fills the parameters, once.

    unit: sharding the outputs never splits a group of `unit` consecutive outputs, such as the elements of one head.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, unit: int = 1) -> None:
        super().__init__(in_features, out_features, bias)
        self.unit = unit

    def reset_parameters(self) -> None:
        """Leaves the parameters unset."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return kernels.linear(input, self.weight, self.bias)


@rowwise
class Embedding(nn.Embedding):
    """nn.Embedding without initial values: `initialize` or a checkpoint fills the table, once."""

    def reset_parameters(self) -> None:
        """Leaves the table unset."""

    def forward(self, input: Tensor) -> Tensor:
        """tokens [...] -> [..., embedding_dim]"""
        return kernels.embedding(input, self.weight, padding_idx=self.padding_idx)


@rowwise
class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the last dim. The weight starts unset, as `Linear`'s."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., size] -> [..., size]. With a residual of this shape: (input + residual, its norm), in one pass."""
        if residual is None:
            return kernels.rms_norm(input, self.weight, self.eps)
        return kernels.add_rms_norm(input, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@rowwise
class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over the last dim. Parameters start unset."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., size] -> [..., size]. With a residual of this shape: (input + residual, its norm), in one pass."""
        if residual is None:
            return kernels.layer_norm(input, self.weight, self.bias, self.eps)
        return kernels.add_layer_norm(input, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@rowwise
class HeadNorm(nn.Module):
    """RMS norm of each head, then rotary embedding, in one op. All heads of `size` elements share one weight [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., T, heads * size] -> [..., T, heads * size]. cos, sin: as for `kernels.rope`."""
        return kernels.rms_norm_rope(input, self.weight, cos, sin, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@rowwise
class Dropout(nn.Module):
    """Dropout with a mask by (key, name, global element index), the same on every mesh; see `kernels.dropout`.

    name: the module's path in the model; gives each layer a mask of its own.
    The key is an argument of every call and is not stored. Recomputing a layer later, after further microbatches,
    therefore draws the same mask.
    """

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p, self.name = p, name

    def forward(
        self,
        input: Tensor,
        key: int | Tensor | None,
        order: Runs | None = None,
        residual: Tensor | None = None,
        orders: tuple[Runs, ...] | None = None,
    ) -> Tensor:
        """[...] -> [...]: the input with dropout, plus `residual` if given. No dropout if p is 0, and in eval mode.

        key: of this step and microbatch; under torch.compile a CPU tensor of one uint64.
        order, residual, orders: as for `kernels.dropout`.
        Raises RuntimeError where elements would be dropped and the key is None.
        """
        options = self.options(key)
        if not options:
            return input if residual is None else kernels.add(input, residual)
        p, key = options["dropout"], options["dropout_key"]
        return kernels.dropout(input, p, key, self.name, order=order, orders=orders, residual=residual)

    def options(self, key: int | Tensor | None) -> dict[str, Any]:
        """The dropout arguments of `kernels.attention`, which drops attention weights itself. Empty without dropout.

        Raises RuntimeError where elements would be dropped and the key is None.
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
        """Whether this call may zero elements: p is above 0, and the module is in training mode."""
        return self.p > 0 and self.training

    def extra_repr(self) -> str:
        return f"p={self.p}"


@rowwise
class KeysAndValues(nn.Module):
    """The identity on keys and values: a place for hooks between their computation and their use.

    A layer calls this module as soon as keys and values exist, then computes queries, then passes the returned
    tensors on to attention. Context parallelism starts the all-gather of keys and values here, overlapped with the
    queries' projection.
    """

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key and value [B, T, kv_heads * D], returned unchanged."""
        return key, value


@rowwise
class DotProductAttention(nn.Module):
    """Causal attention without parameters: the part of an attention layer between its projections.

    A layer may pass keys and values through `keys_and_values` before computing its queries.
    window: the number of most recent keys visible to a query, its own included; None: all.
    scale: multiplies the scores; None: 1 / sqrt(head_dim).
    name: the module's path in the model.
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
        received: ReceivedKeys | None = None,
    ) -> Tensor:
        """query [B, T, heads * D], key and value [B, T, kv_heads * D] -> [B, T, heads * D]; see `kernels.attention`.

        received: under context parallelism by documents, the keys and values on their way from other ranks. The window
        and the documents are then in them.
        """
        options: dict[str, Any] = {"scale": self.scale, **self.dropout.options(dropout_key)}
        if received is not None:
            return attention_to_received(query, key, value, received, head_dim=self.head_dim, **options)
        options["window"] = self.window
        options |= {"documents": documents, "cache": cache, "order": order}
        return kernels.attention(query, key, value, head_dim=self.head_dim, **options)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, window={self.window}, scale={self.scale}"


PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def projects_at_once(attention: nn.Module) -> bool:
    """Whether one op may compute q, k and v: no projection has a hook or adapter, and `keys_and_values` has no hook."""
    attend: Any = attention._modules["attend"]
    return all(map(is_bare, map(attention._modules.get, PROJECTIONS))) and is_bare(
        attend.keys_and_values, KeysAndValues
    )


def project_at_once(
    attention: nn.Module, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, H] -> queries, keys, values in one op; see `projects_at_once`. cos, sin: as for `kernels.qkv_linear`."""
    layers: list[Any] = [attention._modules[name] for name in PROJECTIONS]
    return kernels.qkv_linear(x, *[each.weight for each in layers], *[each.bias for each in layers], cos=cos, sin=sin)


@rowwise
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
        """x [B, T, H] -> [B, T, H]. cos, sin: as for `kernels.rope`; the rest: as for `DotProductAttention`."""
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
    """Applies rotary embedding to queries or keys, after a norm of each head where the model has one."""
    turned: Tensor = kernels.rope(heads, cos, sin) if norm is None else norm(heads, cos, sin)
    return turned


@rowwise
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


def is_bare(layer: nn.Module | None, kind: type[nn.Module] = Linear) -> bool:
    """Whether calling `layer` does no more than `kind.forward`: same class, and no hook, adapter or own forward.

    The caller may then use the layer's parameters directly, in a fused op, instead of calling the layer.
    """
    if type(layer) is not kind or "forward" in layer.__dict__:
        return False
    return not any(hooks_of(layer))


def hooks_of(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """The layer's forward and backward hooks, as torch stores them: four dicts."""
    return layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks


def join(
    dropout: Dropout, norm: nn.Module, output: Tensor, residual: Tensor, key: int | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds a layer's output to the residual stream: (stream, norm(stream)). One pass without dropout, else two."""
    if dropout.drops:
        stream = dropout(output, key, residual=residual)
        return stream, norm(stream)
    stream, normal = norm(output, residual)
    return stream, normal


@rowwise
class Block(nn.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)), with dropout on both addends as in GPT-2.

    name: the block's path in the model.
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
        """x [B, T, H] -> [B, T, H]. Further arguments: as for `Attention`."""
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, dropout_key, documents, cache)
        x, normal = join(self.self_attn_dropout, self.post_attention_layernorm, mixed, x, dropout_key)
        return cast(Tensor, self.mlp_dropout(self.mlp(normal), dropout_key, residual=x))
