"""A rank's part of an exchange of boxes between ranks: `Transfer` and `exchange`, on local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from weft.mesh.extension import Box, volume

from ..planning.exchange import Messages, contiguous_run, relative_box
from .collectives import Running, as_work


@dataclass(frozen=True, slots=True)
class Transfer:
    """This rank's part of an exchange. Made once by `Transfer.of`, run by `exchange`.

    A Box is a slice for each dim of a tensor.
    """

    sent: list[Box]  # parts of the local tensor to send, in the order of receivers
    send_slice: slice | None  # all sent parts in the flat local tensor, if contiguous; None: parts are packed first
    sizes_out: list[int]  # elements sent to each member of the group
    received: list[Box]  # parts of the result to receive, in the order of senders
    receive_slice: slice | None  # all received parts in the flat result; None: parts are unpacked afterwards
    sizes_in: list[int]  # elements received from each member of the group
    local: tuple[Box, Box] | None  # copied by this rank alone: the part of the result, and of the local tensor

    @classmethod
    def of(cls, held: Box, needed: Box, messages: Messages, ranks: Sequence[int]) -> Transfer:
        """The exchange from this rank's part of the global tensor, the box `held`, to the box `needed`.

        messages: this rank's, with boxes of the global tensor. ranks: the group's members, ascending.
        """
        sent, received = ([box for _, box in boxes] for boxes in (messages.sends, messages.receives))
        sizes = [{rank: volume(box) for rank, box in boxes} for boxes in (messages.sends, messages.receives)]
        sizes_out, sizes_in = ([elements.get(rank, 0) for rank in ranks] for elements in sizes)
        local = messages.local
        return cls(
            [relative_box(box, held) for box in sent],
            contiguous_run(sent, held),
            sizes_out,
            [relative_box(box, needed) for box in received],
            contiguous_run(received, needed),
            sizes_in,
            None if local is None else (relative_box(local, needed), relative_box(local, held)),
        )

    def into_rows(self, senders: Sequence[int], own: int) -> Transfer:
        """The same exchange into [rows, *shape of the result], a row for each sender's part, for a sum in the tree.

        senders: the row of each part in `received`. own: the row for this rank's own part, `local`.
        """
        received = [(slice(row, row + 1), *box) for row, box in zip(senders, self.received, strict=True)]
        local = None if self.local is None else ((slice(own, own + 1), *self.local[0]), self.local[1])
        return replace(self, received=received, receive_slice=None, local=local)


def exchange(
    local: Tensor, result: Tensor, transfer: Transfer, group: dist.ProcessGroup | None, *, add: bool = False
) -> Running:
    """Fills `result` from the local tensors of the group's members; a generator of the collective, see `Running`.

    Communication: an all-to-all with uneven parts; without a group none, and only `transfer.local` is copied.
    add: adds the parts to `result` instead of overwriting.
    """
    receive_slice = None if add else transfer.receive_slice
    received = result.new_empty(sum(transfer.sizes_in)) if receive_slice is None else result.view(-1)[receive_slice]
    if group is not None:
        send_slice = transfer.send_slice if local.is_contiguous() else None
        sent = local.new_empty(sum(transfer.sizes_out)) if send_slice is None else local.view(-1)[send_slice]
        if send_slice is None:
            parts = [local[box] for box in transfer.sent]
            for packed, part in zip(_split_as(parts, sent), parts, strict=True):
                packed.copy_(part)
        sizes_in, sizes_out = transfer.sizes_in, transfer.sizes_out
        yield as_work(dist.all_to_all_single(received, sent, sizes_in, sizes_out, group, async_op=True))
    copies: list[tuple[Tensor, Tensor]] = []  # (part of the result, its values)
    if receive_slice is None:
        targets = [result[box] for box in transfer.received]
        copies += zip(targets, _split_as(targets, received), strict=True)
    if transfer.local is not None:
        target_box, source_box = transfer.local
        copies.append((result[target_box], local[source_box]))
    for target, part in copies:
        if add:
            target.add_(part)
        else:
            target.copy_(part)
    return result


def _split_as(parts: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` cut into consecutive tensors of the shapes of `parts`."""
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
