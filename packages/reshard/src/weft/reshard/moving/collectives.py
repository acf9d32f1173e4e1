"""Collectives on local tensors, as generators: each yields the Works that it starts, and returns the result.

`Pending` runs a generator, with time for other work between start and wait. Callers are the executor (steps of plans),
buckets.py, shared_memory.py and clip.py (gradients), gathering.py (parameters), weft.kernels (collectives inside ops)
and weft.models' pipeline. This file decides how a backend performs a collective: on gloo, all-gathers and
reduce-scatters go as all-to-alls.

Measures how long a process waits for collectives; the training loop of weft.models logs the time.
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

from ..planning.exchange import Messages, run_of, within
from ..planning.layouts import reduced
from ..world.collective_bytes import counted_as
from ..world.world import Positions, world

Running = Generator[dist.Work, None, Tensor]
Phase = tuple[dist.ProcessGroup, Positions]  # a group and its members' positions along the mesh axes

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

# The largest tensor, in bytes, that two ranks on gloo swap and add. Gloo's all-reduce takes 1.2 to 2 times as long at
# these sizes, and less time above 1 MB.
_SMALL = 1 << 19

# The smallest piece, in bytes: 256 KiB on CPUs (2 ms at 1 Gbit/s, 20 times the latency of 0.1 ms); 4 MiB on GPUs (84 us
# at 400 Gbit/s, 4 to 8 times the 10 to 20 us in which a collective starts).
# Only one phase works during the first piece, and only one during the last: the more pieces, the less time that costs.
_PIECE, _PIECE_ON_GPU = 1 << 18, 1 << 22
_MOST_PIECES = 16
_EXTRA_IN_FLIGHT = 1  # pieces in flight beside the newest; more would share a link and end at the same time


class Pending:
    """Running collectives: the first is started at construction; `wait()` runs the rest and returns the result."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._advance()

    @classmethod
    def finished(cls, result: Tensor) -> Pending:
        """A Pending whose result is there already."""
        return cls(finished(result))

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


def finished(result: Tensor) -> Running:
    """A `Running` without collectives, which returns `result`."""
    return result
    yield


