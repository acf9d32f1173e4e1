"""An op as a value: what it computes on local tensors, how its gradient flows, which layouts it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation of a model, on local tensors; `sharded.apply` runs it on plain tensors and on DTensors.

    forward(*tensors, **options) -> (output, saved): `saved` are the tensors that backward needs. An op of several outputs
        returns a tuple of them, and its backward is given a tuple of gradients, None for those that are zero.
    backward(saved, grad, needed, **options) -> gradients: one per tensor of forward; None where `needed[i]` is false.
        It is linear in `grad`, so a Partial gradient may flow through it. Without it torch differentiates forward, which then
        returns its output, or a tuple of them, alone.
    rule(layouts, shapes, options) -> Sharding: the layouts the op takes and gives; LayoutError for any other.
    dtype(dtype of the first floating tensor, options) -> that of the output: ranks outside the mesh have nothing else to ask.
    varying: options that differ from call to call; the rule, whose answers are kept, is not given them.
    inference(*tensors, **options) -> output: what forward computes where no gradient is recorded, and saves nothing; forward
        itself where None.
    constants(options) -> how many of the last outputs have no gradient.
    weights: positions of the tensors whose gradients are products of their own, and may be computed later; see `waiting_weights`.
    of_products(saved, grad, needed, **options) -> the gradients of what an activation is applied to, from which those of inputs and
        of weights are computed: `backward` is given them in place of `grad`. They are computed once, also where weights wait.
    again(saved, **options) -> the last output, from what forward saved, where that is cheap: what saves the output keeps those instead.
    again_from: the first of what forward saved that `again` is given.
    overwrites(options) -> whether backward puts the gradient of the first tensor in that tensor's memory.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Tensors] | None
    rule: Callable[..., Any]
    dtype: Callable[[torch.dtype, dict[str, Any]], torch.dtype] = lambda dtype, options: dtype
    inference: Callable[..., Any] | None = None
    varying: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    of_products: Callable[..., Any] | None = None
    again: Callable[..., Tensor] | None = None
    again_from: int = 0
    constants: Callable[[dict[str, Any]], int] = lambda options: 0
    overwrites: Callable[[dict[str, Any]], bool] = lambda options: False

    def infer(self, *tensors: Tensor | None, **options: Any) -> Any:
        """The output alone, where no gradient is recorded."""
        if self.inference is not None:
            return self.inference(*tensors, **options)
        output = self.forward(*tensors, **options)
        return output if self.backward is None else output[0]

    def __post_init__(self) -> None:
        OPS[self.name] = self


OPS: dict[str, Op] = {}  # by name, which is what a traced graph knows of them
