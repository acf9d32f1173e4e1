"""Moves rows of tokens to the ranks of their experts, and moves sums of rows back, in the cheaper of two ways.

A `Transport` is `Gathering` or `Exchanging`, and has two linear maps of rows, which are transposes of each other.
`outward` copies the rows of this rank's tokens to remote ranks; `homeward` returns rows and sums the rows of a token.
Forward sends tokens outward and experts' outputs homeward; backward sends gradients of outputs outward and
gradients of tokens homeward. All tensors here are local, with a row for each token. `price_of` prices both ways from
sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh import ProcessMesh
from weft.reshard import Link
from weft.reshard.extension import (
    LazyText,
    Running,
    all_gather,
    announce,
    count_as,
    members_by_position,
    reduce_scatter,
    run_or_replay,
)

from ...plan_options import TokenTransport
from ..plan import ExpertPlan
from ..styles import CONTEXT_AXIS, EXPERT_AXIS, TENSOR_AXIS, is_data_axis

NO_EXPERT = -1  # in place of an expert's number: no expert of this rank


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRanks:
    """The ranks along "ep" in a call of experts. A position is a rank's coordinate on "ep"."""

    group: dist.ProcessGroup
    positions: Sequence[int]  # positions[i] is the position of the group's rank i
    ranks: tuple[int, ...]  # by position, the global rank
    position: int  # of this rank
    tokens: tuple[int, ...]  # by position, the number of tokens; known on every rank from the tokens' layout
    experts: int  # on each rank

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def first(self) -> int:
        """The first expert on this rank."""
        return self.position * self.experts


class Transport(Protocol):
    """A transport of tokens. Made for each call of a layer's experts; both directions may run several times."""

    # Upper bounds of the choices of this rank's experts, among own tokens and among received tokens; None: not known.
    own_choices: int | None
    received_choices: int | None

    def outward(self, rows: Tensor) -> Running:
        """rows [n, W] of this rank's tokens -> received rows [M, W]: of remote tokens; by Gathering of all tokens."""

    def homeward(self, rows: Tensor) -> Running:
        """rows [M, W] of received tokens -> [n, W], by token of this rank the sum of the returned rows."""

    def without_own(self, experts: Tensor) -> Tensor:
        """Received choices [M, k], with `NO_EXPERT` in rows without a remote token: own tokens and padding."""


def pack_choices(experts: Tensor, weights: Tensor) -> Tensor:
    """Chosen experts and weights, [n, k] each, as bytes [n, ...], to be moved by a single collective."""
    return torch.cat([each.contiguous().view(torch.uint8) for each in (experts, weights)], -1)


def unpack_choices(packed: Tensor, experts: torch.dtype, weights: torch.dtype) -> tuple[Tensor, Tensor]:
    """(experts, weights) from the bytes of `pack_choices`. experts, weights: the dtypes."""
    k = packed.shape[-1] // (experts.itemsize + weights.itemsize)
    parts = torch.split(packed, [k * experts.itemsize, k * weights.itemsize], -1)
    # Copies: a part of a single row is contiguous, but may start where no element of the dtype may.
    copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    first, second = (copy.view(dtype) for copy, dtype in zip(copies, (experts, weights), strict=True))
    return first, second


class Gathering:
    """A `Transport` by which every token goes to every rank: all-gathers outward, reduce-scatters homeward.

    Sizes follow from the layouts; the host never waits. In each collective, a rank receives (ep - 1) * m rows, where
    m is the most tokens on a rank; ranks with fewer tokens are padded.
    """

    def __init__(self, members: ExpertRanks, choices_of_token: int) -> None:
        self.own_choices: int | None = None
        self.received_choices: int | None = choices_of_token * (sum(members.tokens) - members.tokens[members.position])
        self._members, self._most = members, max(members.tokens)
        self._phases = [(members.group, members.positions)]

    def outward(self, rows: Tensor) -> Running:
        padded = _padded(rows, self._most)
        _announce("tokens gathered", rows, self._members)
        gathered = yield from all_gather(padded.view(-1), self._phases)
        return gathered.view(self._members.size * self._most, rows.shape[-1])

    def homeward(self, rows: Tensor) -> Running:
        _announce("sums of experts scattered", rows, self._members)
        stacked = rows.reshape(self._members.size, self._most * rows.shape[-1])
        part = yield from reduce_scatter(stacked, "sum", self._phases)
        return part.view(self._most, rows.shape[-1])[: self._members.tokens[self._members.position]]

    def without_own(self, experts: Tensor) -> Tensor:
        of_rank = experts.view(self._members.size, self._most, experts.shape[-1])
        for position, tokens in enumerate(self._members.tokens):
            first = 0 if position == self._members.position else tokens
            if first < self._most:
                of_rank[position, first:] = NO_EXPERT
        return experts


