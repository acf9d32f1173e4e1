"""Collectives on local tensors, as generators: each yields the work it has started and returns its result."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh.extents import Box, volume

from ..planning.exchange import Messages, run_of, within
from ..planning.identities import reduced
from .issued import counted_as
from .waits import wait_for
from .worlds import Positions, world

Running = Generator[dist.Work, None, Tensor]
Phase = tuple[dist.ProcessGroup, Positions]  # a group, and the position of each of its members along the axes

# torch 2.13 renamed these; 2.11 and 2.12 have the old names only
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # then divided: gloo has no average
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


_SMALL = (
    1 << 19
)  # bytes; gloo's own all-reduce of two ranks takes 1.2 to 2 times as long below, and less time above 1 MB


# Bytes of a rank's part that are worth a piece of their own. Between hosts the latency of 0.1 ms is then a twentieth of the time of 1
# Gbit/s; a GPU's collective costs 10 to 20 us to start, in which 400 Gbit/s bring 1 MB. What a link waits for before the first piece,
# and others after the last, is a part of so many.
_PIECE, _PIECE_ON_GPU = 1 << 18, 1 << 22
_MOST_PIECES = 16
_AHEAD = 1  # pieces under way beside the one that starts: more of them share a link, and end at once


class Pending:
    """Collectives that run: the first is started; `wait()` brings the result."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._advance()

    @classmethod
    def finished(cls, result: Tensor) -> Pending:
        """Nothing runs any more."""
        return cls(_returned(result))

    def wait(self) -> Tensor:
        """Waits for what was started, runs the rest, and returns the result."""
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


def _returned(result: Tensor) -> Running:
    return result
    yield


