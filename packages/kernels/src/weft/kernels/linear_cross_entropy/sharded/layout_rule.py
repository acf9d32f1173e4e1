"""Linear cross-entropy as an `Op` on DTensors: the layout rules of the matrix product and of cross-entropy,
combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError

from ...cross_entropy.options import Options
from ...cross_entropy.sharded.layout_rule import CROSS_ENTROPY
from ...dispatch.op import Op, Tensors
from ...dispatch.sharded import Shapes, Sharding
from ...matmul.sharded.product import LINEAR
from .. import function
from ..gradients import is_last_use


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, arguments: dict[str, Any]) -> Sharding:
    """The layout rule of `LINEAR_CROSS_ENTROPY`.

    layouts, shapes: of input, linear_weight, target, linear_bias, weight and denominator.
    """
    input, linear_weight, target, linear_bias, weight, _ = layouts
    input_shape, weight_shape, target_shape, bias_shape, _, denominator = shapes
    assert input is not None and linear_weight is not None and input_shape and weight_shape, "both are given"
    product: Sharding = LINEAR.rule((input, linear_weight, linear_bias), (input_shape, weight_shape, bias_shape), {})
    if input.is_partial() or linear_weight.is_partial():
        raise LayoutError(
            f"linear_cross_entropy is not linear in input ({input}) and linear_weight ({linear_weight}); reshard "
            f"Partial operands first"
        )
    if product.output.is_partial():
        raise LayoutError(
            f"linear_cross_entropy has input ({input}) and linear_weight ({linear_weight}), whose logits would "
            f"have layout ({product.output}); reshard both so that H is not sharded"
        )
    logits = (product.output, target, weight, None)
    loss: Sharding = CROSS_ENTROPY.rule(logits, (product.shape, target_shape, None, denominator), arguments)

    def gradient_layouts(*grads: Layout | None) -> tuple[Layout | None, ...]:
        dlogits, *_ = loss.gradient_layouts(*grads)
        assert dlogits is not None, "one of the outputs has a gradient"
        dinput, dweight, dbias = product.gradient_layouts(dlogits)
        return dinput, dweight, None, dbias, None, None

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        axes = product.output.shard_order.get(len(product.shape) - 1, ())
        return {**loss.local_options(rank, mesh), "shards": product.output.mesh.axis_size(*axes)}

    return Sharding(loss.output, loss.shape, gradient_layouts, local_options, loss.further_outputs)


def _backward(
    saved: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    *,
    options: Options,
    **arguments: Any,
) -> Tensors:
    """`function.backward`, which returns the saved gradients themselves if no second backward can follow."""
    assert saved[0] is not None, "forward saves the input, or an empty tensor on its device"
    reuse = options.inplace_backward or is_last_use(saved[0])
    return function.backward(saved, grads, needed, options=options, reuse=reuse, **arguments)


LINEAR_CROSS_ENTROPY = Op(
    "linear_cross_entropy",
    function.forward,
    _backward,
    _rule,
    lambda dtype, options: torch.promote_types(options["compute_dtype"] or dtype, torch.float32),
    num_constants=CROSS_ENTROPY.num_constants,
)
