"""What a collective is and how many bytes it brings, read from the call that issues it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import ScriptObject, Tensor

_NOT_SENT = ("wait_tensor", "wrap_tensor_autograd", "monitored_barrier")  # of the namespaces, but nothing travels
_NAMES = {
    "allreduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "allgather": "all-gather",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as one rank issues it.

    kind: as "all-reduce". axes: of the mesh, along which its group lies; () where they are not known.
    nbytes: received from other ranks, as `received_bytes` counts them.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: int


def received_bytes(kind: str, ranks: int, given: int, made: int, itemsize: int = 1) -> int:
    """Bytes that a rank receives from the others in a group of `ranks`, as of the ring algorithms; see `planning.costs`.

    given, made: bytes of its input and of its output. itemsize: bytes of an element.
    An all-reduce is a reduce-scatter and an all-gather of even parts; an all-to-all's parts are even. A broadcast counts as
    received, also where it starts.
    """
    match kind:
        case "all-reduce":
            return -(-2 * (ranks - 1) * (given // itemsize) // ranks) * itemsize
        case "all-gather":
            return (ranks - 1) * given
        case "reduce-scatter":
            return (ranks - 1) * made
        case "all-to-all":
            return made * (ranks - 1) // ranks
        case "send" | "barrier":
            return 0
    return made


_counted_as: ContextVar[tuple[str | None, int | None]] = ContextVar("_counted_as", default=(None, None))


@contextmanager
def counted_as(kind: str, nbytes: int | None = None) -> Iterator[None]:
    """What is issued inside is of that kind: another by the name of its op, where the backend has none of its own.

    nbytes: what a rank receives, where it is not what the call brings.
    """
    token = _counted_as.set((kind, nbytes))
    try:
        yield
    finally:
        _counted_as.reset(token)


def kind_of_op(namespace: str, name: str) -> str | None:
    """The kind of collective that torch's op of that name issues; None where it issues none."""
    name = name.lstrip("_").replace("all_", "all")
    if namespace not in ("c10d", "_c10d_functional") or name.startswith(_NOT_SENT):
        return None
    return _counted_as.get()[0] or next((kind for prefix, kind in _NAMES.items() if name.startswith(prefix)), name)


def bytes_of_call(kind: str, ranks: int, rank: int, args: Sequence[Any], output: Any) -> int:
    """Bytes that a rank receives by a call of torch's op: from its arguments and what it returns.

    rank: its own in the group, to which an all-to-all sends nothing.
    """
    stated = _counted_as.get()[1]
    if stated is not None:
        return stated
    tensors = [each for each in args if _first(each) is not None]
    splits = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], int)]
    if not tensors:
        return 0
    first = _first(tensors[0])
    functional = isinstance(output, Tensor)  # such an op is given its input and makes its output; others are given both
    made, given = (_bytes(output), _bytes(tensors[0])) if functional else (_bytes(tensors[0]), _bytes(tensors[-1]))
    if kind in ("all-gather", "reduce-scatter") and made == given:
        kind = "all-to-all"  # which took its place
    if kind == "all-to-all" and splits and sum(splits[0]):
        sizes: Sequence[int] = splits[0]
        return made * (sum(sizes) - sizes[rank]) // sum(sizes)
    return received_bytes(kind, ranks, given, made, 1 if first is None else first.element_size())


def group_of_call(args: Sequence[Any]) -> dist.ProcessGroup | str | None:
    """The process group of a call of torch's op, or its name; None for none."""
    for each in args:
        if isinstance(each, ScriptObject):
            if "ProcessGroup" in str(each._type()):
                return dist.ProcessGroup.unbox(each)
        elif isinstance(each, dist.ProcessGroup):
            return each
    names = [each for each in args if isinstance(each, str)]
    return names[-1] if names else None  # after the reduction's, where there is one


def _bytes(each: Any) -> int:
    if isinstance(each, Tensor):
        return each.numel() * each.element_size()
    return sum(_bytes(part) for part in each) if isinstance(each, list | tuple) else 0


def _first(each: Any) -> Tensor | None:
    """The first tensor of a tensor, or of lists of them; None for anything else."""
    while isinstance(each, list | tuple) and each:
        each = each[0]
    return each if isinstance(each, Tensor) else None
