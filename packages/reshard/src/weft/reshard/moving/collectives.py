"""Collectives on local tensors, as generators: each yields the started Works, and returns the result.

`Pending` runs a generator, with time for computation between start and wait. Callers are the executor (steps of plans),
buckets.py and shared_memory.py (gradients), gathering.py (parameters), weft.kernels (collectives inside ops), and
weft.models' transports of experts' tokens and packed keys. This file decides how a backend performs a collective: on
gloo, all-gathers and reduce-scatters go as all-to-alls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..planning.layouts import reduce_parts
from ..world.collective_bytes import count_as, received_bytes, uncounted
from ..world.exact import exact_axes
from ..world.folded import FoldedGroup
from ..world.world import Positions, members_by_position, world
from .tree import Members, tree_sum
from .waits import wait_for

Running = Generator[dist.Work, None, Tensor]
# A step of a collective: a group along one or several axes, and the members' positions, both from `group_along`.
CollectivePhase = tuple[dist.ProcessGroup, Positions]

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
    """Running collectives: the first is started at construction; `wait()` runs the rest and returns the result.

    Made by `start` of plans, by buckets.py, and by ops of weft.kernels and transports of weft.models.
    _work: the collective under way; None once the result is there. _result: set when `_work` becomes None.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._advance()

    @classmethod
    def finished(cls, result: Tensor) -> Pending:
        """A Pending whose result is there already."""
        return cls(immediate_result(result))

    def wait(self) -> Tensor:
        """Waits for the started collective, runs the rest, and returns the result; later calls return at once."""
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


