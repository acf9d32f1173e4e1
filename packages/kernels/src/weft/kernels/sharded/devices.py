"""Checks the devices of an op's operands."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.reshard.running.groups import process_mesh, this_rank


def check_devices(op: str, first: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError for operands on different devices. op: the op's name.

    Called in every call of an op, where nothing may be allocated. An operand whose mesh excludes this rank is
    skipped: the local part is empty, and torch's own ops put empty parts on the CPU.
    """
    device = first.device
    for other in others:
        if other is not None and other.device != device and not (_is_elsewhere(first) or _is_elsewhere(other)):
            raise ValueError(f"{op}: the operands are on {device} and {other.device}; move them to one device")


def _is_elsewhere(operand: Tensor) -> bool:
    """Whether the operand is a DTensor whose mesh excludes this rank."""
    return isinstance(operand, DTensor) and this_rank() not in process_mesh(operand.device_mesh)
