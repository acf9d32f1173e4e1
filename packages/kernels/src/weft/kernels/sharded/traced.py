"""DTensors where they are traced: taken apart for a custom op on their local tensors, whose outputs are wrapped again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError
from weft.reshard import layout_of
from weft.reshard.running.dtensor import wrap
from weft.reshard.running.dynamo import guard_shapes
from weft.reshard.running.groups import group_named, this_rank
from weft.reshard.running.waits import wait_for

from ..op import Op
from .calls import Call, laid

try:
    VERSION = version("weft-kernels")
except PackageNotFoundError:  # its sources, not installed
    VERSION = "unknown"


@dataclass(frozen=True, slots=True)
class Placed:
    """An op's operands on this rank. options: what the op's rule gives this rank."""

    tensors: Sequence[Tensor | None]
    call: Call
    locals: tuple[Tensor | None, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, op: Op, tensors: Sequence[Tensor | None], **options: Any) -> Placed:
        """Raises LayoutError where the rule does not take the layouts, or this rank is outside of the mesh."""
        guard_shapes()
        mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
        call = Call.of(op, tensors, mesh, options)
        if call.options is None:
            raise LayoutError(
                f"{op.name} is compiled on rank {this_rank()}, which is not in {call.sharding.output.mesh}; compile it on "
                f"the ranks of the mesh alone"
            )
        return cls(tensors, call, tuple(map(to_local, tensors)), call.options)

    def wrapped(self, outputs: Sequence[Tensor]) -> tuple[DTensor, ...]:
        """The op's outputs, of which there are several."""
        lying = self.call.outputs
        return tuple(wrap(part, layout, shape) for part, (layout, shape) in zip(outputs, lying, strict=True))

    def gradients(self, *grads: DTensor | None) -> tuple[Layout | None, ...]:
        """The layouts of the operands' gradients, where those of the outputs arrive so."""
        return self.call.gradients(*(None if grad is None else layout_of(grad) for grad in grads))

    def as_operand(self, i: int, gradient: Tensor, layout: Layout | None) -> Tensor:
        """The gradient of operand i, as the operand is. Raises as `laid`."""
        operand = self.tensors[i]
        assert operand is not None and layout is not None, "only what is given has a gradient"
        return laid(self.call.op, gradient, layout, operand.shape, not isinstance(operand, DTensor))


def groups_of(*tensors: Tensor | None) -> list[str] | None:
    """The names of the groups along the axes of the DTensors' mesh, this rank and this version; None without one.

    They must be in the graph that is traced: the compiler keeps what it made of a graph on disk, knows of DTensors what is the
    same on all ranks, and would give one rank's part and groups to another rank, or to the next program.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            groups = [tensor.device_mesh.get_group(axis).group_name for axis in range(tensor.device_mesh.ndim)]
            return [*groups, f"rank {dist.get_rank()}, weft-kernels {VERSION}"]
    return None


def to_local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@library.custom_op("weft::sum_over", mutates_args=())
def _sum_over(part: Tensor, group: str) -> Tensor:
    total = part.clone()
    wait_for(dist.all_reduce(total, group=group_named(group), async_op=True))
    return total


@_sum_over.register_fake
def _(part: Tensor, group: str) -> Tensor:
    return part.new_empty(part.shape)


def sum_over(part: Tensor, names: Sequence[str]) -> Tensor:
    """The sum of all ranks' parts over the groups of those names, one after the other."""
    for name in names:
        part = _sum_over(part, name)
    return part
