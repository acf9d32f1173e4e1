"""`Sharding`, the answer of an op's layout rule, and helpers for rules to build one.

Also `check_devices`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, infer
from weft.mesh.extension import terms
from weft.reshard.extension import process_mesh, this_rank

from ..op import Op

Shapes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """A layout rule's answer for given operands: layouts of outputs and gradients, and each rank's further options."""

    output: Layout
    shape: tuple[int, ...]  # of the global output
    # (layout of each output's gradient) -> layout of each operand's gradient
    gradients: Callable[..., tuple[Layout | None, ...]]
    # (rank, mesh) -> this rank's further options for forward and backward. `Call` keeps the result.
    local: Callable[[int, DeviceMesh], dict[str, Any]] = lambda rank, mesh: {}
    # Layout and shape of each further output; None if the op returns a tensor, not a tuple.
    more: tuple[tuple[Layout, tuple[int, ...]], ...] | None = None

    @property
    def outputs(self) -> tuple[tuple[Layout, tuple[int, ...]], ...]:
        """Layout and shape of each output."""
        return (self.output, self.shape), *(self.more or ())


@lru_cache(maxsize=65536)
def sharding_of(op: Op, layouts: tuple[Layout | None, ...], shapes: Shapes, options: tuple[Any, ...]) -> Sharding:
    """The cached answer of the op's rule.

    options: (name, value) pairs, without the `varying` options.
    Raises LayoutError for operands on several meshes, and for layouts the rule cannot take.
    """
    terms.one_mesh([layout for layout in layouts if layout is not None], op.name)
    answer: Sharding = op.rule(layouts, shapes, dict(options))
    return answer


def independent(output: Layout, layouts: tuple[Layout | None, ...]) -> Callable[[Layout], tuple[Layout | None, ...]]:
    """`Sharding.gradients` for an op which each rank computes on its own shards: `infer.gradient` of each operand."""
    operands = tuple(layout for layout in layouts if layout is not None)
    return lambda grad: tuple(
        None if layout is None else infer.gradient(output, grad, layout, operands) for layout in layouts
    )


def of_several(
    name: str, gradients: Callable[[Layout], tuple[Layout | None, ...]], shared: int
) -> Callable[..., tuple[Layout | None, ...]]:
    """`Sharding.gradients` for an op of several outputs, where all output gradients must have one layout.

    name: of the op.
    gradients: (the common layout) -> layout of each operand's gradient.
    shared: the first `shared` operands get a gradient from every output, the others from the last output alone.
    The result raises LayoutError if the layouts differ.
    """

    def found(*grads: Layout | None) -> tuple[Layout | None, ...]:
        arrived = {grad for grad in grads if grad is not None}
        if len(arrived) > 1:
            raise LayoutError(
                f"{name}: the outputs' gradients have layouts {' and '.join(f'({each})' for each in arrived)}; "
                f"reshard one"
            )
        layouts = gradients(arrived.pop())
        return layouts if grads[-1] is not None else layouts[:shared] + (None,) * (len(layouts) - shared)

    return found


def check_devices(op: str, first: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError for operands on different devices. op: the op's name.

    Allocates nothing: ops call it each time. Two operands are not compared if the mesh of either excludes this rank:
    its part is empty, and torch puts empty parts on the CPU.
    """
    device = first.device
    for other in others:
        if other is not None and other.device != device and not (_is_elsewhere(first) or _is_elsewhere(other)):
            raise ValueError(f"{op}: the operands are on {device} and {other.device}; move them to one device")


def _is_elsewhere(operand: Tensor) -> bool:
    """Whether the operand is a DTensor whose mesh excludes this rank."""
    return isinstance(operand, DTensor) and this_rank() not in process_mesh(operand.device_mesh)