def pieces_of(elements: int, tensor: Tensor, phases: Sequence[Phase]) -> list[slice]:
    """Cuts a rank's part, `elements` elements of `tensor`, into pieces for a pipeline of phases.

    While a piece is in a phase, the next piece is in the phase before: links of different speeds work at once. A single
    phase, or little data, takes a single piece.
    """
    if len(phases) == 1:
        return [slice(0, elements)]
    least = _PIECE_ON_GPU if tensor.is_cuda else _PIECE
    pieces = max(1, min(_MOST_PIECES, elements * tensor.itemsize // least))
    ends = [elements * i // pieces for i in range(pieces + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def in_turn(pieces: Iterable[Running]) -> Generator[dist.Work, None, None]:
    """Interleaves the generators of several pieces, which must issue the same collectives.

    Two pieces have a collective in flight at a time; the older collective is waited for.
    """
    active: deque[tuple[Running, dist.Work]] = deque()

    def advance(piece: Running) -> None:
        with suppress(StopIteration):
            active.append((piece, next(piece)))

    for piece in pieces:
        advance(piece)
        if len(active) > _EXTRA_IN_FLIGHT:
            oldest, work = active.popleft()
            yield work
            advance(oldest)
    while active:
        oldest, work = active.popleft()
        yield work
        advance(oldest)


def all_gather(part: Tensor, phases: Sequence[Phase]) -> Running:
    """All-gathers `part` phase by phase: returns all members' parts stacked by position, the last phase outermost."""
    for group, positions in phases:
        gathered = part.new_empty((len(positions), part.numel()))
        yield start_all_gather(gathered, part, group)
        part = gathered if isinstance(positions, range) else gathered[_inverse(positions)]
    return part


def gather_pieces(
    part: Tensor, phases: Sequence[Phase], pieces: Sequence[slice], into: Tensor
) -> Generator[dist.Work, None, None]:
    """`all_gather` piece by piece.

    part: flat. into: receives the parts, [*sizes, elements of a part].
    """

    def gather(piece: slice) -> Running:
        place = into[..., piece]
        return place.copy_((yield from all_gather(part[piece], phases)).view(place.shape))

    yield from in_turn(gather(piece) for piece in pieces)


def by_exchange() -> bool:
    """Whether all-gathers and reduce-scatters are run as all-to-alls.

    False with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then checks that ranks gather equal shapes, a check that
    all-to-alls would skip.
    """
    return world().by_exchange and dist.get_debug_level() != dist.DebugLevel.DETAIL  # type: ignore[attr-defined]


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to fill `whole` with the parts of the group's members, in the order of the group's ranks.

    On gloo an all-to-all does this in half the time or less, but holds the result's memory a second time while it runs.
    Two ranks need no extra memory.
    """
    if not by_exchange():
        return _as_work(all_gather_single(whole.view(-1), part.reshape(-1), group, async_op=True))
    if group.size() == 2:
        rows, mine = whole.view(2, -1), part.reshape(-1)
        if rows[group.rank()].data_ptr() != mine.data_ptr():
            rows[group.rank()].copy_(mine)
        return _start_swap(rows[1 - group.rank()], mine, group, "all-gather")
    copies = part.reshape(1, -1).expand(group.size(), -1).contiguous()
    return _start_exchange(whole, copies, group, "all-gather")


def all_reduce(whole: Tensor, op: str, group: dist.ProcessGroup) -> Running:
    """Reduces the members' tensors into the memory of `whole`; bool is reduced as uint8, which every backend supports.

    On gloo, two ranks swap small tensors and add: the same bytes, in one step instead of two. For up to two elements
    gloo's own all-reduce does the same.
    """
    result = whole.view(torch.uint8) if whole.dtype == torch.bool else whole
    small = whole.numel() > 2 and whole.nbytes <= _SMALL
    if small and op in ("sum", "avg") and group.size() == 2 and by_exchange():
        theirs = torch.empty_like(result)
        yield _start_swap(theirs, result, group, "all-reduce")
        result.add_(theirs)
    else:
        yield _as_work(dist.all_reduce(result, REDUCE_OPS[op], group, async_op=True))
    return whole.div_(dist.get_world_size(group)) if op == "avg" else whole


def reduce_scatter(stacked: Tensor, op: str, phases: Sequence[Phase]) -> Running:
    """This rank's part of the reduction of all members' stacked parts; the first phase is outermost.

    stacked: [*sizes, elements of a part], with any strides; not changed.
    """
    pieces = pieces_of(stacked.shape[-1], stacked, phases)
    return _scatter_pieces(stacked, op, phases, pieces) if len(pieces) > 1 else _reduce_scatter(stacked, op, phases)


def _scatter_pieces(stacked: Tensor, op: str, phases: Sequence[Phase], pieces: Sequence[slice]) -> Running:
    part = stacked.new_empty(stacked.shape[-1])

    def scatter(piece: slice) -> Running:
        return part[piece].copy_((yield from _reduce_scatter(stacked[..., piece], op, phases)))

    yield from in_turn(scatter(piece) for piece in pieces)
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
        if op in ("sum", "avg") and not by_exchange():
            part = stacked.new_empty(stacked.shape[1])
            yield _as_work(reduce_scatter_single(part, stacked.view(-1), REDUCE_OPS[op], group, async_op=True))
        elif op in ("sum", "avg") and group.size() == 2:
            part = torch.empty_like(stacked[0])
            yield _start_swap(part, stacked[1 - group.rank()], group, "reduce-scatter")
            part.add_(stacked[group.rank()])
        else:
            rows = torch.empty_like(stacked)
            yield _start_exchange(rows, stacked, group, "reduce-scatter")
            part = reduced("sum" if op == "avg" else op, rows)
        stacked = part.div_(len(positions)) if op == "avg" else part
    return stacked


@dataclass(frozen=True, slots=True)
class Transfer:
    """An exchange of boxes as this rank runs it, in slices of its local tensors; made once by `Transfer.of`."""

    sent: list[Box]  # slices of the local tensor, in the order of receivers
    sent_run: slice | None  # where these slices form one run of a contiguous local tensor; None: they are packed first
    sizes_out: list[int]  # elements sent to each member of the group
    received: list[Box]  # slices of the result, in the order of senders
    received_run: slice | None  # the contiguous run of the result's memory that these slices fill
    sizes_in: list[int]  # elements received from each member of the group
    local: tuple[Box, Box] | None  # slices of the result and of the local tensor that this rank copies by itself

    @classmethod
    def of(cls, held: Box, wanted: Box, messages: Messages, ranks: Sequence[int]) -> Transfer:
        """The exchange that fills the box `wanted` from a local tensor that is the box `held`.

        ranks: the group's members, ascending.
        """
        sent, received = ([box for _, box in boxes] for boxes in (messages.sends, messages.receives))
        sizes = [{rank: volume(box) for rank, box in boxes} for boxes in (messages.sends, messages.receives)]
        sizes_out, sizes_in = ([each.get(rank, 0) for rank in ranks] for each in sizes)
        local = messages.local
        return cls(
            [within(box, held) for box in sent],
            run_of(sent, held),
            sizes_out,
            [within(box, wanted) for box in received],
            run_of(received, wanted),
            sizes_in,
            None if local is None else (within(local, wanted), within(local, held)),
        )


def exchange(
    local: Tensor, result: Tensor, transfer: Transfer, group: dist.ProcessGroup | None, *, add: bool = False
) -> Running:
    """Fills `result` from the local tensors of the group's members.

    Without a group nothing is sent, and this rank's own overlap is copied.
    add: adds the received parts to `result` instead of overwriting.
    """
    run = None if add else transfer.received_run
    arrived = result.new_empty(sum(transfer.sizes_in)) if run is None else result.view(-1)[run]
    if group is not None:
        sent_run = transfer.sent_run if local.is_contiguous() else None
        outgoing = local.new_empty(sum(transfer.sizes_out)) if sent_run is None else local.view(-1)[sent_run]
        if sent_run is None:
            pieces = [local[box] for box in transfer.sent]
            for part, piece in zip(_split_as(pieces, outgoing), pieces, strict=True):
                part.copy_(piece)
        sizes_in, sizes_out = transfer.sizes_in, transfer.sizes_out
        yield _as_work(dist.all_to_all_single(arrived, outgoing, sizes_in, sizes_out, group, async_op=True))
    parts: list[tuple[Tensor, Tensor]] = []
    if run is None:
        places = [result[box] for box in transfer.received]
        parts += zip(places, _split_as(places, arrived), strict=True)
    if transfer.local is not None:
        place, source = transfer.local
        parts.append((result[place], local[source]))
    for target, part in parts:
        if add:
            target.add_(part)
        else:
            target.copy_(part)
    return result


def _split_as(parts: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` cut into consecutive tensors of the shapes of `parts`."""
    cut = torch.split(flat, [part.numel() for part in parts])
    return [each.view(part.shape) for each, part in zip(cut, parts, strict=True)]


def _inverse(positions: Positions) -> list[int]:
    return sorted(range(len(positions)), key=positions.__getitem__)


def _start_exchange(
    received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str, counts: list[int] | None = None
) -> dist.Work:
    """Starts an all-to-all of equal rows, or with `counts[i]` elements to and from member i.

    instead_of: the kind of collective for which the all-to-all stands (see `collective_bytes.counted_as`).
    """
    with counted_as(instead_of):
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

    def take(self) -> float:
        """Seconds waited since the last `take`. On a GPU the host waits until all recorded waits are over."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds


_measuring: list[WaitTimer] = []  # of the `measure_waits` blocks, innermost last


@contextmanager
def measure_waits(waits: WaitTimer) -> Iterator[None]:
    """Inside, `waits` adds up waits of `wait_for`; of nested blocks only the innermost counts. Communication: none."""
    _measuring.append(waits)
    try:
        yield
    finally:
        _measuring.remove(waits)


def wait_for(work: dist.Work | None) -> None:
    """Waits for a collective, and measures the wait inside `measure_waits`."""
    assert work is not None, "a member of the group gets the work of async_op=True"
    if _measuring:
        _measuring[-1].wait(work)
    else:
        work.wait()
