"""`Trace`: a rank's training step as a list of events: work of the device, collectives, and waits for collectives.

`trace` makes a `Trace` from a run on shapes. `price` gives each event seconds on a chip; `timeline` runs the events in
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..step.communication import Phase

OpKind = Literal["product", "attention", "memory", "optimizer"]
# "recompute": an op's own function, which computes a norm's or gate's output again in place of saving the output.
# "repeat": the op's forward, run again in backward by a recomputed block of the model.
ComputePart = Literal["forward", "backward", "recompute", "repeat"]
Place = Literal["before", "block", "after"]  # before the first block (embedding), in a block, after the last (head)
Purpose = Literal["", "gradients", "parameters"]  # a sum of gradients, a gather of parameters, or neither


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Work of the device: a call of a Weft op's function, or of an op of torch outside Weft's ops."""

    name: str  # of Weft's op, as "rms_norm", or of torch's, as "aten.add"
    part: ComputePart
    kind: OpKind  # "product" and "attention" are bound by operations, the rest by bytes
    dtype: str  # of the first floating operand, as "bfloat16"
    nbytes: int  # of all operands read and results written, each once
    flops: int = 0  # of products and attention
    # For each product, in order: (batch, M, N, K). For attention: (batch, heads, kv_heads, T, S, head_dim).
    sizes: tuple[tuple[int, ...], ...] = ()
    num_launches: int = 1  # ops of torch inside, issued by the host; at least 1
    module: str = ""  # dotted name of the innermost running module; "" in the optimizer and in gradient sync


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a collective, which runs after all earlier work and beside later work, up to the `Wait`."""

    number: int  # of the collective in the trace, equal in the `Wait`
    kind: str  # "all-gather", ...
    axes: tuple[str, ...]  # of the mesh; () where unknown
    group: str  # name of the group, whose collectives run in turn
    size: int  # ranks in the group
    stride: int  # distance of neighbours in the group, in ranks
    nbytes: int  # received by the rank
    purpose: Purpose = ""
    module: str = ""  # as of `Compute`


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Later work begins after the end of the collective with this number."""

    number: int


Event = Compute | Start | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive events of a phase of a microbatch, within a block of the model or outside all blocks."""

    phase: Phase
    microbatch: int  # number among `Trace.times`; -1 in the phases "gradients" and "optimizer"
    blocks: tuple[int, ...]  # numbers of the alike blocks that each have these events; () outside blocks
    place: Place
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A rank's step, or on a mesh with "pp" the step of a stage with all blocks. Made by `trace_step`."""

    segments: tuple[Segment, ...]  # in order; alike blocks and alike microbatches have a single segment
    num_blocks: int  # of the whole model
    # For each microbatch in the segments, the number of the step's microbatches like this: of many, (1, n - 2, 1).
    times: tuple[int, ...]
    message_bytes: int  # of the tensor [B, T, H] between blocks on this rank, as sent between stages

    def count(self, segment: Segment) -> int:
        """How often the segment occurs in the step: its blocks times its microbatches."""
        return max(1, len(segment.blocks)) * (self.times[segment.microbatch] if segment.microbatch >= 0 else 1)

    def select(self, *, phase: Phase | None = None, microbatch: int | None = None) -> Iterator[Segment]:
        """The segments of a phase, or of a microbatch, or of both; None selects all."""
        for each in self.segments:
            if phase in (None, each.phase) and microbatch in (None, each.microbatch):
                yield each
