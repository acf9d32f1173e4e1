"""Collectives on local tensors, as generators: each yields the Works that it starts, and returns the result.

`Pending` runs a generator, with time for other work between start and wait. Callers are the executor (steps of plans),
buckets.py, shared_memory.py and clip.py (gradients), gathering.py (parameters), weft.kernels (collectives inside ops)
and weft.models' pipeline. This file decides how a backend performs a collective: on gloo, all-gathers and
reduce-scatters go as all-to-alls.

`measure_waits` measures how long a process waits for collectives; the training loop of weft.models logs the time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh.extension import Box, volume

from ..planning.exchange import Messages, contiguous_run, relative_box
from ..planning.layouts import reduce_parts
from ..world.collective_bytes import count_as
from ..world.world import Positions, world

Running = Generator[dist.Work, None, Tensor]
# A step of a collective: the group along one or several axes, and its members' positions (a range: in order).
Phase = tuple[dist.ProcessGroup, Positions]

# torch 2.13 renamed these functions; 2.11 and 2.12 have the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and divided afterwards: gloo has no average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

# The largest tensor, in bytes, that two ranks on gloo all-reduce by swapping and adding. Gloo's own all-reduce takes
# 1.2 to 2 times as long at these sizes, and less time above 1 MB.
_MOST_SWAPPED_BYTES = 1 << 19

# The smallest piece, in bytes: 256 KiB on CPUs (2 ms at 1 Gbit/s, 20 times the latency of 0.1 ms); 4 MiB on GPUs (84 us
# at 400 Gbit/s, 4 to 8 times the 10 to 20 us in which a collective starts).
# More pieces keep more links busy: only one phase works during the first piece, and only one during the last.
_LEAST_PIECE_BYTES, _LEAST_PIECE_BYTES_ON_GPU = 1 << 18, 1 << 22
_MOST_PIECES = 16
_MOST_IN_FLIGHT = 3  # pieces; more would compete for a link, and end no sooner


class Pending:
    """Running collectives: the first is started at construction; `wait()` runs the rest and returns the result."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._advance()

    @classmethod
    def finished(cls, result: Tensor) -> Pending:
        """A Pending whose result is there already."""
        return cls(immediate_result(result))

    def wait(self) -> Tensor:
        """Waits for the started collective, runs the rest, and returns the result."""
        while self._work is not None:
            wait_for(self._work)
            self._advance()
        return self._result

    def _advance(self) -> None:
        self._work: dist.Work | None = None
        try:
            self._work = next(self._running)
        except StopIteration as done:
            self._result: Tensor = done.value


def immediate_result(result: Tensor) -> Running:
    """A `Running` without collectives, which returns `result`."""
    return result
    yield  # unreachable, but makes the function a generator