class Exchanging:
    """A `Transport` by which a token goes once to each rank with any of the token's experts: uneven all-to-alls.

    The router decides how many tokens go between two ranks. The ranks exchange these counts, and the host reads the
    counts from the device, once a call (`read`). A rank receives only rows of remote tokens in need of the rank's
    experts. Returned rows are added rank after rank, in a fixed order.
    """

    def __init__(self, members: ExpertRanks, experts: Tensor) -> None:
        """Start to exchange the counts. experts: [n, k], the choices of this rank's tokens, all experts numbered."""
        self._members, self._choices_of_token = members, experts.shape[-1]
        tokens, size = len(experts), members.size
        owners = torch.div(experts, members.experts, rounding_mode="floor").long()  # positions
        if not isinstance(members.positions, range):  # below, owners are ranks of the group
            owners = owners.new_tensor(members_by_position(members.positions))[owners]
        self._own = list(members.positions).index(members.position)
        needs = torch.zeros(tokens, size, dtype=torch.bool, device=experts.device).scatter_(1, owners, True)
        choices = torch.zeros(size, dtype=torch.long, device=experts.device)
        choices.scatter_add_(0, owners.view(-1), torch.ones_like(owners.view(-1)))
        needs[:, self._own] = False
        flat = needs.mT.reshape(-1)  # [size * n]: rank after rank
        places = flat.cumsum(0)
        places = torch.where(flat, places - 1, flat.numel())
        order = places.new_empty(flat.numel() + 1)
        order.scatter_(0, places, torch.arange(flat.numel(), device=flat.device))
        # The tokens to send, receiver after receiver; `read` cuts the unused end.
        self._order = order[:-1] % max(tokens, 1)
        self._sent_counts = torch.stack((needs.sum(0), choices), 1)  # [size, 2]: tokens and choices, by receiver
        self._counts = run_or_replay(lambda _: self._exchange_counts(), self._sent_counts)
        self._is_read = False
        self.own_choices: int | None = None  # both set by `read`
        self.received_choices: int | None = None

    def read(self) -> None:
        """Read the counts on the host; called before `outward`. Waits for the device and for all ranks' routers."""
        if self._is_read:
            return
        self._is_read = True
        received = self._counts.wait()
        del self._counts
        members, own = self._members, self._own
        if received.is_meta:  # shapes alone: assume that all tokens go, since the choices are data
            tokens = [members.tokens[position] for position in members.positions]
            here = tokens[own]
            self._sent = [0 if i == own else here for i in range(members.size)]
            self._received = [0 if i == own else each for i, each in enumerate(tokens)]
            self.own_choices = here * self._choices_of_token
            self.received_choices = sum(self._received) * self._choices_of_token
        else:
            sent, arriving = torch.stack((self._sent_counts, received)).tolist()
            self.own_choices = sent[own][1]
            self._sent, self._received = ([each[0] for each in counts] for counts in (sent, arriving))
            self.received_choices = sum(each[1] for i, each in enumerate(arriving) if i != own)
        self._order = self._order[: sum(self._sent)]

    def outward(self, rows: Tensor) -> Running:
        outgoing = rows.new_empty((len(self._order), rows.shape[1])) if rows.is_meta else rows[self._order]
        return (yield from self._exchange("tokens exchanged", outgoing, self._sent, self._received))

    def homeward(self, rows: Tensor) -> Running:
        members = self._members
        most = members.tokens[members.position] * self._choices_of_token
        arrived = yield from self._exchange("sums of experts returned", rows, self._received, self._sent, most)
        total = rows.new_zeros((members.tokens[members.position], rows.shape[1]))
        if rows.is_meta:
            return total
        ends = [0, *accumulate(self._sent)]
        for start, stop in pairwise(ends):
            # A rank returns a token once, so `index_add_` adds to an element at most once.
            total.index_add_(0, self._order[start:stop], arrived[start:stop])
        return total

    def without_own(self, experts: Tensor) -> Tensor:
        return experts

    def _exchange_counts(self) -> Running:
        _announce("counts of tokens", self._sent_counts, self._members)
        received = torch.empty_like(self._sent_counts)
        yield _started(dist.all_to_all_single(received, self._sent_counts, group=self._members.group, async_op=True))
        return received

    def _exchange(
        self, what: str, outgoing: Tensor, sent: list[int], received: list[int], most_rows: int | None = None
    ) -> Running:
        _announce(what, outgoing[:0], self._members)
        arrived = outgoing.new_empty((sum(received), outgoing.shape[1]))
        # On shapes, an upper bound: a token goes to, and returns from, at most as many ranks as there are choices.
        most = len(arrived) if most_rows is None else min(most_rows, len(arrived))
        row_bytes = arrived.shape[1] * arrived.itemsize
        with count_as("all-to-all", most * row_bytes, at_most=True) if arrived.is_meta else nullcontext():
            work = dist.all_to_all_single(arrived, outgoing, received, sent, group=self._members.group, async_op=True)
        yield _started(work)
        return arrived


