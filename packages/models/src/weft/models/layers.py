"""The layers of the model families: modules with torch's parameters and names, computed by Weft's ops."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache
from weft.kernels.extension import ReceivedKeys, Runs, attention_to_received, dropout_by_row

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])
ROW_INDEPENDENT: set[type[nn.Module]] = set()


def row_independent(cls: ModuleClass) -> ModuleClass:
    """Class decorator for modules that compute each row of a batch [B, T, ...] independently and communicate nothing.

    A row is a sequence of the batch. The decorator adds the class, without subclasses, to ROW_INDEPENDENT.
    `parallel.local_modules` reads the set: on a mesh with data axes only, a block of these modules runs on local
    tensors. A class whose rows depend on each other under some configs also has a property `reads_other_rows`, True
    under these configs; see `decoder.Decoder`.
    """
    ROW_INDEPENDENT.add(cls)
    return cls


@row_independent
class Linear(nn.Linear):
    """nn.Linear whose constructor leaves the parameters unset, for `models.initialize` or a checkpoint to fill.

    unit: sharding the outputs never splits a group of `unit` consecutive outputs: the elements of a head, in the
        projections of attention. Read by `layers_with_few_heads`, by context parallelism, and by Muon.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, unit: int = 1) -> None:
        super().__init__(in_features, out_features, bias)
        self.unit = unit

    def reset_parameters(self) -> None:
        """Leaves the parameters unset. Called by the constructor of nn.Linear."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]"""
        return kernels.linear(input, self.weight, self.bias)


@row_independent
class Head(Linear):
    """The last layer of a language model: logits, or the tokens' losses without all logits in memory."""

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """[B, T, in_features] -> logits [B, T, V]; with targets [B, T], losses [B, T], as in `losses`."""
        return super().forward(input) if targets is None else self.losses(input, targets)

    def losses(self, input: Tensor, targets: Tensor) -> Tensor:
        """The tokens' negative log-probabilities [B, T], at least float32; 0 where the target is -100.

        Called by `forward`, and in place of `forward` by sequence parallelism with the gather of tokens in the product.
        On a mesh, input and targets have the same layout along B and T, and the losses have the targets' layout.
        Communication: as of `kernels.linear_cross_entropy`.
        """
        return kernels.linear_cross_entropy(input, self.weight, targets, linear_bias=self.bias, reduction="none")


@row_independent
class Embedding(nn.Embedding):
    """nn.Embedding whose constructor leaves the table unset, for `models.initialize` or a checkpoint to fill."""

    def reset_parameters(self) -> None:
        """Leaves the table unset. Called by the constructor of nn.Embedding."""

    def forward(self, input: Tensor) -> Tensor:
        """tokens [...] -> [..., embedding_dim]"""
        return kernels.embedding(input, self.weight, padding_idx=self.padding_idx)


