"""`Op`: an operation's local computation, its backward and its layout rule, in a single value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation of a model, made once as a constant. `sharded.apply` runs it on plain tensors and DTensors.

    Every function below is called with local tensors, and with these values:
    saved: the tensors saved by `forward` for backward.
    grad: the gradient of the output, or a tuple with one for each output, None where it is zero.
    needed: for each operand, whether its gradient is required.
    options: the keyword arguments of the call.
    """

    # The key in OPS, and the name in error messages.
    name: str
    # (*operands, **options) -> (output, saved). Several outputs are a tuple.
    forward: Callable[..., Any]
    # (saved, grad, needed, **options) -> one gradient for each operand, None where `needed` is false. Linear in `grad`,
    # because a Partial gradient may flow through. None: torch differentiates `forward`, which then returns the
    # output or outputs alone, without `saved`.
    backward: Callable[..., Tensors] | None
    # (layouts, shapes, options) -> `Sharding`. Raises LayoutError for layouts the op cannot take.
    rule: Callable[..., Any]
    # (dtype of the first floating operand, options) -> dtype of the output. Asked on ranks outside the mesh.
    dtype: Callable[[torch.dtype, dict[str, Any]], torch.dtype] = lambda dtype, options: dtype
    # (*operands, **options) -> output. Called when no gradient is recorded; saves nothing. None: `forward` is called.
    inference: Callable[..., Any] | None = None
    # Names of options with another value in each call. The rule does not receive them, since its answers are cached.
    varying: tuple[str, ...] = ()
    # Positions of the weights. Their gradients are matrix products of their own, which `waiting_weights` can delay.
    weights: tuple[int, ...] = ()
    # (saved, grad, needed, **options) -> the gradient before a fused epilogue (activation, gate, rope, residual), which
    # `backward` receives as `grad`. Computed once, also when the gradients of the weights are delayed.
    epilogue_backward: Callable[..., Any] | None = None
    # (saved[recompute_from:], **options) -> the last output, if recomputing is cheap: see `remade_activations.py`.
    recompute: Callable[..., Tensor] | None = None
    recompute_from: int = 0
    # (options) -> how many outputs at the end have no gradient.
    constants: Callable[[dict[str, Any]], int] = lambda options: 0
    # (options) -> whether backward writes the first operand's gradient into the operand's own memory.
    overwrites: Callable[[dict[str, Any]], bool] = lambda options: False

    def infer(self, *tensors: Tensor | None, **options: Any) -> Any:
        """The output or outputs alone. Called when no gradient is recorded."""
        if self.inference is not None:
            return self.inference(*tensors, **options)
        output = self.forward(*tensors, **options)
        return output if self.backward is None else output[0]

    def __post_init__(self) -> None:
        OPS[self.name] = self


OPS: dict[str, Op] = {}  # by name: a traced graph holds the names of ops alone
