"""A collective's kind, group and received bytes, read from the call of torch's op; and calls as values.

recording.py and weft.models' observer of a real step both count by these functions. For listeners of a recording
(`Recorded.listener`), `Call` is a collective called, and `Tape` the listener's list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor

# Ops of torch's namespaces for collectives that send no tensor.
_NOT_SENT = ("wait_tensor", "wrap_tensor_autograd", "monitored_barrier")
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
    """A collective issued by a rank."""

    kind: str  # such as "all-reduce"
    axes: tuple[str, ...]  # mesh axes of the group; () where unknown
    nbytes: int  # received from other ranks, by `received_bytes`
    at_most: bool = False  # whether `nbytes` is an upper bound: on shapes, where the bytes depend on data


def received_bytes(kind: str, ranks: int, input_bytes: int, output_bytes: int, itemsize: int = 1) -> int:
    """Bytes received by a rank from the rest of the group, by the ring algorithms; see `planning.costs`.

    input_bytes, output_bytes: of the collective's input and output on this rank.
    itemsize: bytes of an element.

    An all-reduce counts as a reduce-scatter and an all-gather of even parts; an all-to-all has even parts. A broadcast
    counts as received on the source rank too.
    """
    match kind:
        case "all-reduce":
            return -(-2 * (ranks - 1) * (input_bytes // itemsize) // ranks) * itemsize
        case "all-gather":
            return (ranks - 1) * input_bytes
        case "reduce-scatter":
            return (ranks - 1) * output_bytes
        case "all-to-all":
            return output_bytes * (ranks - 1) // ranks
        case "send" | "barrier":
            return 0
    return output_bytes


def uneven_bytes(output_bytes: int, sizes: Sequence[int], position: int) -> int:
    """Bytes received by a rank in an all-to-all of uneven parts; the rank's own part is not received.

    sizes: the rows which each rank of the group sends to this rank. position: of this rank in the group.
    """
    rows = sum(sizes)
    return output_bytes * (rows - sizes[position]) // rows if rows else 0


_counted_as: ContextVar[tuple[str | None, int | None, bool]] = ContextVar("_counted_as", default=(None, None, False))


@contextmanager
def count_as(kind: str, nbytes: int | None = None, *, at_most: bool = False) -> Iterator[None]:
    """Collectives issued inside count as `kind`, whatever op issues them: an all-to-all may stand for an all-gather.

    nbytes: received by a rank, where the call's tensors do not show this. None: counted from the tensors.
    at_most: whether `nbytes` is an upper bound, because the bytes depend on data which a run on shapes lacks.
    """
    token = _counted_as.set((kind, nbytes, at_most))
    try:
        yield
    finally:
        _counted_as.reset(token)


_counts: ContextVar[bool] = ContextVar("_counts", default=True)


@contextmanager
def uncounted() -> Iterator[None]:
    """Collectives issued inside are not counted: an earlier collective is counted with the bytes of both.

    Listeners of a recording still get a `Call`, without a Collective: all ranks must issue the call.
    """
    token = _counts.set(False)
    try:
        yield
    finally:
        _counts.reset(token)


def counted_collective(kind: str, axes: tuple[str, ...], nbytes: int) -> Collective | None:
    """The Collective of a recorded call, as the innermost `count_as` counts it; None inside `uncounted`."""
    if not _counts.get():
        return None
    stated_kind, stated_bytes, at_most = _counted_as.get()
    return Collective(stated_kind or kind, axes, nbytes if stated_bytes is None else stated_bytes, at_most)


def kind_of_op(namespace: str, name: str) -> str | None:
    """The kind of collective issued by torch's op, as "all-reduce"; None for an op which sends no tensor.

    None for every op inside `uncounted`. Inside `count_as`, the kind given there. A collective missing in `_NAMES` has
    the op's name as kind.
    """
    if namespace not in ("c10d", "_c10d_functional") or not _counts.get():
        return None
    name = name.lstrip("_").replace("all_", "all")
    if name.startswith(_NOT_SENT):
        return None
    return _counted_as.get()[0] or next((kind for prefix, kind in _NAMES.items() if name.startswith(prefix)), name)


def bytes_of_call(kind: str, ranks: int, rank: int, args: Sequence[Any], output: Any) -> int:
    """Bytes received by a rank in a call of torch's op, from the op's arguments and output.

    rank: of this process in the group. A rank's own part of an all-to-all is not counted.
    """
    stated_bytes = _counted_as.get()[1]
    if stated_bytes is not None:
        return stated_bytes
    tensors = [each for each in args if _first(each) is not None]
    splits = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], int)]
    if not tensors:
        return 0
    first = _first(tensors[0])
    # Functional ops return the output, in-place ops take input and output as arguments.
    functional = isinstance(output, Tensor)
    output_bytes, input_bytes = (
        (_bytes(output), _bytes(tensors[0])) if functional else (_bytes(tensors[0]), _bytes(tensors[-1]))
    )
    if kind in ("all-gather", "reduce-scatter") and output_bytes == input_bytes:
        kind = "all-to-all"  # input and output of one size: an all-to-all issued in its place
    if kind == "all-to-all" and splits and sum(splits[0]):
        return uneven_bytes(output_bytes, splits[0], rank)
    return received_bytes(kind, ranks, input_bytes, output_bytes, 1 if first is None else first.element_size())


def group_of_call(args: Sequence[Any]) -> dist.ProcessGroup | str | None:
    """The process group among the arguments of a call of torch's op, or the group's name; None without either."""
    for each in args:
        if isinstance(each, ScriptObject):
            if "ProcessGroup" in str(each._type()):
                return dist.ProcessGroup.unbox(each)
        elif isinstance(each, dist.ProcessGroup):
            return each
    names = [each for each in args if isinstance(each, str)]
    return names[-1] if names else None  # the first may name the reduction


def _bytes(each: Any) -> int:
    if isinstance(each, Tensor):
        return each.numel() * each.element_size()
    return sum(_bytes(part) for part in each) if isinstance(each, list | tuple) else 0


def _first(each: Any) -> Tensor | None:
    """A tensor, or the first tensor of nested lists; None for anything else."""
    while isinstance(each, list | tuple) and each:
        each = each[0]
    return each if isinstance(each, Tensor) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A rank's call of a collective, send or receive, with all that the calls of the group's ranks must agree on."""

    collective: Collective | None  # as counted; None inside `uncounted`, where an earlier call counts for this call too
    group: str  # the group's name, the same for all calls on the group
    ranks: tuple[int, ...]  # of the group, in the group's order
    shapes: tuple[tuple[int, ...], ...]  # of the tensors given
    dtype: torch.dtype | None  # of the first tensor
    op: str  # the kind really called, as "all-gather"; inside `count_as`, `collective` has the kind given there
    peer: int | None = None  # the rank sent to, received from or broadcast from
    tag: int = 0  # of a send or a receive
    # Rows to and from each member in an all-to-all of uneven parts, in the group's order; () for even parts.
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Tape(Protocol):
    """A listener's own list of calls. `Recorded.repeat` adds a part of the list again, without running the program."""

    def mark(self) -> Any:
        """The place after the last call."""

    def calls_since(self, mark: Any) -> Any | None:
        """The calls and waits after `mark`, for `repeat` and for `==`; None for calls that cannot be repeated."""

    def repeat(self, calls: Any) -> None:
        """Appends `calls`, a result of `calls_since`, to the list."""
