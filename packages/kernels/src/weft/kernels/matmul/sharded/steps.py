"""A gather and a reduction over the ranks of a group in steps, one rank's part each, so that work runs beside the transfers.

Parts go from each rank to each other one directly: as many bytes as an all-gather and a reduce-scatter have, and none waits for a
neighbour's neighbour. The first step's part is the rank's own, so that no transfer is waited for before there was work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard.running.groups import group_named


@dataclass(frozen=True, slots=True)
class Steps:
    """Of a tensor that is cut along `dim` over a group. sizes: of each member's part; position: of this rank among them."""

    group: dist.ProcessGroup
    sizes: tuple[int, ...]
    position: int
    dim: int

    @classmethod
    def named(cls, group: str, sizes: Sequence[int], dim: int) -> Steps:
        found = group_named(group)
        return cls(found, tuple(sizes), found.rank(), dim)

    def part(self, whole: Tensor, member: int) -> Tensor:
        """A member's part of a tensor that has all of them."""
        return whole.narrow(self.dim, sum(self.sizes[:member]), self.sizes[member])

    def gathered(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Each member and its part: this rank's own, then the others' as they are awaited. All transfers start at once."""
        own = own.contiguous()
        arriving = []
        for step in range(1, len(self.sizes)):
            to, come = self._at(step), self._at(-step)
            shape = list(own.shape)
            shape[self.dim] = self.sizes[come]
            part = own.new_empty(shape)
            arriving.append((come, part, self._exchange(own, to, part, come)))
        yield self.position, own
        for come, part, works in arriving:
            _wait(works)
            yield come, part

    def reduced(self, made: Callable[[int], Tensor]) -> Tensor:
        """The sum over the members of what each makes for this rank, in float32 at least and in the order of the members.

        made: what this rank makes for a member; for itself last, while the others' parts travel.
        """
        arrived: dict[int, Tensor] = {}
        works, sent = [], []
        for step in range(1, len(self.sizes)):
            to, come = self._at(step), self._at(-step)
            part = made(to).contiguous()
            shape = list(part.shape)
            shape[self.dim] = self.sizes[self.position]
            arrived[come] = part.new_empty(shape)
            works += self._exchange(part, to, arrived[come], come)
            sent.append(part)  # alive until it has gone
        arrived[self.position] = own = made(self.position)
        _wait(works)
        total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for member in range(len(self.sizes)):
            total += arrived[member]
        return total.to(own.dtype)

    def _at(self, step: int) -> int:
        return (self.position + step) % len(self.sizes)

    def _exchange(self, out: Tensor, to: int, into: Tensor, come: int) -> list[dist.Work]:
        """Starts sending to one member and receiving from another; what is empty does not travel."""
        ranks = dist.get_process_group_ranks(self.group)
        both = [dist.P2POp(dist.isend, out, ranks[to], self.group)] if out.numel() else []
        if into.numel():
            both.append(dist.P2POp(dist.irecv, into, ranks[come], self.group))
        return list(dist.batch_isend_irecv(both)) if both else []


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
