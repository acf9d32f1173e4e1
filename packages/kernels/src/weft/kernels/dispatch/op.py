"""`Op`: an operation's local computation, backward and layout rule, in a single value. `observing` sees all calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]
OpPart = Literal["forward", "backward", "inference", "epilogue_backward", "recompute"]
OP_PARTS: tuple[OpPart, ...] = ("forward", "backward", "inference", "epilogue_backward", "recompute")
# A listener is called as listener(op, part, function, *arguments, **options). `function` is the field `part` of the op,
# and takes the arguments and options. The listener must call the function and return the result.
Listener = Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation of a model. `sharded.apply` runs an op on plain tensors and DTensors.

    Each op is made once: a constant of a module, or made for a function by the decorator `on_local_tensors`.

    `forward`, `backward`, `inference`, `epilogue_backward` and `recompute` are functions of local tensors. Where a
    field is a function, the field's text gives arguments and result. In these texts
    operands: the tensors of the call, in order; None for an operand left out.
    options: the keyword arguments of the call. On DTensors, the functions of local tensors receive the options of
        `Sharding.local_options` as well, which differ from rank to rank.
    saved: the tensors saved by `forward` for backward.
    grad: the output's gradient. If the op has several outputs, a tuple of gradients, in which None stands for zeros.
    needed: for each operand, whether the gradient is required.

    A call with the option `inplace=True` allows `forward` to write the output into the first operand and return this
    operand.
    """

    #: the key in OPS, and the name in error messages
    name: str
    #: (*operands, **options) -> (output, saved). Several outputs are a tuple.
    forward: Callable[..., Any]
    #: (saved, grad, needed, **options) -> a gradient for each operand, None where `needed` is false. Must be linear in
    #: `grad`: each rank may pass an addend of a Partial(sum) gradient. If the field is None, torch differentiates
    #: `forward`, and `forward` returns the output without `saved`.
    backward: Callable[..., Tensors] | None
    #: (layouts, shapes, options) -> `Sharding`. The layouts and global shapes are the operands'; None for an operand
    #: left out. The options are the call's, without the `varying` options. Raises LayoutError for layouts the op cannot
    #: take.
    rule: Callable[..., Any]
    #: (dtype of the first floating operand, options) -> dtype of the outputs, or a tuple with the dtype of each. Called
    #: only on ranks outside the mesh, to make empty outputs.
    dtype: Callable[[torch.dtype, dict[str, Any]], torch.dtype | tuple[torch.dtype, ...]] = lambda dtype, options: dtype
    #: (*operands, **options) -> output. Called by `compute_outputs`. If None, `forward` is called instead.
    inference: Callable[..., Any] | None = None
    #: names of options whose values differ from call to call. The cache key lacks these options, and the rule does not
    #: receive them.
    varying: tuple[str, ...] = ()
    #: positions of the weights and biases whose gradients can be delayed: see `delayed_weight_gradients.py`
    weights: tuple[int, ...] = ()
    #: only for a matrix product with a fused epilogue (activation, gate, rope, residual): the epilogue's own backward.
    #: (saved, grad, needed, **options) -> the gradient of the product before the epilogue. `backward` then receives
    #: this gradient as `grad`. Called once per backward pass: a delayed weight gradient reuses the result.
    epilogue_backward: Callable[..., Any] | None = None
    #: (saved[recompute_from:], **options) -> the last output, if recomputing is cheap: see `recomputed_activations.py`
    recompute: Callable[..., Tensor] | None = None
    #: the position in `saved` of the first tensor which `recompute` needs
    recompute_from: int = 0
    #: (options) -> the number of outputs without a gradient, which are the last
    num_constants: Callable[[dict[str, Any]], int] = lambda options: 0
    #: (options) -> whether backward writes the first operand's gradient into the operand's own memory
    overwrites: Callable[[dict[str, Any]], bool] = lambda options: False

    def compute_outputs(self, *operands: Tensor | None, **options: Any) -> Any:
        """Return the output or outputs, without saved tensors.

        Called where `backward` will not run: with grad mode off, and on plain tensors under torch.compile if no operand
        needs a gradient. Also called if `backward` is None, on plain tensors, where torch may differentiate the result,
        and inside `exact_sums`, where no operand needs a gradient.
        """
        if self.inference is not None:
            return self.inference(*operands, **options)
        output = self.forward(*operands, **options)
        return output if self.backward is None else output[0]

    def __post_init__(self) -> None:
        OPS[self.name] = self  # replaces an op of the same name, as when a notebook decorates a function again


OPS: dict[str, Op] = {}  # by name: a traced graph stores only names


@contextmanager
def observing(listener: Listener) -> Iterator[None]:
    """Inside, in this process, the listener is called in place of each function of each op.

    Entered by `weft.models`: to predict the time of a step, to follow the storages of a step, and to note each module's
    ops for `compare`.
    Tensors are local: an op on DTensors unwraps before the call. Calls nest where an op's function calls another op.
    Contexts must not be nested, nor run in several threads. Ops which are declared inside are not observed.
    """
    functions: dict[Op, dict[OpPart, Any]] = {op: {part: getattr(op, part) for part in OP_PARTS} for op in OPS.values()}
    try:
        for op, parts in functions.items():
            for part, function in parts.items():
                if function is not None:
                    object.__setattr__(op, part, partial(listener, op, part, function))
        yield
    finally:
        for op, parts in functions.items():
            for part, function in parts.items():
                object.__setattr__(op, part, function)
