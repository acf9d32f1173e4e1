"""What a rank communicates in a training step, as a value: by phase, kind of collective and axes of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # it brings torch, which what prints this can do without
    from weft.reshard.running.issued import Collective

Phase = Literal["forward", "backward", "gradients"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Collectives of one kind in one phase, over the same axes of the mesh.

    axes: () where they are not known. nbytes: what the rank receives by all `count` of them; what it sends is as much but
    for parts of uneven sizes.
    """

    phase: Phase
    kind: str
    axes: tuple[str, ...]
    nbytes: int
    count: int

    @property
    def over(self) -> str:
        """The axes, as they are written in a mesh's own order: "dp x tp"."""
        return " x ".join(self.axes) or "others"


@dataclass(frozen=True, slots=True)
class Communication:
    """What a rank communicates in a step. entries: in the order in which they were first issued."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, issued: Mapping[Phase, Iterable[Collective]]) -> Communication:
        """From what was issued in each phase."""
        found: dict[tuple[Phase, str, tuple[str, ...]], list[int]] = {}
        for phase in PHASES:
            for each in issued.get(phase, ()):
                found.setdefault((phase, each.kind, each.axes), []).append(each.nbytes)
        return cls(
            tuple(
                Entry(phase=phase, kind=kind, axes=axes, nbytes=sum(sizes), count=len(sizes))
                for (phase, kind, axes), sizes in found.items()
            )
        )

    def select(self, *, phase: Phase | None = None, kind: str | None = None, axis: str | None = None) -> Communication:
        """The entries of a phase, of a kind, or over axes with that one among them."""
        return Communication(
            tuple(
                each
                for each in self.entries
                if phase in (None, each.phase) and kind in (None, each.kind) and (axis is None or axis in each.axes)
            )
        )

    @property
    def count(self) -> int:
        return sum(each.count for each in self.entries)

    @property
    def nbytes(self) -> int:
        """Received by the rank."""
        return sum(each.nbytes for each in self.entries)

    @property
    def counts(self) -> Counter[str]:
        """Collectives by kind."""
        counts: Counter[str] = Counter()
        for each in self.entries:
            counts[each.kind] += each.count
        return counts

    def __str__(self) -> str:
        """A line for each phase and axes: the collectives by kind, and the bytes that the rank receives."""
        groups = dict.fromkeys((each.phase, each.over) for each in self.entries)
        lines = []
        for phase, over in groups:
            part = Communication(tuple(each for each in self.entries if (each.phase, each.over) == (phase, over)))
            lines.append((phase, over, part.summary, f"{part.nbytes:,} bytes"))
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (f"{p:{wide[0]}}  {o:{wide[1]}}  {s:{wide[2]}}  {b:>{wide[3]}}" for p, o, s, b in lines)
        return "\n".join(rows) or "none"

    @property
    def summary(self) -> str:
        """ "1 all-gather, 10 all-reduce"; "none" """
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items())) or "none"