def _announce(what: str, rows: Tensor, members: ExpertRanks) -> None:
    form = tuple(rows.shape[1:]), rows.dtype
    announce(LazyText(lambda: f"{what}, {form[0]} {form[1]}, over {EXPERT_AXIS!r}"), ranks=sorted(members.ranks))


def _padded(rows: Tensor, most: int) -> Tensor:
    if len(rows) == most:
        return rows.contiguous()
    padded = rows.new_zeros((most, rows.shape[-1]))
    padded[: len(rows)] = rows
    return padded


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "async_op=True returns the work"
    return work


# Sources are in moving/collectives.py: between CPUs 1 Gbit/s and 0.1 ms to start a collective, between GPUs
# 400 Gbit/s and 10 to 20 us.
LINKS = {"cpu": Link(latency=1e-4, bandwidth=1e9 / 8), "cuda": Link(latency=15e-6, bandwidth=400e9 / 8)}
COPIES = 4  # moves of whole rows in a step: tokens and their gradients, experts' outputs and their gradients
COLLECTIVES = 6  # in a step: the copies, the choices, and the gradients of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of both transports for a layer's tokens, forward and backward.

    Decides where the plan names no transport, and is printed by `weft train`.
    """

    size: int  # of "ep"
    tokens: int  # on the rank with the most
    share: float  # expected share of a rank's tokens with an expert on a given rank
    exchange: float  # seconds
    gather: float  # seconds
    bandwidth: float  # bytes a second that a rank receives, which both prices assume

    @property
    def cheaper(self) -> TokenTransport:
        return "exchange" if self.exchange < self.gather else "gather"

    def __str__(self) -> str:
        ranks = "the other rank" if self.size == 2 else f"each of the {self.size - 1} other ranks"
        return (
            f"exchange {1e6 * self.exchange:,.0f} us, gather {1e6 * self.gather:,.0f} us a layer and microbatch, if "
            f"{self.share:.0%} of a rank's {self.tokens:,} tokens go to {ranks} at {8e-9 * self.bandwidth:g} Gbit/s"
        )


def expected_share(num_experts: int, experts_per_token: int, size: int) -> float:
    """The share of tokens with an expert on a given rank, if every set of k experts is equally likely.

    1 - C(E - E / ep, k) / C(E, k): the complement of all k experts being on other ranks. size: of "ep".
    """
    elsewhere = num_experts - num_experts // size
    return 1 - math.comb(elsewhere, experts_per_token) / math.comb(num_experts, experts_per_token)


def price_of(
    *, size: int, tokens: int, hidden_size: int, num_experts: int, experts_per_token: int, itemsize: int, link: Link
) -> Price:
    """The price of both transports.

    size: of "ep". tokens: on the rank with the most. itemsize: bytes of a token's element.
    The exchange sends a row to the ranks with the token's experts (`expected_share`), the gather to all ranks. A
    collective costs a message to each other rank. The exchange has a further collective, of counts, and the host waits
    for the counts: two latencies, until the counts arrive and until the device has new work.
    """
    share = expected_share(num_experts, experts_per_token, size)
    row_bytes = COPIES * hidden_size * itemsize
    by_all = (size - 1) * tokens * row_bytes / link.bandwidth
    start = (size - 1) * link.latency
    return Price(
        size=size,
        tokens=tokens,
        share=share,
        exchange=(COLLECTIVES + 1) * start + 2 * link.latency + share * by_all,
        gather=COLLECTIVES * start + by_all,
        bandwidth=link.bandwidth,
    )


def tokens_on_rank(mesh: ProcessMesh, plan: ExpertPlan, rows: int, tokens: int) -> int:
    """The number of tokens on the rank with the most, as given to the experts.

    mesh: of the model, with or without "pp". rows, tokens: of the global batch, `tokens` in each row.
    """
    ways = dict.fromkeys(("rows", CONTEXT_AXIS, TENSOR_AXIS), 1)
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        name = "rows" if is_data_axis(axis) else axis
        if name in ways and (name != TENSOR_AXIS or plan.over_tp):
            ways[name] *= size
    per_row = math.ceil(math.ceil(tokens / ways[CONTEXT_AXIS]) / ways[TENSOR_AXIS])
    return math.ceil(rows / ways["rows"]) * per_row