def split_into_pieces(elements: int, tensor: Tensor, phases: Sequence[Phase]) -> list[slice]:
    """Cuts a rank's part into pieces that pass through the phases of a collective as through a pipeline.

    While a piece is in a phase, the next piece is in the phase before, so that links of different speeds work at once.
    A single phase, or little data, takes a single piece.
    elements: of the part. tensor: has the part's device and dtype.
    """
    if len(phases) == 1:
        return [slice(0, elements)]
    least = _LEAST_PIECE_BYTES_ON_GPU if tensor.is_cuda else _LEAST_PIECE_BYTES
    pieces = max(1, min(_MOST_PIECES, elements * tensor.itemsize // least))
    ends = [elements * i // pieces for i in range(pieces + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def interleave(pieces: Iterable[Running]) -> Generator[dist.Work, None, None]:
    """Runs the generators of several pieces, with collectives of at most three pieces in flight.

    Before a piece begins, the oldest collective is waited for, and its piece starts its next collective. All ranks must
    interleave the same pieces.
    """
    active: deque[tuple[Running, dist.Work]] = deque()

    def advance(piece: Running) -> None:
        with suppress(StopIteration):
            active.append((piece, next(piece)))

    def advance_oldest() -> Generator[dist.Work, None, None]:
        yield active[0][1]
        advance(active.popleft()[0])

    for piece in pieces:
        yield from advance_oldest() if len(active) > 1 else ()
        while len(active) >= _MOST_IN_FLIGHT:
            yield from advance_oldest()
        advance(piece)
    while active:
        yield from advance_oldest()


def all_gather(part: Tensor, phases: Sequence[Phase]) -> Running:
    """All-gathers `part` phase by phase; returns all members' parts by position, the last phase's axis outermost."""
    for group, positions in phases:
        gathered = part.new_empty((len(positions), part.numel()))
        yield start_all_gather(gathered, part, group)
        part = gathered if isinstance(positions, range) else gathered[_inverse(positions)]
    return part


def gather_pieces(
    part: Tensor, phases: Sequence[Phase], pieces: Sequence[slice], into: Tensor
) -> Generator[dist.Work, None, None]:
    """`all_gather` piece by piece, into a tensor that may have any strides.

    part: flat. into: receives the parts, [*sizes of the phases, last phase first, elements of a part].
    """

    def gather(piece: slice) -> Running:
        target = into[..., piece]
        return target.copy_((yield from all_gather(part[piece], phases)).view(target.shape))

    yield from interleave(gather(piece) for piece in pieces)


def uses_all_to_all() -> bool:
    """Whether all-gathers and reduce-scatters are run as all-to-alls.

    False with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then checks that ranks gather equal shapes, a check that
    all-to-alls would skip.
    """
    return world().prefers_all_to_all and dist.get_debug_level() != dist.DebugLevel.DETAIL  # type: ignore[attr-defined]


def start_all_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to fill `gathered` with the parts of the group's members, in the order of the group's ranks.

    On gloo an all-to-all does this in half the time or less, but holds the result's memory a second time while it runs.
    Two ranks need no extra memory.
    """
    if not uses_all_to_all():
        return _as_work(all_gather_single(gathered.view(-1), part.reshape(-1), group, async_op=True))
    if group.size() == 2:
        rows, own_part = gathered.view(2, -1), part.reshape(-1)
        if rows[group.rank()].data_ptr() != own_part.data_ptr():
            rows[group.rank()].copy_(own_part)
        return _start_swap(rows[1 - group.rank()], own_part, group, "all-gather")
    copies = part.reshape(1, -1).expand(group.size(), -1).contiguous()
    return _start_exchange(gathered, copies, group, "all-gather")


def all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup) -> Running:
    """Reduces the members' tensors into the memory of `tensor`; bool is reduced as uint8, which every backend supports.

    On gloo, two ranks swap small tensors and add the received one: the same bytes as an all-reduce, in one step instead
    of two. For at most two elements, gloo's own all-reduce swaps and adds, too.
    """
    result = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    is_small = tensor.numel() > 2 and tensor.nbytes <= _MOST_SWAPPED_BYTES
    if is_small and op in ("sum", "avg") and group.size() == 2 and uses_all_to_all():
        received = torch.empty_like(result)
        yield _start_swap(received, result, group, "all-reduce")
        result.add_(received)
    else:
        yield _as_work(dist.all_reduce(result, REDUCE_OPS[op], group, async_op=True))
    return tensor.div_(dist.get_world_size(group)) if op == "avg" else tensor


def reduce_scatter(stacked: Tensor, op: str, phases: Sequence[Phase]) -> Running:
    """Reduces the members' stacked parts, phase by phase, and returns this rank's part of the result.

    stacked: [*sizes of the phases in order, elements of a part], with any strides; not changed.
    """
    pieces = split_into_pieces(stacked.shape[-1], stacked, phases)
    return _scatter_pieces(stacked, op, phases, pieces) if len(pieces) > 1 else _reduce_scatter(stacked, op, phases)


def _scatter_pieces(stacked: Tensor, op: str, phases: Sequence[Phase], pieces: Sequence[slice]) -> Running:
    part = stacked.new_empty(stacked.shape[-1])

    def scatter(piece: slice) -> Running:
        return part[piece].copy_((yield from _reduce_scatter(stacked[..., piece], op, phases)))

    yield from interleave(scatter(piece) for piece in pieces)
    return part


def _reduce_scatter(stacked: Tensor, op: str, phases: Sequence[Phase]) -> Running:
    """`reduce_scatter` by one collective in each phase.

    NCCL scatters sums. For any other reduction, the ranks exchange parts, which is as many bytes, and reduce the
    received parts locally. Sums on gloo go the same way: gloo's reduce-scatter reduces everything on every rank, for
    twice the bytes, and keeps a part.
    """
    for group, positions in phases:
        stacked = stacked.reshape(len(positions), -1).contiguous()
        if not isinstance(positions, range):
            stacked = stacked[list(positions)]
        if op in ("sum", "avg") and not uses_all_to_all():
            part = stacked.new_empty(stacked.shape[1])
            yield _as_work(reduce_scatter_single(part, stacked.view(-1), REDUCE_OPS[op], group, async_op=True))
        elif op in ("sum", "avg") and group.size() == 2:
            part = torch.empty_like(stacked[0])
            yield _start_swap(part, stacked[1 - group.rank()], group, "reduce-scatter")
            part.add_(stacked[group.rank()])
        else:
            rows = torch.empty_like(stacked)
            yield _start_exchange(rows, stacked, group, "reduce-scatter")
            part = reduce_parts("sum" if op == "avg" else op, rows)
        stacked = part.div_(len(positions)) if op == "avg" else part
    return stacked


@dataclass(frozen=True, slots=True)
class Transfer:
    """An exchange as this rank runs it; made once by `Transfer.of`. A Box is a slice for each dim of a tensor."""

    sent: list[Box]  # parts of the local tensor to send, in the order of receivers
    send_slice: slice | None  # all sent parts in the flat local tensor, if contiguous; None: they are packed first
    sizes_out: list[int]  # elements sent to each member of the group
    received: list[Box]  # parts of the result to receive, in the order of senders
    receive_slice: slice | None  # all received parts in the flat result; None: they are unpacked afterwards
    sizes_in: list[int]  # elements received from each member of the group
    local: tuple[Box, Box] | None  # parts of the result and of the local tensor: what this rank copies by itself

    @classmethod
    def of(cls, held: Box, needed: Box, messages: Messages, ranks: Sequence[int]) -> Transfer:
        """The exchange that fills the box `needed` from a local tensor that is the box `held`.

        ranks: the group's members, ascending.
        """
        sent, received = ([box for _, box in boxes] for boxes in (messages.sends, messages.receives))
        sizes = [{rank: volume(box) for rank, box in boxes} for boxes in (messages.sends, messages.receives)]
        sizes_out, sizes_in = ([elements.get(rank, 0) for rank in ranks] for elements in sizes)
        local = messages.local
        return cls(
            [relative_box(box, held) for box in sent],
            contiguous_run(sent, held),
            sizes_out,
            [relative_box(box, needed) for box in received],
            contiguous_run(received, needed),
            sizes_in,
            None if local is None else (relative_box(local, needed), relative_box(local, held)),
        )


def exchange(
    local: Tensor, result: Tensor, transfer: Transfer, group: dist.ProcessGroup | None, *, add: bool = False
) -> Running:
    """Fills `result` from the local tensors of the group's members.

    Without a group nothing is sent, and only `transfer.local` is copied.
    add: adds the parts to `result` instead of overwriting.
    """
    receive_slice = None if add else transfer.receive_slice
    received = result.new_empty(sum(transfer.sizes_in)) if receive_slice is None else result.view(-1)[receive_slice]
    if group is not None:
        send_slice = transfer.send_slice if local.is_contiguous() else None
        sent = local.new_empty(sum(transfer.sizes_out)) if send_slice is None else local.view(-1)[send_slice]
        if send_slice is None:
            parts = [local[box] for box in transfer.sent]
            for packed, part in zip(_split_as(parts, sent), parts, strict=True):
                packed.copy_(part)
        sizes_in, sizes_out = transfer.sizes_in, transfer.sizes_out
        yield _as_work(dist.all_to_all_single(received, sent, sizes_in, sizes_out, group, async_op=True))
    copies: list[tuple[Tensor, Tensor]] = []  # (part of the result, its values)
    if receive_slice is None:
        targets = [result[box] for box in transfer.received]
        copies += zip(targets, _split_as(targets, received), strict=True)
    if transfer.local is not None:
        target_box, source_box = transfer.local
        copies.append((result[target_box], local[source_box]))
    for target, part in copies:
        if add:
            target.add_(part)
        else:
            target.copy_(part)
    return result


def _split_as(parts: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` cut into consecutive tensors of the shapes of `parts`."""
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _inverse(positions: Positions) -> list[int]:
    return sorted(range(len(positions)), key=positions.__getitem__)


def _start_exchange(
    received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str, counts: list[int] | None = None
) -> dist.Work:
    """Starts an all-to-all of equal rows, or with `counts[i]` elements to and from member i.

    instead_of: the kind of collective for which the all-to-all stands (see `collective_bytes.count_as`).
    """
    with count_as(instead_of):
        return _as_work(dist.all_to_all_single(received.view(-1), sent.view(-1), counts, counts, group, async_op=True))


def _start_swap(received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str) -> dist.Work:
    """Starts a swap between a group's two members, of tensors with equally many elements."""
    counts = [0, sent.numel()] if group.rank() == 0 else [sent.numel(), 0]
    return _start_exchange(received, sent, group, instead_of, counts)


def _as_work(work: Any) -> dist.Work:
    assert work is not None, "async_op=True returns the work"
    started: dist.Work = work
    return started


class WaitTimer:
    """Adds up the time for which this process's device waits for collectives.

    On a GPU the time of the waiting stream, between two events; on a CPU the host's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wait(self, work: dist.Work) -> None:
        """Waits for `work`, and adds the time of the wait."""
        if self._on_gpu:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            work.wait()
            after.record()
            self._events.append((before, after))
        else:
            start = time.perf_counter()
            work.wait()
            self._seconds += time.perf_counter() - start

    def pop_seconds(self) -> float:
        """Seconds waited since the last call. On a GPU the host waits until all recorded waits are over."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


_measuring: list[WaitTimer] = []  # timers of the running `measure_waits` blocks, innermost last


@contextmanager
def measure_waits(timer: WaitTimer) -> Iterator[None]:
    """Context manager: in the block, `timer` adds up the time of `wait_for` calls. Communication: none.

    In nested blocks only the innermost timer counts.
    """
    _measuring.append(timer)
    try:
        yield
    finally:
        _measuring.remove(timer)


def wait_for(work: dist.Work | None) -> None:
    """Waits for a collective, and measures the wait inside `measure_waits`."""
    assert work is not None, "a member of the group gets the work of async_op=True"
    if _measuring:
        _measuring[-1].wait(work)
    else:
        work.wait()