def split_into_pieces(elements: int, tensor: Tensor, phases: Sequence[CollectivePhase]) -> list[slice]:
    """Cuts a rank's part into pieces, which pass through the phases of a collective as through a pipeline.

    While a piece is in a phase, the next piece is in the phase before, and links of different speeds work at once.
    A single phase, or little data, takes a single piece. Called by the executor's all-gather, and by `reduce_scatter`.
    Returns ranges of the part's elements, flat. elements: of the part. tensor: has the part's device and dtype.
    """
    if len(phases) == 1:
        return [slice(0, elements)]
    least = _LEAST_PIECE_BYTES_ON_GPU if tensor.is_cuda else _LEAST_PIECE_BYTES
    pieces = max(1, min(_MOST_PIECES, elements * tensor.itemsize // least))
    ends = [elements * i // pieces for i in range(pieces + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def interleave(pieces: Iterable[Running]) -> Generator[dist.Work, None, None]:
    """Runs the generators of several pieces, with collectives of at most three pieces in flight.

    Called by `gather_pieces` and `_scatter_pieces`. Yields the collective to be waited for next. Where two collectives
    are in flight when a piece begins, the oldest is waited for first, and the oldest piece starts the next phase.
    All ranks must interleave the same pieces.
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


def all_gather(part: Tensor, phases: Sequence[CollectivePhase]) -> Running:
    """All-gathers `part` phase by phase. Called by the executor, and by weft.models' transport of experts' tokens.

    part: of any shape, equal on all ranks. Returns the members' parts sorted by position, [members of the last phase,
    elements gathered in the phases before]: the last phase's axis is outermost.
    """
    for group, positions in phases:
        gathered = part.new_empty((len(positions), part.numel()))
        yield start_all_gather(gathered, part, group)
        part = gathered if isinstance(positions, range) else gathered[members_by_position(positions)]
    return part


def gather_pieces(
    part: Tensor, phases: Sequence[CollectivePhase], pieces: Sequence[slice], into: Tensor
) -> Generator[dist.Work, None, None]:
    """`all_gather` piece by piece, into a tensor with any strides. Called by the executor's all-gather.

    part: flat. pieces: from `split_into_pieces`.
    into: receives the parts, [*sizes of the phases, last phase first, elements of a part].
    """

    def gather(piece: slice) -> Running:
        target = into[..., piece]
        return target.copy_((yield from all_gather(part[piece], phases)).view(target.shape))

    yield from interleave(gather(piece) for piece in pieces)


def uses_all_to_all() -> bool:
    """Whether all-gathers and reduce-scatters are run as all-to-alls; of a world on gloo.

    Called in this file, and by shared_memory.py, which shares memory between processes only where this is true.
    False with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then checks that ranks gather equal shapes, a check which
    all-to-alls would skip.
    """
    return world().prefers_all_to_all and dist.get_debug_level() != dist.DebugLevel.DETAIL  # type: ignore[attr-defined]


def start_all_gather(gathered: Tensor, part: Tensor, group: dist.ProcessGroup | FoldedGroup) -> dist.Work:
    """Starts to fill `gathered` with the parts of the group's members, in the order of the group's ranks.

    Called by `all_gather`, by gathering.py for parameters, and by the cross-entropy ops of weft.kernels.
    gathered: contiguous, with the elements of [members, elements of a part]. part: may be this rank's row of
    `gathered`.
    On gloo an all-to-all does this in half the time or less, but needs the result's memory a second time meanwhile.
    Two ranks need no extra memory. On a FoldedGroup the all-gather is over when this function returns.
    """
    if isinstance(group, FoldedGroup):
        _gather_folded(gathered, part, group)
        return _done()
    if not uses_all_to_all():
        return as_work(all_gather_single(gathered.view(-1), part.reshape(-1), group, async_op=True))
    if group.size() == 2:
        rows, own_part = gathered.view(2, -1), part.reshape(-1)
        if rows[group.rank()].data_ptr() != own_part.data_ptr():
            rows[group.rank()].copy_(own_part)
        return _start_swap(rows[1 - group.rank()], own_part, group, "all-gather")
    copies = part.reshape(1, -1).expand(group.size(), -1).contiguous()
    return _start_exchange(gathered, copies, group, "all-gather")


class _Done:
    """A finished collective."""

    def wait(self) -> None:
        """Return at once."""


def _done() -> dist.Work:
    done: Any = _Done()
    work: dist.Work = done
    return work


def _gather_folded(gathered: Tensor, part: Tensor, group: FoldedGroup) -> None:
    """`start_all_gather` on a FoldedGroup: a single all-gather of the parts of all members of each rank."""

    def gather(parts: list[Tensor]) -> Tensor:
        rows = torch.stack(parts).view(1, len(parts), -1)
        if group.group is not None:
            (of_ranks, positions), own = group.group, rows
            rows = own.new_empty((len(positions), *own.shape[1:]))
            wait_for(start_all_gather(rows, own, of_ranks))
            rows = rows if isinstance(positions, range) else rows[members_by_position(positions)]
        return group.in_order(rows)

    gathered.view(group.size(), -1).copy_(group.meet(part, gather))


def start_sum(tensor: Tensor, group: dist.ProcessGroup | FoldedGroup) -> dist.Work:
    """Starts to add up the group's tensors in place, by an all-reduce.

    Called by weft.kernels' sharded cross-entropy, for sums over the axes that shard the tokens.
    Inside `exact_sums`, every rank gathers the tensors and adds them in the tree before the function returns: meant for
    few numbers.
    """
    if exact_axes() is None and not isinstance(group, FoldedGroup):
        return as_work(dist.all_reduce(tensor, group=group, async_op=True))
    rows = tensor.new_empty((group.size(), tensor.numel()))
    wait_for(start_all_gather(rows, tensor, group))
    tensor.copy_(tree_sum(rows).view(tensor.shape))
    return _done()


def all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup, members: Members) -> Running:
    """Reduces the members' tensors into the memory of `tensor`; bool is reduced as uint8, which every backend supports.

    Called by the executor, buckets.py and shared_memory.py. Divided by the number of members for "avg".
    On gloo, two ranks swap small tensors and add the received tensor: the same bytes as an all-reduce, in a single step
    instead of two. For at most two elements, gloo's own all-reduce swaps and adds, too.
    members: the group's members as addends, reduced in the tree inside `exact_sums` (see `adds_in_tree`).
    """
    result = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    is_small = tensor.numel() > 2 and tensor.nbytes <= _MOST_SWAPPED_BYTES
    if adds_in_tree(op, group.size()):
        yield from _all_reduce_in_tree(result.view(-1), op, group, members)
    elif is_small and op in ("sum", "avg") and group.size() == 2 and uses_all_to_all():
        received = torch.empty_like(result)
        yield _start_swap(received, result, group, "all-reduce")
        result.add_(received)
    else:
        yield as_work(dist.all_reduce(result, REDUCE_OPS[op], group, async_op=True))
    return tensor.div_(dist.get_world_size(group)) if op == "avg" else tensor


def adds_in_tree(op: str, members: int) -> bool:
    """Whether a reduction of the tensors of this number of members is taken in the fixed tree.

    Called in this file, and by shared_memory.py. members: the number of members; op: a key of `REDUCE_OPS`.
    True inside `exact_sums`, for more than two members, and for two members by min or max: a backend may return either
    of 0.0 and -0.0, and miss a NaN. Two addends have the same sum in either order.
    """
    return members > 1 and (members > 2 or op in ("min", "max")) and exact_axes() is not None


def all_reduce_bytes(op: str, tensor_elements: int, itemsize: int, ranks: int) -> int:
    """Bytes received by a rank in `all_reduce` of a tensor, which is padded where `adds_in_tree`.

    Called to count a sum taken by an all-to-all and an all-gather, or in shared memory (shared_memory.py).
    """
    if adds_in_tree(op, ranks):
        tensor_elements = -(-tensor_elements // ranks) * ranks
    return received_bytes("all-reduce", ranks, tensor_elements * itemsize, 0, itemsize)


def _all_reduce_in_tree(
    flat: Tensor, op: str, group: dist.ProcessGroup, members: Members
) -> Generator[dist.Work, None, None]:
    """Reduces the members' flat tensors in the tree, in place: an all-to-all, the sum of a part here, an all-gather.

    The bytes are an all-reduce's, 2 (n - 1) / n of the tensor, which is padded by at most n - 1 elements. Both
    collectives are counted with the all-to-all, as a single all-reduce.
    """
    parts, elements = group.size(), -(-flat.numel() // group.size())
    if not elements:
        return
    is_padded = elements * parts != flat.numel()
    sent = torch.cat([flat, flat.new_zeros(elements * parts - flat.numel())]) if is_padded else flat
    rows = flat.new_empty((parts, elements))
    with count_as("all-reduce", all_reduce_bytes(op, flat.numel(), flat.itemsize, parts)):
        exchanging = dist.all_to_all_single(rows.view(-1), sent, None, None, group, async_op=True)
    yield as_work(exchanging)
    part = members.reduce("sum" if op == "avg" else op, rows)
    with uncounted():
        if uses_all_to_all():
            gathering = dist.all_to_all_single(sent, part.repeat(parts), None, None, group, async_op=True)
        else:
            gathering = all_gather_single(sent, part, group, async_op=True)
    yield as_work(gathering)
    if is_padded:
        flat.copy_(sent[: flat.numel()])


def reduce_scatter(
    stacked: Tensor, op: str, phases: Sequence[CollectivePhase], addends: Sequence[Members] | None = None
) -> Running:
    """Reduces the members' stacked parts, phase by phase, and returns this rank's part of the result, flat.

    Called by the executor and buckets.py; without addends by weft.models' transport of experts' tokens, and by the
    linear cross-entropy of weft.kernels.
    stacked: [*sizes of the phases in order, elements of a part], with any strides; not changed.
    addends: the members of each phase as addends, reduced in the tree inside `exact_sums` (see `adds_in_tree`). None:
        each phase is along a single axis, whose positions are the order of the addends.
    """
    if addends is None:
        addends = [Members(positions, (len(positions),), (0,)) for _, positions in phases]
    pieces = split_into_pieces(stacked.shape[-1], stacked, phases)
    if len(pieces) > 1:
        return _scatter_pieces(stacked, op, phases, addends, pieces)
    return _reduce_scatter(stacked, op, phases, addends)


def _scatter_pieces(
    stacked: Tensor, op: str, phases: Sequence[CollectivePhase], addends: Sequence[Members], pieces: Sequence[slice]
) -> Running:
    part = stacked.new_empty(stacked.shape[-1])

    def scatter(piece: slice) -> Running:
        return part[piece].copy_((yield from _reduce_scatter(stacked[..., piece], op, phases, addends)))

    yield from interleave(scatter(piece) for piece in pieces)
    return part


def _reduce_scatter(stacked: Tensor, op: str, phases: Sequence[CollectivePhase], addends: Sequence[Members]) -> Running:
    """`reduce_scatter` by a single collective in each phase.

    NCCL scatters sums. For any other reduction, the ranks exchange parts, which is as many bytes, and reduce
    the received parts locally. Sums on gloo go the same way: gloo's reduce-scatter reduces everything on every rank,
    for twice the bytes, and keeps a part.
    """
    for (group, positions), members in zip(phases, addends, strict=True):
        stacked = stacked.reshape(len(positions), -1).contiguous()
        if not isinstance(positions, range):
            stacked = stacked[list(positions)]
        if adds_in_tree(op, len(positions)):
            rows = torch.empty_like(stacked)
            yield _start_exchange(rows, stacked, group, "reduce-scatter")
            part = members.reduce("sum" if op == "avg" else op, rows)
        elif op in ("sum", "avg") and not uses_all_to_all():
            part = stacked.new_empty(stacked.shape[1])
            yield as_work(reduce_scatter_single(part, stacked.view(-1), REDUCE_OPS[op], group, async_op=True))
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


def _start_exchange(
    received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str, counts: list[int] | None = None
) -> dist.Work:
    """Starts an all-to-all: of equal rows, or with `counts`, of `counts[i]` elements to and from member i.

    instead_of: the kind of collective for which the all-to-all stands (see `collective_bytes.count_as`).
    """
    with count_as(instead_of):
        return as_work(dist.all_to_all_single(received.view(-1), sent.view(-1), counts, counts, group, async_op=True))


def _start_swap(received: Tensor, sent: Tensor, group: dist.ProcessGroup, instead_of: str) -> dist.Work:
    """Starts a swap between a group's two members, of tensors with equally many elements."""
    counts = [0, sent.numel()] if group.rank() == 0 else [sent.numel(), 0]
    return _start_exchange(received, sent, group, instead_of, counts)


def as_work(work: Any) -> dist.Work:
    """The work of a collective of torch, for type checkers. Called in this file, and by `exchange` in transfer.py."""
    assert work is not None, "async_op=True returns the work"
    started: dist.Work = work
    return started
