"""Cross-entropy as an `Op` on DTensors: its layout rule, and the groups to gather over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial, Shard, infer
from weft.reshard import layout_of
from weft.reshard.extension import group_over

from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, infer_gradient_layouts
from .. import function
from ..options import Options
from .gather import TokenAllReduce, VocabGather


def local_denominator(denominator: DTensor) -> Tensor:
    """The local tensor of a replicated denominator. Raises LayoutError for other layouts."""
    layout = layout_of(denominator)
    replicated = Layout(layout.mesh)
    if layout.placements != replicated.placements:
        raise LayoutError(f"the denominator has layout ({layout}); reshard it to ({replicated})", (replicated,))
    return denominator.to_local()


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, arguments: dict[str, Any]) -> Sharding:
    logits, target, weight, _ = layouts
    shape, _, _, denominator = shapes
    options: Options = arguments["options"]
    assert logits is not None and target is not None and shape, "both are given"
    vocab_dim = len(shape) - 1
    vocab_axes = logits.shard_order.get(vocab_dim, ())
    tokens = logits.replace(**dict.fromkeys(vocab_axes, "R"))
    if logits.is_partial():
        raise LayoutError(
            f"cross_entropy is not linear in the logits, whose layout is ({logits}); reshard the logits first"
        )
    if target != tokens:
        raise LayoutError(
            f"cross_entropy has logits ({logits}) and a target ({target}); reshard the target to ({tokens})"
        )
    if weight is not None:
        infer.whole("cross_entropy", "the weight", weight, 0)
    token_axes = [axis for axes in tokens.shard_order.values() for axis in axes]
    summed_axes = token_axes if options.reduction == "mean" and denominator is None else []
    output = tokens
    if options.reduction != "none":
        output = Layout(
            logits.mesh,
            {
                axis: Partial("sum") if isinstance(placement, Shard) else placement
                for axis, placement in zip(tokens.mesh.axis_names, tokens.placements, strict=True)
            },
        )
    loss_rule, lse_rule = (
        infer_gradient_layouts(output, (logits, target)),
        infer_gradient_layouts(tokens, (logits, target)),
    )

    def gradient_layouts(loss: Layout | None, lse: Layout | None = None, *constants: None) -> tuple[Layout | None, ...]:
        layouts_of_logits = [rule(grad)[0] for rule, grad in ((loss_rule, loss), (lse_rule, lse)) if grad is not None]
        if layouts_of_logits[0] != layouts_of_logits[-1]:
            raise LayoutError(
                f"the gradients of loss ({loss}) and lse ({lse}) imply layouts ({layouts_of_logits[0]}) and "
                f"({layouts_of_logits[-1]}) for the logits' gradient, which cannot be added; reshard one of the "
                f"outputs before using it"
            )
        return layouts_of_logits[0], None, None, None

    def local_options(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {
            "vocab_start": logits.local_slices(shape, rank)[vocab_dim].start,
            "vocab_size": shape[vocab_dim],
            "gather": VocabGather((group_over(mesh, vocab_axes),)) if vocab_axes else None,
            "all_reduce": TokenAllReduce((group_over(mesh, summed_axes),)) if summed_axes else None,
        }

    loss_shape = shape[:-1] if options.reduction == "none" else ()
    further = ((tokens, shape[:-1]),) * options.return_lse + ((output, loss_shape),) * options.num_constants
    return Sharding(output, loss_shape, gradient_layouts, local_options, further)


CROSS_ENTROPY = Op(
    "cross_entropy",
    function.forward,
    function.backward,
    _rule,
    lambda dtype, options: torch.promote_types(dtype, torch.float32),
    varying=("backwards",),
    num_constants=lambda options: options["options"].num_constants,
    overwrites=lambda options: options["options"].inplace_backward,
)
