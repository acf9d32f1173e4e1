"""The modules of LoRA adapters, attached to linear layers and to stacked experts."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels.extension import Op, Sharding, apply, infer_gradient_layouts, is_autocasting
from weft.mesh import Layout, LayoutError, Partial, infer

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # parameters of `experts.Experts` that may have adapters
_OPERANDS = ("x", "experts", "weights", *PROJECTIONS, *(f"lora.{name}.{leaf}" for name in PROJECTIONS for leaf in "AB"))


class Adapter(nn.Module):
    """Base class: A and B for an adapted weight [..., out_features, in_features], and the scale alpha / rank.

    On a mesh, B is sharded like the outputs of the weight and A like the inputs; both are sharded like the weight's
    leading dim, the experts.
    """

    active = True  # False within `without_adapters`: the adapted layer computes as without an adapter

    def __init__(self, a: Tensor, b: Tensor, alpha: float) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)  # [..., rank, in_features], [..., out_features, rank]
        self.scale = alpha / a.shape[-2]

    def extra_repr(self) -> str:
        return f"rank={self.A.shape[-2]}, scale={self.scale:g}"


class LowRank(Adapter):
    """A LoRA adapter: adds alpha / rank * (input @ A.T) @ B.T to a linear layer's output (Hu et al. 2022).

    The layer holds the adapter as submodule `lora`. The product has the layout of the layer's output, Partial
    included, and both are reduced together. If A and B have a wider dtype than the layer, for example float32 beside
    bfloat16, the input is cast to the wider dtype and the sum is cast back, as in peft.
    dropout: the probability with which an element of the adapter's input is zeroed while training, as in peft.
    name: the module's path in the model. Masks depend on the name, so adapters have different masks, equal on every
        mesh.
    """

    def __init__(self, a: Tensor, b: Tensor, alpha: float, dropout: float = 0.0, name: str = "lora") -> None:
        super().__init__(a, b, alpha)
        self.dropout, self.name = dropout, name
        # `key`, `order` and `orders` of `kernels.dropout` during a call of the module around the layer that takes
        # dropout_key; None otherwise. Set by `parallel.lora_targets`.
        self.mask: dict[str, Any] | None = None

    def forward(self, input: Tensor, output: Tensor) -> Tensor:
        """input [..., in_features], the layer's output [..., out_features] -> the output plus the adapter's product.

        Raises RuntimeError where elements would be dropped and the model was given no dropout_key.
        """
        added = kernels.linear(kernels.linear(self._drop(_cast(input, self.A)), self.A), self.B)
        return _cast(kernels.add(_cast(output, added), added, alpha=self.scale), output)

    def _drop(self, input: Tensor) -> Tensor:
        if not (self.dropout > 0 and self.training):
            return input
        if self.mask is None:
            raise RuntimeError(
                f"{self.name} drops elements with p={self.dropout} while training, but the model was given no key: "
                f'call model(tokens, dropout_key=derive_key(seed, "dropout", step)), or model.eval() first'
            )
        return kernels.dropout(input, self.dropout, name=self.name, **self.mask)

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", dropout={self.dropout:g}" if self.dropout else "")


class StackedLowRank(Adapter):
    """The adapters of a projection of `Experts`, for all E experts: A [E, rank, in], B [E, out, rank].

    `LowRankExperts`, the parent module, computes the product.
    """


class LowRankExperts(nn.Module):
    """The LoRA adapters of a module of experts, held as the submodule `lora`.

    For each name of `PROJECTIONS`, there is a submodule `StackedLowRank`, or None.
    """

    active = True  # as `Adapter.active`

    def __init__(self) -> None:
        super().__init__()
        for name in PROJECTIONS:
            self.register_module(name, None)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, rows: int | None
    ) -> Tensor:
        """The output of the adapted experts [..., H]. Arguments, layouts and communication: as for `kernels.experts`.

        A rank computes a projection and its adapter's product as grouped matmuls over the sorted rows. On a mesh A
        and B are laid out as `Adapter` says.
        """
        adapters: list[Any] = [getattr(self, name) for name in PROJECTIONS]
        factors = (None if each is None else getattr(each, leaf) for each in adapters for leaf in "AB")
        scales = tuple(0.0 if each is None else each.scale for each in adapters)
        return apply(ADAPTED_EXPERTS, x, experts, weights, gate, up, down, *factors, scales=scales, rows=rows)


def has_active_adapter(layer: nn.Module) -> bool:
    """Whether a linear layer or a module of experts has an adapter, and no `without_adapters` is entered."""
    adapter: Any = layer._modules.get("lora")
    return adapter is not None and adapter.active


def adapted_parameter(adapter: str) -> str:
    """The name of an adapter's weight.

    adapter: the name of an `Adapter`, as "q_proj.lora" or "experts.lora.gate_proj".
    """
    owner, _, projection = adapter.rpartition(".lora")
    return f"{owner}{projection or '.weight'}"


def _forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_a: Tensor | None,
    gate_b: Tensor | None,
    up_a: Tensor | None,
    up_b: Tensor | None,
    down_a: Tensor | None,
    down_b: Tensor | None,
    *,
    scales: tuple[float, ...],
    rows: int | None,
) -> Tensor:
    """The adapted experts on local tensors. Differentiated by torch, op by op."""
    count = len(gate)
    # Choices of experts outside get a group of their own, the last, whose rows stay zero.
    numbers = torch.where((experts >= 0) & (experts < count), experts, count)
    sorted_x, ends = kernels.dispatch(x, numbers, num_experts=count + 1)
    total = len(sorted_x)
    size = total if rows is None else min(rows, total)
    sorted_x, offsets = sorted_x[:size], ends[:count].clamp(max=size)
    hidden = kernels.swiglu(
        _project(sorted_x, gate, offsets, gate_a, gate_b, scales[0]),
        _project(sorted_x, up, offsets, up_a, up_b, scales[1]),
    )  # [size, I]
    y = _project(hidden, down, offsets, down_a, down_b, scales[2])
    if size < total:
        y = nn.functional.pad(y, (0, 0, 0, total - size))
    return kernels.combine(y, numbers, weights)


def _project(rows: Tensor, weight: Tensor, offsets: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    """rows [n, in] sorted by expert, weight [E, out, in] -> [n, out], with the adapter's product added.

    Product and sum have dtypes as in `LowRank`.
    """
    output = kernels.grouped_matmul(rows, weight.mT, offsets)
    if a is None or b is None:
        return output
    inner = kernels.grouped_matmul(_cast(rows, a), a.mT, offsets)  # [n, rank]
    return _cast(kernels.grouped_matmul(inner, b.mT, offsets, alpha=scale, residual=_cast(output, inner)), output)


def _rule(
    layouts: tuple[Layout | None, ...], shapes: tuple[tuple[int, ...] | None, ...], options: dict[str, Any]
) -> Sharding:
    """As for `kernels.experts`: tokens may be sharded, or the features I inside each expert."""
    shape = shapes[0]
    assert shape is not None, "apply passes all"
    lead = ascii_lowercase[: len(shape) - 1]  # the tokens' dims
    terms = (f"{lead}x", f"{lead}k", f"{lead}k", "eix", "eix", "eyi", "erx", "eir", "erx", "eir", "eri", "eyr")
    operands = [
        (name, term, layout) for name, term, layout in zip(_OPERANDS, terms, layouts, strict=True) if layout is not None
    ]
    for name, term, layout in operands:
        refused = [
            axis
            for axis in layout.mesh.axis_names
            if isinstance(layout[axis], Partial)
            or any(axis in axes and term[dim] not in f"{lead}i" for dim, axes in layout.shard_order.items())
        ]
        if refused:
            remedy = layout.replace(**dict.fromkeys(refused, "R"))
            raise LayoutError(
                f"experts with adapters: {name} is ({layout}), and only tokens or the features inside an expert may be "
                f"sharded; reshard {name} to ({remedy})",
                (remedy,),
            )
    output = infer.einsum(
        f"{','.join(term for _, term, _ in operands)}->{lead}y",
        *(layout for _, _, layout in operands),
        name="experts with adapters",
        operands=tuple(name for name, _, _ in operands),
    )
    return Sharding(output, shape, infer_gradient_layouts(output, layouts))


def _cast(x: Tensor, like: Tensor) -> Tensor:
    """Casts x to the dtype of `like`; leaves x unchanged under autocast, which casts by itself."""
    return x if x.dtype == like.dtype or is_autocasting() else x.to(like.dtype)


ADAPTED_EXPERTS = Op("experts with adapters", _forward, None, _rule)
