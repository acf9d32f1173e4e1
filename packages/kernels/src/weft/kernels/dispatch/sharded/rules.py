"""`Sharding`, the answer of an op's layout rule; functions for rules; and a check of the operands' devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from weft.mesh import Layout, LayoutError, infer
from weft.mesh.extension import terms
from weft.reshard.extension import process_mesh, this_rank

from ..arguments import check_tensors
from ..op import Op

# Of an op's operands, None for an operand left out; a plain tensor beside DTensors has a replicated layout. Or of the
# outputs' gradients, None for an output without a gradient.
Layouts = tuple[Layout | None, ...]
Shapes = tuple[tuple[int, ...] | None, ...]  # the global shapes of the same tensors; None likewise


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A layout rule's answer for given operands: layouts of outputs and gradients, and options which differ by rank.

    Made by `Op.rule` for a `CallPlan`, once for all calls with these layouts, shapes and options.
    """

    #: layout and global shape of the output; of the first output if the op returns a tuple
    output: Layout
    shape: tuple[int, ...]
    #: (layout of each output's gradient) -> layout of each operand's gradient; None for no gradient. Called by
    #: `CallPlan.operand_gradient_layouts` in backward, and by the compiled linear loss in forward.
    gradient_layouts: Callable[..., tuple[Layout | None, ...]]
    #: (rank, mesh) -> options of forward and backward which depend on the rank, for example the first class of the
    #: vocabulary in the rank's shard of the logits. `CallPlan` keeps the result. Inside `exact_sums`, called for each
    #: of this rank's coordinates: rank is then the named mesh's, and mesh a `FoldedMesh`.
    local_options: Callable[[int, DeviceMesh], dict[str, Any]] = lambda rank, mesh: {}
    #: layout and global shape of each output after the first. None if the op returns a tensor instead of a tuple; ()
    #: for a tuple of one tensor.
    further_outputs: tuple[tuple[Layout, tuple[int, ...]], ...] | None = None

    @property
    def outputs(self) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Layout and global shape of each output."""
        return (self.output, self.shape), *(self.further_outputs or ())

    @property
    def is_tuple(self) -> bool:
        """Whether the op returns a tuple."""
        return self.further_outputs is not None


@lru_cache(maxsize=65536)
def sharding_of(op: Op, layouts: tuple[Layout | None, ...], shapes: Shapes, options: tuple[Any, ...]) -> Sharding:
    """Return the answer of the op's rule, cached. Called when a `CallPlan` is made.

    options: (name, value) pairs, without the `Op.varying` options.
    Raises LayoutError for operands on several meshes, and for layouts the rule cannot take.
    """
    terms.one_mesh([layout for layout in layouts if layout is not None], op.name)
    sharding: Sharding = op.rule(layouts, shapes, dict(options))
    return sharding


def infer_gradient_layouts(
    output: Layout, layouts: tuple[Layout | None, ...]
) -> Callable[[Layout], tuple[Layout | None, ...]]:
    """Return `Sharding.gradient_layouts` of an op which each rank computes from the rank's own shards alone.

    Called by rules, for example the rules of norms, gates, rope and attention.
    output: the output's layout. layouts: of the operands; None for an operand left out, which has no gradient.
    The layout of an operand's gradient is the result of `weft.mesh.infer.gradient`.
    """
    operands = tuple(layout for layout in layouts if layout is not None)
    return lambda grad: tuple(
        None if layout is None else infer.gradient(output, grad, layout, operands) for layout in layouts
    )


def require_one_layout(
    name: str, gradient_layouts: Callable[[Layout], tuple[Layout | None, ...]], num_shared: int
) -> Callable[..., tuple[Layout | None, ...]]:
    """Return `Sharding.gradient_layouts` of an op of several outputs, whose gradients must all have the same layout.

    Called by the rules of `add_rms_norm` and `add_layer_norm`, with the outputs (sum, norm).
    name: of the op.
    gradient_layouts: (the common layout) -> layout of each operand's gradient.
    num_shared: the first `num_shared` operands contribute to every output, as x and residual do. The further operands,
        weight and bias, contribute to the last output alone, and have no gradient if the last output has none.
    The returned function raises LayoutError if the layouts differ.
    """

    def check_and_infer(*grads: Layout | None) -> tuple[Layout | None, ...]:
        distinct = {grad for grad in grads if grad is not None}
        if len(distinct) > 1:
            raise LayoutError(
                f"{name}: the outputs' gradients have layouts {' and '.join(f'({each})' for each in distinct)}; "
                f"reshard an output before its use, so that the layouts of the gradients are equal"
            )
        layouts = gradient_layouts(distinct.pop())
        return layouts if grads[-1] is not None else layouts[:num_shared] + (None,) * (len(layouts) - num_shared)

    return check_and_infer


def check_heads(name: str, layout: Layout, shape: tuple[int, ...], head_dim: int) -> None:
    """Raise LayoutError if a shard of the last dim, heads * head_dim, would have a part of a head.

    Called by the layout rules of `attention`, of `rms_norm` with head_dim, and of ops that rotate heads, as `rope`.
    name: of the op. shape: the global shape.
    """
    axes = layout.shard_order.get(len(shape) - 1, ())
    heads = shape[-1] // head_dim
    num_shards = layout.parts(len(shape) - 1)
    if heads % num_shards:
        degrees = [degree for degree in range(1, heads + 1) if heads % degree == 0]
        raise LayoutError(
            f"{name}: {heads} heads of {head_dim} cannot be split evenly over {' x '.join(map(repr, axes))} of size "
            f"{num_shards}; sizes that work: {', '.join(map(str, degrees))}"
        )


def check_operands(op: str, names: tuple[str, ...], required: int, *operands: object) -> None:
    """Raise ValueError for operands which are no tensors, or are on different devices. op: the op's name.

    names: of the operands, for the message. required: how many of the first operands may not be None.
    Ops check in each call, so plain tensors on a CPU pass by a quick loop without allocations. Any other operands take
    the full checks.
    """
    missing = required
    for each in operands:
        if each is not None:
            kind = type(each)
            if (kind is not Tensor and kind is not Parameter) or not each.is_cpu:  # type: ignore[attr-defined]
                break
        elif missing > 0:
            break
        missing -= 1
    else:
        return
    check_tensors(op, names, *operands, optional=len(operands) - required)
    _check_devices(op, *operands)  # type: ignore[arg-type]  # tensors or None


def _check_devices(op: str, first: Tensor, *operands: Tensor | None) -> None:
    """Raise ValueError for operands on different devices.

    A DTensor whose mesh excludes this rank is not compared: torch puts its empty local part on the CPU.
    """
    device = first.device
    for each in operands:
        if each is not None and each.device != device and not (_is_outside(first) or _is_outside(each)):
            raise ValueError(f"{op}: the operands are on {device} and {each.device}; move them to one device")


def _is_outside(operand: Tensor) -> bool:
    """Whether this rank is outside the operand's mesh. False for a plain tensor."""
    return isinstance(operand, DTensor) and this_rank() not in process_mesh(operand.device_mesh)
