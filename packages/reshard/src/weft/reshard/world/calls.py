"""For listeners of a recording (`Recorded.listener`): `Call` is a collective called, `Tape` the listener's list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .collective_bytes import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A rank's call of a collective, send or receive, with all that the calls of the group's ranks must agree on."""

    collective: Collective | None  # as counted; None inside `uncounted`, where an earlier call counts for this call too
    group: str  # the group's name, the same for all calls on the group
    ranks: tuple[int, ...]  # of the group, in the group's order
    shapes: tuple[tuple[int, ...], ...]  # of the tensors given
    dtype: torch.dtype | None  # of the first tensor
    op: str  # the kind really called, as "all-gather"; inside `count_as`, `collective` has the kind given there
    peer: int | None = None  # the rank sent to, received from or broadcast from
    tag: int = 0  # of a send or a receive
    # Rows to and from each member in an all-to-all of uneven parts, in the group's order; () for even parts.
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Tape(Protocol):
    """A listener's own list of calls. `Recorded.repeat` adds a part of the list again, without running the program."""

    def mark(self) -> Any:
        """The place after the last call."""

    def calls_since(self, mark: Any) -> Any | None:
        """The calls and waits after `mark`, for `repeat` and for `==`; None for calls that cannot be repeated."""

    def repeat(self, calls: Any) -> None:
        """Appends `calls`, a result of `calls_since`, to the list."""
