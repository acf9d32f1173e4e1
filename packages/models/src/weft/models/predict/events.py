"""What a rank does in a training step, as values: work of its device, collectives, and where results are awaited.

`trace` makes a `Trace` from a run on shapes. `price` gives each event seconds on a chip, `timeline` puts them on
streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "attention", "memory", "optimizer"]
Phase = Literal["forward", "backward", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work of the device: one call of a Weft op's function, or of an op of torch outside of Weft's ops."""

    name: str  # of Weft's op, as "rms_norm", or of torch's, as "aten.add"
    part: Literal["forward", "backward", "recompute"]
    kind: Kind  # what bounds the time: products and attention by operations, the rest by bytes
    dtype: str  # of the first floating operand, as "bfloat16"
    nbytes: int  # of all operands read and results written, each once
    flops: int = 0  # of products and attention
    # of each product, in order: (batch, M, N, K). Of attention: (batch, heads, kv_heads, T, S, head_dim).
    sizes: tuple[tuple[int, ...], ...] = ()
    num_launches: int = 1  # ops of torch inside, at least 1: the host's work
    module: str = ""  # dotted name of the innermost module running, "" in the optimizer and in gradient sync


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A collective is issued. It runs after the work issued before it, beside the work issued after it."""

    number: int  # of the collective in the trace, for `Wait`
    kind: str  # "all-gather", ...
    axes: tuple[str, ...]  # of the mesh, () where unknown
    group: str  # name; collectives of a group run one after the other
    size: int  # ranks in the group
    stride: int  # distance of neighbours in the group, in ranks
    nbytes: int  # received by the rank
    purpose: Literal["", "gradients", "parameters"] = ""  # the sum of gradients, or a gather of sharded parameters
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The work issued later waits for a collective."""

    number: int


Event = Compute | Start | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive events of one phase of a microbatch, within a block of the model or outside of all blocks."""

    phase: Phase
    microbatch: int  # -1 in the phases "gradients" and "optimizer"
    # Numbers of the blocks, in the whole model, for each of which the events are repeated: all are alike. () outside.
    blocks: tuple[int, ...]
    place: Literal["before", "block", "after"]  # before the first block (embedding), in blocks, after the last (head)
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A rank's step. Without the axis "pp": a pipeline's step is composed of the segments of one microbatch."""

    segments: tuple[Segment, ...]  # in the order of the program, where blocks and microbatches alike appear once
    num_blocks: int  # of the whole model
    # microbatches in the segments stand for those of the step: first, middle, last. times[i]: how many i stands for.
    times: tuple[int, ...]
    message_bytes: int  # of a tensor [B, T, H] between blocks, on this rank: what a pipeline sends

    def count(self, segment: Segment) -> int:
        """How many segments of the step one of the trace stands for: its blocks, in its microbatches."""
        return max(1, len(segment.blocks)) * (self.times[segment.microbatch] if segment.microbatch >= 0 else 1)

    def select(self, *, phase: Phase | None = None, microbatch: int | None = None) -> Iterator[Segment]:
        """The segments of a phase and of a microbatch."""
        for each in self.segments:
            if phase in (None, each.phase) and microbatch in (None, each.microbatch):
                yield each