def pieces_of(elements: int, tensor: Tensor, phases: Sequence[Phase]) -> list[slice]:
    """The pieces in which a rank's part, so many elements of a tensor, goes through phases: while one is in one, the next is in another.

    Phases are of links of different speeds, which then work at once. One piece where there is one phase, or little to move.
    """
    least = _PIECE_ON_GPU if tensor.is_cuda else _PIECE
    pieces = max(1, min(_MOST_PIECES, elements * tensor.itemsize // least)) if len(phases) > 1 else 1
    ends = [elements * i // pieces for i in range(pieces + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def in_turn(pieces: Iterable[Running]) -> Generator[dist.Work, None, None]:
    """Runs what is alike in all: of a few pieces a collective each is under way, and the oldest is waited for."""
    active: deque[tuple[Running, dist.Work]] = deque()

    def go_on(piece: Running) -> None:
        with suppress(StopIteration):
            active.append((piece, next(piece)))

    for piece in pieces:
        go_on(piece)
        if len(active) > _AHEAD:
            oldest, work = active.popleft()
            yield work
            go_on(oldest)
    while active:
        oldest, work = active.popleft()
        yield work
        go_on(oldest)


def all_gather(part: Tensor, phases: Sequence[Phase]) -> Running:
    """The parts of all members, stacked by position; the last phase's outermost."""
    for group, positions in phases:
        gathered = part.new_empty((len(positions), part.numel()))
        yield start_all_gather(gathered, part, group)
        part = gathered if isinstance(positions, range) else gathered[_inverse(positions)]
    return part


def gather_pieces(
    part: Tensor, phases: Sequence[Phase], pieces: Sequence[slice], into: Tensor
) -> Generator[dist.Work, None, None]:
    """As `all_gather`, piece by piece. part: of one dim. into: takes the parts, [*sizes, elements of one]."""

    def gather(piece: slice) -> Running:
        place = into[..., piece]
        return place.copy_((yield from all_gather(part[piece], phases)).view(place.shape))

    yield from in_turn(gather(piece) for piece in pieces)


def by_exchange() -> bool:
    """Whether all-gathers and reduce-scatters go as all-to-alls.

    Not where torch checks all calls (TORCH_DISTRIBUTED_DEBUG=DETAIL): it compares the shapes of gathers, and not of all-to-alls.
    """
    return world().by_exchange and dist.get_debug_level() != dist.DebugLevel.DETAIL  # type: ignore[attr-defined]


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to fill `whole` with the parts of a group's members, one behind the other.

    On gloo by an exchange, which takes half the time or less, and for that long the memory of the result once more; between two ranks
    none more.
    """
    if not by_exchange():
        return _started(all_gather_single(whole.view(-1), part.reshape(-1), group, async_op=True))
    if group.size() == 2:
        rows, mine = whole.view(2, -1), part.reshape(-1)
        if rows[group.rank()].data_ptr() != mine.data_ptr():
            rows[group.rank()].copy_(mine)
        return _swapped(rows[1 - group.rank()], mine, group, "all-gather")
    copies = part.reshape(1, -1).expand(group.size(), -1).contiguous()
    return _exchanged(whole, copies, group, "all-gather")


def all_reduce(whole: Tensor, op: str, group: dist.ProcessGroup) -> Running:
    """The reduction of all members' tensors, in the memory of `whole`; bool goes as bytes, which every backend reduces.

    On gloo two ranks exchange small tensors and add them up: as many bytes, in one step of two. Of one or two numbers gloo does it so
    itself.
    """
    result = whole.view(torch.uint8) if whole.dtype == torch.bool else whole
    small = whole.numel() > 2 and whole.nbytes <= _SMALL
    if small and op in ("sum", "avg") and group.size() == 2 and by_exchange():
        other = torch.empty_like(result)
        yield _swapped(other, result, group, "all-reduce")
        result.add_(other)
    else:
        yield _started(dist.all_reduce(result, REDUCE_OPS[op], group, async_op=True))
    return whole.div_(dist.get_world_size(group)) if op == "avg" else whole


def reduce_scatter(stacked: Tensor, op: str, phases: Sequence[Phase]) -> Running:
    """This rank's part of the reduction of all members' stacks; the first phase's outermost.

    stacked: [*sizes, elements of a part], with any strides; it is only read.
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
    """By one collective a phase.

    NCCL scatters sums. Other reductions exchange the parts, which is as many bytes, and reduce them here. So do sums on gloo, which
    would reduce the whole everywhere, for twice the bytes, and keep a part.
    """
    for group, positions in phases:
        stacked = stacked.reshape(len(positions), -1).contiguous()
        if not isinstance(positions, range):
            stacked = stacked[list(positions)]
        if op in ("sum", "avg") and not by_exchange():
            part = stacked.new_empty(stacked.shape[1])
            yield _started(reduce_scatter_single(part, stacked.view(-1), REDUCE_OPS[op], group, async_op=True))
        elif op in ("sum", "avg") and group.size() == 2:
            part = torch.empty_like(stacked[0])
            yield _swapped(part, stacked[1 - group.rank()], group, "reduce-scatter")
            part.add_(stacked[group.rank()])
        else:
            rows = torch.empty_like(stacked)
            yield _exchanged(rows, stacked, group, "reduce-scatter")
            part = reduced("sum" if op == "avg" else op, rows)
        stacked = part.div_(len(positions)) if op == "avg" else part
    return stacked


def exchange(
    local: Tensor,
    held: Box,
    result: Tensor,
    wanted: Box,
    messages: Messages,
    group: dist.ProcessGroup | None,
    ranks: Sequence[int],
    *,
    add: bool = False,
) -> Running:
    """Fills `result`, the box `wanted`, from `local`, the box `held`, of all `ranks`; with `add`, adds to it.

    ranks: the members of the group, ascending; without a group nothing moves.
    """
    sent, received = ([box for _, box in boxes] for boxes in (messages.sends, messages.receives))
    run = None if add else run_of(received, wanted)
    arrived = result.new_empty(messages.received_elements) if run is None else result.view(-1)[run]
    if group is not None:
        run_sent = run_of(sent, held) if local.is_contiguous() else None
        outgoing = local.new_empty(messages.sent_elements) if run_sent is None else local.view(-1)[run_sent]
        if run_sent is None:
            pieces = [local[within(box, held)] for box in sent]
            for part, piece in zip(_split_as(pieces, outgoing), pieces, strict=True):
                part.copy_(piece)
        sizes = [{rank: volume(box) for rank, box in boxes} for boxes in (messages.receives, messages.sends)]
        split_in, split_out = ([each.get(rank, 0) for rank in ranks] for each in sizes)
        yield _started(dist.all_to_all_single(arrived, outgoing, split_in, split_out, group, async_op=True))
    parts: list[tuple[Tensor, Tensor]] = []
    if run is None:
        places = [result[within(box, wanted)] for box in received]
        parts += zip(places, _split_as(places, arrived), strict=True)
    if messages.kept is not None:
        parts.append((result[within(messages.kept, wanted)], local[within(messages.kept, held)]))
    for place, part in parts:
        if add:
            place.add_(part)
        else:
            place.copy_(part)
    return result


def _split_as(parts: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` cut into tensors of the shapes of parts, one behind the other."""
    cut = torch.split(flat, [part.numel() for part in parts])
    return [each.view(part.shape) for each, part in zip(cut, parts, strict=True)]


def _inverse(positions: Positions) -> list[int]:
    return sorted(range(len(positions)), key=positions.__getitem__)


def _exchanged(
    received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str, counts: list[int] | None = None
) -> dist.Work:
    """An all-to-all of rows, or of as many elements as `counts` says to and from each member."""
    with counted_as(instead_of):
        return _started(dist.all_to_all_single(received.view(-1), sent.view(-1), counts, counts, group, async_op=True))


def _swapped(received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str) -> dist.Work:
    """Each of two members gets what the other sends: as many elements both ways."""
    counts = [0, sent.numel()] if group.rank() == 0 else [sent.numel(), 0]
    return _exchanged(received, sent, group, instead_of, counts)


def _started(work: Any) -> dist.Work:
    assert work is not None, "async_op=True returns the work"
    started: dist.Work = work
    return started
