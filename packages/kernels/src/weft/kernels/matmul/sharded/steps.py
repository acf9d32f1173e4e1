"""All-gather and reduce-scatter over a process group in steps, which overlap transfers with computation.

A step moves the part of one member. Every rank sends its parts directly to each other rank: the same bytes as an
all-gather or a reduce-scatter, without waiting for a ring. All transfers run beside the work on the rank's own part.
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
    """The steps for a tensor which is sharded along `dim` over the members of a group."""

    group: dist.ProcessGroup
    sizes: tuple[int, ...]  # each member's size along dim
    position: int  # this rank's index in the group
    dim: int

    @classmethod
    def named(cls, group: str, sizes: Sequence[int], dim: int) -> Steps:
        found = group_named(group)
        return cls(found, tuple(sizes), found.rank(), dim)

    def part(self, whole: Tensor, member: int) -> Tensor:
        """The view of a member's part in `whole`, a tensor with all parts."""
        return whole.narrow(self.dim, sum(self.sizes[:member]), self.sizes[member])

    def gathered(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields (member, part): this rank's own part, then each received part. All transfers start beforehand."""
        own = own.contiguous()
        arriving = []
        for step in range(1, len(self.sizes)):
            to, source = self._at(step), self._at(-step)
            shape = list(own.shape)
            shape[self.dim] = self.sizes[source]
            part = own.new_empty(shape)
            arriving.append((source, part, self._exchange(own, to, part, source)))
        yield self.position, own
        for source, part, works in arriving:
            _wait(works)
            yield source, part

    def reduced(self, compute: Callable[[int], Tensor]) -> Tensor:
        """The sum of the addends of all members for this rank, in float32 at least and in the order of members.

        compute: this rank's addend for a member; called for this rank itself last, while the transfers run.
        """
        arrived: dict[int, Tensor] = {}
        works, sent = [], []
        for step in range(1, len(self.sizes)):
            to, source = self._at(step), self._at(-step)
            part = compute(to).contiguous()
            shape = list(part.shape)
            shape[self.dim] = self.sizes[self.position]
            arrived[source] = part.new_empty(shape)
            works += self._exchange(part, to, arrived[source], source)
            sent.append(part)  # keeps the memory alive until the send completes
        arrived[self.position] = own = compute(self.position)
        _wait(works)
        total = torch.zeros_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        for member in range(len(self.sizes)):
            total += arrived[member]
        return total.to(own.dtype)

    def _at(self, step: int) -> int:
        return (self.position + step) % len(self.sizes)

    def _exchange(self, out: Tensor, to: int, into: Tensor, source: int) -> list[dist.Work]:
        """Starts sending `out` to member `to` and receiving `into` from member `source`; empty tensors are skipped."""
        ranks = dist.get_process_group_ranks(self.group)
        both = [dist.P2POp(dist.isend, out, ranks[to], self.group)] if out.numel() else []
        if into.numel():
            both.append(dist.P2POp(dist.irecv, into, ranks[source], self.group))
        return list(dist.batch_isend_irecv(both)) if both else []


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