@row_independent
class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight, over the last dim. The weight starts unset, as `Linear`'s."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., size] -> [..., size]. With a residual of this shape: the pair (sum, norm of the sum), in one op."""
        if residual is None:
            return kernels.rms_norm(input, self.weight, self.eps)
        return kernels.add_rms_norm(input, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@row_independent
class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over the last dim. Parameters start unset."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """[..., size] -> [..., size]. With a residual of this shape: the pair (sum, norm of the sum), in one op."""
        if residual is None:
            return kernels.layer_norm(input, self.weight, self.bias, self.eps)
        return kernels.add_layer_norm(input, residual, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@row_independent
class HeadNormRope(nn.Module):
    """RMS norm of each head, then rotary embedding, in one op. All heads of `size` elements share a weight [size].

    Used by `blocks.Attention` for queries and for keys, in models that normalize both (qk_norm_eps).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., T, heads * size] -> [..., T, heads * size]. cos, sin: [T, size // 2] or [B, T, size // 2]."""
        return kernels.rms_norm_rope(input, self.weight, cos, sin, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


@row_independent
class Dropout(nn.Module):
    """Dropout with a mask by (key, name, global element index), the same on every mesh; see `kernels.dropout`.

    name: the module's path in the model, by which each layer has a different mask.
    The module stores no key: every call gets the key as an argument. Activation recomputation calls the layer again
    with the key of the first call, and draws the same mask, also after calls with another key.
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
        order: in which the tokens (dim -2) are stored, None for reading order; see `Batch.order`. Masks do not change.
        orders: an order for each row, in place of `order`, for rows cut by documents. Layers give neither: the pre-hook
            of context parallelism adds `order` or `orders`. residual: of the input's shape.
        Raises RuntimeError where elements would be dropped and the key is None.
        """
        if not self.is_active:
            return input if residual is None else kernels.add(input, residual)
        drop = kernels.dropout if orders is None else dropout_by_row
        return drop(input, self.p, self._require(key), self.name, order=order, orders=orders, residual=residual)

    def attention_options(self, key: int | Tensor | None) -> dict[str, Any]:
        """Keyword arguments for `kernels.attention`, which drops attention weights itself. Empty without dropout.

        Called by `DotProductAttention.forward`, in place of this module.
        Raises RuntimeError where elements would be dropped and the key is None.
        """
        if not self.is_active:
            return {}
        return {"dropout": self.p, "dropout_key": self._require(key), "dropout_name": self.name}

    def _require(self, key: int | Tensor | None) -> int | Tensor:
        """`key`. Raises RuntimeError for None."""
        if key is None:
            raise RuntimeError(
                f"{self.name} drops elements with p={self.p} while training, but the model was given no key: call "
                f'model(tokens, dropout_key=derive_key(seed, "dropout", step)), or model.eval() first'
            )
        return key

    @property
    def is_active(self) -> bool:
        """Whether calls zero elements now: p is above 0, and the module is in training mode."""
        return self.p > 0 and self.training

    def extra_repr(self) -> str:
        return f"p={self.p}"


@row_independent
class KeysAndValues(nn.Module):
    """The identity on keys and values: a place for hooks between their computation and their use.

    A layer calls this module as soon as keys and values exist, then computes queries, then passes the returned
    tensors on to attention. Context parallelism starts the all-gather of keys and values here, overlapped with the
    queries' projection.
    """

    def forward(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key and value [B, T, kv_heads * D], returned unchanged."""
        return key, value


@row_independent
class DotProductAttention(nn.Module):
    """Causal attention without parameters, from projected queries, keys and values to the output projection's input.

    A layer may pass keys and values through `keys_and_values` before computing its queries.
    window: the number of most recent keys visible to a query, its own included; None: all.
    scale: multiplies the scores; None: 1 / sqrt(head_dim). softcap: bounds the scores, as in Gemma 2; None: no bound.
    name: the module's path in the model.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        dropout: float = 0.0,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        name: str,
    ) -> None:
        super().__init__()
        self.head_dim, self.window, self.scale, self.softcap = head_dim, window, scale, softcap
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [B, T, heads * D], key and value [B, T, kv_heads * D] -> [B, T, heads * D], by `kernels.attention`.

        dropout_key: as `key` of `Dropout.forward`; None where no weight is dropped, as in evaluation.
        documents: [B, T] ints, the number of each token's document; tokens attend within their document only. With a
            cache: [B, capacity]. None: every row is one document.
        cache: keys and values of earlier tokens; extended by this call's. None: the call has all tokens.
        order: as for `Dropout.forward`.
        received: keys and values on their way from the ranks along "cp", where rows are cut by documents. This object
            also states which keys each query sees, so window and documents are not used. A hook of context parallelism
            gives `order` or `received`; layers do not. None for both: the tokens are in reading order, and this rank
            has all keys.
        sinks: [heads], a learned logit of each head, as in gpt-oss; a parameter of the layer, sharded as its heads.
            None: a layer without sinks.
        """
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "sinks": sinks}
        options |= self.dropout.attention_options(dropout_key)
        if received is not None:
            return attention_to_received(query, key, value, received, head_dim=self.head_dim, **options)
        options |= {"window": self.window, "documents": documents, "cache": cache, "order": order}
        return kernels.attention(query, key, value, head_dim=self.head_dim, **options)

    def extra_repr(self) -> str:
        softcap = "" if self.softcap is None else f", softcap={self.softcap}"
        return f"head_dim={self.head_dim}, window={self.window}, scale={self.scale}{softcap}"


def embedding_tables(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of all nn.Embedding in a model; a table may also be a head's weight.

    Called to treat tables apart, by Muon, by the count of multiplying weights, and by the prediction of memory.
    """
    return {each for module in model.modules() if isinstance(module, nn.Embedding) for each in module.parameters()}


def is_bare(layer: nn.Module | None, kind: type[nn.Module] = Linear) -> bool:
    """Whether calling `layer` does no more than `kind.forward`: same class, and no hook, adapter or own forward.

    Called in forward by attention and MLP. If True, the caller may use the layer's parameters directly, in a fused op,
    instead of calling the layer. An adapter within `without_adapters` does not count.
    layer: None is not bare. kind: the exact class, without subclasses.
    """
    if type(layer) is not kind or "forward" in layer.__dict__:
        return False
    return not any(hooks_of(layer)) or _has_inactive_adapter_alone(layer)


def _has_inactive_adapter_alone(layer: nn.Module) -> bool:
    """Whether the layer's single hook is the hook of a LoRA adapter that adds nothing now."""
    adapter: Any = layer._modules.get("lora")
    if adapter is None or adapter.active:
        return False
    return len(layer._forward_hooks) == 1 and not any((*hooks_of(layer)[:1], *hooks_of(layer)[2:]))


def hooks_of(layer: nn.Module) -> tuple[dict[int, Any], ...]:
    """The layer's hooks as torch stores hooks, four dicts: forward pre, forward, backward pre, backward.

    Called by `is_bare`, and by `local_modules` to find hooks added later.
    """
    return layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks
