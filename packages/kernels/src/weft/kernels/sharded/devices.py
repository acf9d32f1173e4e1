"""Where an op's operands lie."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard.running.groups import process_mesh, this_rank


def check_devices(op: str, first: Tensor, *others: Tensor | None) -> None:
    """Raises ValueError for operands that lie on two devices, which it names.

    It runs in every call, so nothing is allocated for it. On a rank outside of a mesh an operand's part is empty, and may lie anywhere:
    what torch's own ops give there is a CPU's.
    """
    device = first.device
    for other in others:
        if other is not None and other.device != device and not (_is_elsewhere(first) or _is_elsewhere(other)):
            raise ValueError(f"{op}: its operands lie on {device} and {other.device}; move them to one device")


def _is_elsewhere(operand: Tensor) -> bool:
    """Whether this rank has no part of it."""
    return isinstance(operand, DTensor) and this_rank() not in process_mesh(operand.device_mesh)
