"""Software stacks: what a published program does otherwise than Weft's own, applied to a trace of Weft's program.

`stacks.toml` has each stack's facts, and where they were counted.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from weft.models.predict.events import Compute, Event, Segment, Start, Trace, Wait

STACKS = Path(__file__).with_name("stacks.toml")
CAST_BYTES = 4  # an element is read in bfloat16, and written twice in float8
# Memory traffic of unfused attention, in bytes a score of float16. Forward: products' result written 2, softmax 4,
# dropout 4 and its mask 1, read 2. Backward: gradient written 2, dropout 5, softmax 6, read by two products 4, and
# dropout's output read by a third 2.
SCORE_FORWARD, SCORE_BACKWARD = 13, 19
COPIES = ("aten._foreach_copy_", "aten._to_copy", "aten.cat")  # of parameters and gradients, into and out of buckets
# Bytes a parameter of Weft's update in two bytes each: gradient, parameter and two averages read, all but the gradient
# written.
WEFT_UPDATE_BYTES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A published program, as `stacks.toml` describes each field."""

    compiled: bool
    source: str
    unfused: float = 1.0
    logit_bytes: float | None = None
    optimizer_bytes: float | None = None
    scores: bool = False
    overlapped_tensor: bool = False
    attention: tuple[float, float] | None = None
    ring: float = 0.0
    one_copy: bool = False
    saved: tuple[float, float] = (0.0, 0.0)
    saved_scores: float = 0.0
    regathers: bool = False
    logit_memory: float | None = None
    gradients_apart: bool = False
    reserved: float = 1.0
    stage_gradients: float = 0.0


@cache
def stacks() -> Mapping[str, Stack]:
    """All stacks of `stacks.toml`, by name."""
    tables = tomllib.loads(STACKS.read_text())
    found = {}
    for name, table in tables.items():
        facts = {**tables.get(table.get("like", ""), {}), **table}
        facts.pop("like", None)
        found[name] = Stack(**{key: tuple(fact) if isinstance(fact, list) else fact for key, fact in facts.items()})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How a row's program differs from the traced one."""

    stack: Stack
    float8: bool = False  # linear layers of blocks multiply in float8
    alternate: bool = False  # torchtitan's selective recomputation: every second product runs again
    logits: int = 0  # of a microbatch, on the rank
    hidden_size: int = 0
    tensor_parallel: int = 1
    context_parallel: int = 1

    def of(self, trace: Trace) -> Trace:
        """The trace of the row's program."""
        return replace(trace, segments=tuple(map(self._segment, trace.segments)))

    def _segment(self, segment: Segment) -> Segment:
        events: list[Event] = []
        loss = segment.place == "after" and segment.phase in ("forward", "backward")
        for event in segment.events:
            if isinstance(event, Start):
                events.extend(self._collective(event, segment))
            elif isinstance(event, Wait):
                events.append(event)
            elif self.stack.one_copy and event.name == "aten.cat" and segment.phase == "backward":
                continue
            elif segment.place == "block" and segment.phase in ("forward", "backward"):
                events.extend(self._of_block(event))
            elif event.kind == "optimizer" and self.stack.optimizer_bytes is not None:
                events.append(replace(event, nbytes=int(event.nbytes * self.stack.optimizer_bytes / WEFT_UPDATE_BYTES)))
            elif loss and self.stack.logit_bytes is not None and event.kind == "memory" and "entropy" in event.name:
                events.append(replace(event, nbytes=int(self.stack.logit_bytes / 2 * self.logits)))
            else:
                events.append(event)
        if segment.phase == "backward" and segment.place == "block" and self.alternate:
            events = [*self._again(events), *events]
        return replace(segment, events=tuple(events))

    def _collective(self, event: Start, segment: Segment) -> Iterator[Event]:
        is_tensor_parallel = event.axes == ("tp",) and segment.place == "block" and event.purpose == ""
        if is_tensor_parallel and self.stack.overlapped_tensor:
            return
        in_float8 = self.float8 and event.kind == "all-gather" and segment.place == "block"
        if in_float8 and (is_tensor_parallel or event.purpose == "parameters"):
            event = replace(event, nbytes=event.nbytes // 2)
        yield event

    def _of_block(self, event: Compute) -> Iterator[Event]:
        if event.kind == "attention" and event.part == "recompute" and self.alternate:
            return
        if event.kind == "attention":
            yield from self._attention(event)
        elif event.kind == "product":
            yield from self._products(event)
        else:
            factor = 1.0 if event.name in COPIES else self.stack.unfused
            yield replace(event, nbytes=int(event.nbytes * factor))

    def _products(self, event: Compute) -> Iterator[Event]:
        if not self.float8:
            yield event
            return
        yield replace(event, dtype="float8")
        # The products of a forward share their input; those of a backward come in pairs.
        sizes = event.sizes if event.part == "backward" else event.sizes[:1]
        cast = sum(_cast_bytes(size, event.part, self) for size in sizes)
        yield Compute(name="aten.cast", part=event.part, kind="memory", dtype=event.dtype, nbytes=cast)

    def _attention(self, event: Compute) -> Iterator[Event]:
        if not self.stack.scores:
            # Of the pairs of tokens, each rank has 1 / cp in its own shard, and the rest in steps of the ring.
            longer = 1 + self.stack.ring * (1 - 1 / self.context_parallel)
            yield replace(event, flops=int(event.flops * longer))
            return
        batch, heads, _, T, S, width = event.sizes[0]
        scores = batch * heads * T * S
        backward = event.part == "backward"
        products = 4 if backward else 2
        yield Compute(
            name="scores",
            part=event.part,
            kind="product",
            dtype=event.dtype,
            nbytes=0,
            flops=2 * products * scores * width,
            sizes=tuple(
                (batch * heads, T, S, width) if i % 2 else (batch * heads, T, width, S) for i in range(products)
            ),
        )
        traffic = SCORE_BACKWARD if backward else SCORE_FORWARD
        yield Compute(name="softmax", part=event.part, kind="memory", dtype=event.dtype, nbytes=traffic * scores)

    def _again(self, events: list[Event]) -> Iterator[Event]:
        """Every second product of the block's forward: of keys, of the attention's output and of the gate's other half.

        As seen from the backward products of the same layers, of which the first two of a layer have its sizes.
        """
        for event in events:
            if isinstance(event, Compute) and event.kind == "product" and event.part == "backward":
                layers = event.sizes[::2]
                chosen = [layers[i] for i in ((1,) if len(layers) > 1 else (0,))]
                if event.module.endswith("down_proj"):
                    continue
                sizes = tuple((batch, M, K, N) for batch, M, N, K in chosen)
                flops = sum(2 * b * M * N * K for b, M, N, K in sizes)
                yield replace(event, part="recompute", sizes=sizes, flops=flops, nbytes=0)


def _cast_bytes(size: tuple[int, ...], part: str, program: Program) -> int:
    """Memory traffic of a product's casts to float8, as torchao's roofline counts them for one scale a tensor.

    size: (batch, M, N, K). Forward casts the input. Backward casts the output's gradient, once for two products. A cast
    reads the tensor, and writes it by rows and by columns; the op before the cast finds the maximum. Shards are cast
    before they are gathered: weights over the data axes, activations over "tp".
    """
    batch, M, _, K = size
    operand = M * K // (2 if part == "backward" else 1)
    gathered = program.hidden_size in ((K, M) if part == "backward" else (K,))
    return batch * CAST_BYTES * operand // (program.tensor_parallel if gathered else 1)
