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
    """One operation of a model. `sharded.apply` runs it on plain tensors and DTensors.

    Each op is made once: a constant of its module, or one for each function decorated by `on_local_tensors`.

    The comments on the fields name these arguments. `forward`, `backward`, `inference`, `epilogue_backward` and
    `recompute` receive local tensors.
    saved: the tensors saved by `forward` for backward.
    grad: the output's gradient. If `forward` returns a tuple, a tuple of gradients, in which None stands for zeros.
    needed: for each operand, whether its gradient is required.
    options: the keyword arguments of the call. On DTensors, the functions of local tensors also get this rank's
        options from `Sharding.local`. `rule` does not get the `varying` options.
    """

    # The key in OPS, and the name in error messages.
    name: str
    # (*operands, **options) -> (output, saved). Several outputs are a tuple.
    forward: Callable[..., Any]
    # (saved, grad, needed, **options) -> one gradient for each operand, None where `needed` is false. Must be linear in
    # `grad`: each rank may pass its own addend of a Partial(sum) gradient. If the field is None, torch differentiates
    # `forward`, and `forward` returns its output without `saved`.
    backward: Callable[..., Tensors] | None
    # (layouts, shapes, options) -> `Sharding`. Raises LayoutError for layouts the op cannot take.
    rule: Callable[..., Any]
    # (dtype of the first floating operand, options) -> dtype of the output. Called only on ranks outside the
    # mesh, to make empty outputs.
    dtype: Callable[[torch.dtype, dict[str, Any]], torch.dtype] = lambda dtype, options: dtype
    # (*operands, **options) -> output. Called when grad mode is off. If None, `forward` is called instead.
    inference: Callable[..., Any] | None = None
    # Names of options whose values differ from call to call. They are left out of the cache key, so the rule does not
    # receive them.
    varying: tuple[str, ...] = ()
    # Positions of the weights and biases whose gradients `waiting_weights` can delay.
    weights: tuple[int, ...] = ()
    # (saved, grad, needed, **options) -> the gradient of the matrix product's result, before the fused epilogue
    # (activation, gate, rope, residual). `backward` receives this gradient as `grad`. Called once per backward pass: a
    # delayed weight gradient reuses the result.
    epilogue_backward: Callable[..., Any] | None = None
    # (saved[recompute_from:], **options) -> the last output, if recomputing is cheap: see `remade_activations.py`.
    recompute: Callable[..., Tensor] | None = None
    recompute_from: int = 0
    # (options) -> how many outputs at the end have no gradient.
    constants: Callable[[dict[str, Any]], int] = lambda options: 0
    # (options) -> whether backward writes the first operand's gradient into the operand's own memory.
    overwrites: Callable[[dict[str, Any]], bool] = lambda options: False

    def infer(self, *tensors: Tensor | None, **options: Any) -> Any:
        """The output or outputs, without saved tensors. Called when grad mode is off."""
        if self.inference is not None:
            return self.inference(*tensors, **options)
        output = self.forward(*tensors, **options)
        return output if self.backward is None else output[0]

    def __post_init__(self) -> None:
        OPS[self.name] = self


OPS: dict[str, Op] = {}  # by name: a traced graph stores only names
