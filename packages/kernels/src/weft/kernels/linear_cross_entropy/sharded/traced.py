"""linear_cross_entropy's custom ops on DTensors: unwrap the operands and run the same ops on local tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, library
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError
from weft.reshard import layout_of
from weft.reshard.running.dtensor import wrap

from ...cross_entropy.sharded.custom_ops import Place, place_and_options
from ...cross_entropy.sharded.traced import divided_by, place_of
from ...sharded.traced import Placed, to_local
from ..function import in_forward
from . import custom_ops
from .custom_ops import compiled
from .layouts import LINEAR_CROSS_ENTROPY

__all__ = ["compiled"]  # imported from here, where its ops are registered for DTensors

FACTORS = (0, 1, 3)  # input, linear_weight and linear_bias among the operands


def _forward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> list[Tensor]:
    *tensors, denominator, disagreement, flags, chunk_tokens, compute_dtype = args[:10]
    _, options = place_and_options(args[10:])
    placed = Placed.of(LINEAR_CROSS_ENTROPY, (*tensors, denominator), options=options, compute_dtype=compute_dtype)
    input, _, target, _, weight, _ = placed.locals
    assert input is not None, "the input is required"
    dtype = compute_dtype or input.dtype
    divisor = divided_by(denominator, target, weight, dtype, placed, options)
    rest = (disagreement, flags, chunk_tokens, compute_dtype, *place_of(placed), *options.flat())
    results = custom_ops.forward(*placed.locals[:5], divisor, *rest)
    count = options.outputs
    outputs, for_backward = placed.wrapped(results[:count]), results[count:]
    if in_forward(options, dtype, tuple(dtype if flag else None for flag in flags)):
        # the layout of a scalar's gradient: replicated
        layouts = placed.call.sharding.gradients(Layout(placed.call.sharding.output.mesh))
        for_backward = [
            placed.as_operand(i, part, layouts[i]) if want else part
            for i, part, want in zip(FACTORS, for_backward, flags, strict=True)
        ]
    elif denominator is None and divisor is not None:
        for_backward[0] = divisor
    return [*outputs, *for_backward]


def _backward(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> list[Tensor]:
    grads, tensors, needed, chunk_tokens, compute_dtype, *asked = args
    _, options = place_and_options(asked)
    arrived = [to_local(grad) for grad in grads]
    if len(tensors) == 4:  # the gradients computed in forward, and an empty tensor
        for layout in (layout_of(grad) for grad in grads if isinstance(grad, DTensor)):
            if layout != (replicated := Layout(layout.mesh)):
                raise LayoutError(
                    f"the gradient of the loss has layout ({layout}); reshard it to ({replicated})", (replicated,)
                )
        saved = [to_local(each) for each in tensors]
        gradients = custom_ops.backward(arrived, saved, needed, chunk_tokens, compute_dtype, *Place(), *options.flat())
        returned = [each for each, need in zip(tensors[1:], needed, strict=True) if need]
        return [
            wrap(part, layout_of(like), like.shape) if isinstance(like, DTensor) else part
            for part, like in zip(gradients, returned, strict=True)
        ]
    *operands, denominator, statistics = tensors
    placed = Placed.of(LINEAR_CROSS_ENTROPY, (*operands, denominator), options=options, compute_dtype=compute_dtype)
    rest = (chunk_tokens, compute_dtype, *place_of(placed), *options.flat())
    gradients = custom_ops.backward(arrived, [*placed.locals, statistics], needed, *rest)
    layouts, wanted = placed.gradients(*grads), [i for i, need in zip(FACTORS, needed, strict=True) if need]
    return [placed.as_operand(i, part, layouts[i]) for i, part in zip(wanted, gradients, strict=True)]


library.register_torch_dispatch(custom_ops.forward, DTensor, _forward)
library.register_torch_dispatch(custom_ops.backward, DTensor, _backward)
