"""`Communication`: a rank's collectives in a training step, by phase, kind of collective and mesh axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # imports torch, which printing a Communication does not need
    from weft.reshard.extension import Collective

Phase = Literal["forward", "backward", "gradients", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """All collectives of the same kind, phase and mesh axes."""

    phase: Phase
    kind: str  # "all-reduce", ...
    axes: tuple[str, ...]  # of the mesh; () where unknown
    nbytes: int  # received by the rank in all `count` collectives; sent bytes are equal, except with uneven parts
    count: int
    at_most: bool = False  # whether `nbytes` depends on data, and is a predicted upper bound

    @property
    def over(self) -> str:
        """The axes in words, in the mesh's order: "dp x tp"; "others" where unknown."""
        return " x ".join(self.axes) or "others"


@dataclass(frozen=True, slots=True)
class Communication:
    """The communication of a rank in a training step. Returned by `record`."""

    entries: tuple[Entry, ...] = ()  #: by phase, then in the order of first issue

    @classmethod
    def of(cls, issued: Mapping[Phase, Iterable[Collective]]) -> Communication:
        """Group the collectives issued in each phase by kind and axes."""
        found: dict[tuple[Phase, str, tuple[str, ...]], list[Collective]] = {}
        for phase in PHASES:
            for each in issued.get(phase, ()):
                found.setdefault((phase, each.kind, each.axes), []).append(each)
        return cls(
            tuple(
                Entry(
                    phase=phase,
                    kind=kind,
                    axes=axes,
                    nbytes=sum(each.nbytes for each in of_kind),
                    count=len(of_kind),
                    at_most=any(each.at_most for each in of_kind),
                )
                for (phase, kind, axes), of_kind in found.items()
            )
        )

    def predicts(self, issued: Communication) -> bool:
        """Whether `issued`, of a real step, agrees with this prediction: equal, or with fewer bytes where `at_most`."""
        if len(self.entries) != len(issued.entries):
            return False
        return all(
            own == replace(other, nbytes=own.nbytes, at_most=own.at_most)
            and (own.nbytes == other.nbytes or (own.at_most and other.nbytes < own.nbytes))
            for own, other in zip(self.entries, issued.entries, strict=True)
        )

    def select(self, *, phase: Phase | None = None, kind: str | None = None, axis: str | None = None) -> Communication:
        """The entries of a phase, of a kind, and over axes including `axis`; None selects all."""
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
        """Bytes received by the rank; an upper bound where `at_most`."""
        return sum(each.nbytes for each in self.entries)

    @property
    def at_most(self) -> bool:
        """Whether the bytes of some collectives depend on data, so that `nbytes` is an upper bound."""
        return any(each.at_most for each in self.entries)

    @property
    def counts(self) -> Counter[str]:
        """Kind -> number of collectives."""
        counts: Counter[str] = Counter()
        for each in self.entries:
            counts[each.kind] += each.count
        return counts

    def __str__(self) -> str:
        """A line for each phase and set of axes: the collectives by kind, and the bytes received."""
        groups = dict.fromkeys((each.phase, each.over) for each in self.entries)
        lines = []
        for phase, over in groups:
            part = Communication(tuple(each for each in self.entries if (each.phase, each.over) == (phase, over)))
            most = "at most " if part.at_most else ""
            lines.append((phase, over, part.summary, f"{most}{part.nbytes:,} bytes"))
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = (f"{p:{wide[0]}}  {o:{wide[1]}}  {s:{wide[2]}}  {b:>{wide[3]}}" for p, o, s, b in lines)
        return "\n".join(rows) or "none"

    @property
    def summary(self) -> str:
        """ "1 all-gather, 10 all-reduce"; "none" """
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items())) or "none"
