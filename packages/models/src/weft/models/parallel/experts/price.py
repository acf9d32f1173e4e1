"""Prices the two transports of tokens to experts, exchange and gather, from sizes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.mesh import ProcessMesh
from weft.reshard import Link

from ...plan_options import TokenTransport
from ..plan import ExpertPlan
from ..styles import CONTEXT_AXIS, TENSOR_AXIS, is_data_axis

# Sources are in moving/collectives.py: between CPUs 1 Gbit/s and 0.1 ms to start a collective, between GPUs
# 400 Gbit/s and 10 to 20 us.
LINKS = {"cpu": Link(latency=1e-4, bandwidth=1e9 / 8), "cuda": Link(latency=15e-6, bandwidth=400e9 / 8)}
COPIES = 4  # moves of whole rows in a step: tokens and their gradients, experts' outputs and their gradients
COLLECTIVES = 6  # in a step: the copies, the choices, and the gradients of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of both transports for a layer's tokens, forward and backward. Printed by `weft train`."""

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
