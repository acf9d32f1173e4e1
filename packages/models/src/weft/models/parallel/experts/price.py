"""Which way tokens take to their experts: the price of an exchange beside that of gathering, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.mesh import ProcessMesh
from weft.reshard import Link

from ..plan import ExpertPlan, TokenTransport
from ..styles import CONTEXT_AXIS, TENSOR_AXIS, is_data_axis

# Sizes and numbers that moving/collectives.py gives its sources for: a network of 1 Gbit/s between CPUs, whose
# collectives start in 0.1 ms, and 400 Gbit/s between GPUs, started in 10 to 20 us.
LINKS = {"cpu": Link(latency=1e-4, bandwidth=1e9 / 8), "cuda": Link(latency=15e-6, bandwidth=400e9 / 8)}
COPIES = 4  # moves of whole rows in a step: tokens and their gradients, experts' outputs and their gradients
COLLECTIVES = 6  # in a step: the copies, the choices, and the gradients of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of one layer's tokens in a step, forward and backward, by both ways. Printed by `weft train`."""

    size: int  # of "ep"
    tokens: int  # on a rank
    share: float  # expected share of a rank's tokens that another rank's experts need
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
    """The share of tokens with an expert on a given rank, for a router that chooses any k experts alike.

    1 - C(E - E / ep, k) / C(E, k): the complement of all k experts being among those of the other ranks.
    """
    elsewhere = num_experts - num_experts // size
    return 1 - math.comb(elsewhere, experts_per_token) / math.comb(num_experts, experts_per_token)


def price_of(
    *, size: int, tokens: int, hidden_size: int, num_experts: int, experts_per_token: int, itemsize: int, link: Link
) -> Price:
    """The price of both ways.

    size: of "ep". tokens: on the rank with the most. itemsize: bytes of an element of a token.
    The exchange sends a row to the ranks with the token's experts (`expected_share`), the gather to all ranks. Every
    collective sends a message to each other rank. The exchange has one more collective, of the counts. The host waits
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
    """The most tokens of a rank, of `rows` sequences of `tokens` each, as they come to the experts.

    mesh: of the model, with or without "pp".
    """
    ways = dict.fromkeys(("rows", CONTEXT_AXIS, TENSOR_AXIS), 1)
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        name = "rows" if is_data_axis(axis) else axis
        if name in ways and (name != TENSOR_AXIS or plan.over_tp):
            ways[name] *= size
    per_row = math.ceil(math.ceil(tokens / ways[CONTEXT_AXIS]) / ways[TENSOR_AXIS])
    return math.ceil(rows / ways["rows"]) * per_row
