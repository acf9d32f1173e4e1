"""`Call`: a collective as a recording's listener gets it; `Tape`: a listener's list of calls that can be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .collective_bytes import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective as a rank calls it, with what must agree among the ranks of a group, for `Recorded.listener`."""

    collective: Collective | None  # None for the second half of a collective that is counted already
    group: str  # the group's name, the same for all calls on the group
    ranks: tuple[int, ...]  # of the group, in the group's order
    shapes: tuple[tuple[int, ...], ...]  # of the tensors given
    dtype: torch.dtype | None  # of the first tensor
    op: str  # kind of the collective that runs, where `collective` may be another that it stands for
    peer: int | None = None  # rank of the other end, of a send or a receive; the source, of a broadcast
    tag: int = 0  # of a send or a receive
    # Rows to and from each member in an all-to-all of uneven parts, in the group's order; () for even parts.
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Tape(Protocol):
    """A listener's own list of calls, of which a part can be added again: see `Recorded.repeat`."""

    def mark(self) -> Any:
        """The place after the last call."""

    def calls_since(self, mark: Any) -> Any | None:
        """The calls and waits after `mark`, as a value that `==` compares; None for calls that cannot be repeated."""

    def repeat(self, calls: Any) -> None:
        """Adds a result of `calls_since` again."""
