"""Messages between ranks at `GradientSync.wait()`: which gradients each rank has.

Each rank writes a message to the world's store. A rank reads the messages of its peers, and gives zeros in place of
missing gradients (send_order.py), unless the rank has every expected gradient, in one layout and dtype, once a turn, in
as many turns as in the last round.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

from weft.mesh import ProcessMesh

from ..world.groups import format_ranks, this_rank, world_cache
from ..world.world import patience, world
from .pending_gradient import Forms, GradientForm, Leaf

# Keys of a rank in the store, used in turn: a message is overwritten after this many rounds. Hosts do not wait for
# their GPUs, so a rank may be some rounds ahead of another, but never by this many.
_SLOTS = 64
_PAUSE, _LONGEST_PAUSE = 1e-4, 5e-3  # seconds between the first two reads of the store; doubled until the longest
_REMEDY = (
    "a round ends at each wait(), and under ZeRO 2 and 3 at the end of paused(): call both equally often on every rank "
    "of the parameters' meshes"
)

Result = TypeVar("Result")


class Sent(NamedTuple):
    """How far a rank has sent in backward: all positions before `position`, without `skipped`.

    A turn sends each expected leaf once. A round has one turn; with ZeRO 2 and 3 about one for each backward pass: see
    send_order.py. A position is a place in the order of sends: turn * number of leaves + the leaf's index.
    """

    position: int
    skipped: frozenset[int]  # positions at which nothing was sent

    def includes(self, position: int) -> bool | None:
        """Whether this position was sent; None if the rank has not come to this position."""
        return position not in self.skipped if position < self.position else None


@dataclass(frozen=True, slots=True)
class PresenceMessage:
    """A rank's message about a round (send_order.py): which gradients the rank has."""

    round: int  # from 0; a round ends at `GradientSync.wait()`, with ZeRO 2 and 3 also at the end of `paused()`
    done: bool  # whether the rank has come to the end of the round; the message is final then
    reads: bool  # whether the rank reads its peers' messages, and gives zeros for gradients only peers have
    turns: int  # the largest number of gradients that this rank has of a leaf in the round
    # `GradientBuckets.gather_order`: with ZeRO 3, a checksum of the order in which the rank gathered parameters and
    # summed gradients.
    gather_order: int
    sent: Sent
    leaf_forms: tuple[Forms, ...]  # the forms of each leaf's gradients; () for none
    # {a leaf's index: the number of all gradients of the leaf in the round}, only of leaves with more gradients than
    # the turns send: leaves that are not expected, and leaves with further gradients at the end of the round.
    more: dict[int, int]


class GradientPresence:
    """Which gradients of the parameters `leaves` each rank has, round by round; made by GradientSync.

    Communication: each rank writes a message to the world's store in each round, and waits for no answer. Some ranks
    also read the messages from the parameters' meshes: see the top of this file.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves, self._round = leaves, 0
        self._published_early = False
        self._last_text: tuple[object, str] = ((), "")  # a part of the last message: content and text
        self._received: dict[int, PresenceMessage] = {}  # by rank, this round's messages
        self._gather_order = 0  # of this rank, in this round
        # Whether other processes have parts of these parameters.
        self.has_peers = any(leaf.mesh.size > 1 for leaf in leaves) and world().peers_run
        if self.has_peers:
            self._world, self._name = world(), _unique_name(leaves)

    def publish_early(self, leaf_forms: tuple[Forms, ...], sent: Sent, *, repeat: bool) -> None:
        """Publishes, during backward, which gradients this rank has sent. Called before a third bucket.

        A rank without any gradient, which is in `wait()` already, can then give zeros before this rank is in `wait()`.
        repeat: False publishes at the first call of a round, True at every call. True is needed in the first step,
            where a peer without gradients learns the layouts and dtypes of its zeros from these messages alone; and
            after the first turn of a round, where the peer learns how far this rank has sent.
        """
        if self.has_peers and (repeat or not self._published_early):
            self._published_early = True
            self._publish(leaf_forms, {}, f"{self._round} 0 0 0 0", sent)

    def publish_final(
        self,
        leaf_forms: tuple[Forms, ...],
        sent: Sent,
        more: dict[int, int],
        *,
        turns: int,
        gather_order: int,
        reads: bool,
    ) -> None:
        """Publishes, at the end of a round, which gradients this rank has. Arguments: fields of PresenceMessage."""
        self._received.clear()
        self._gather_order = gather_order
        if self.has_peers:
            self._publish(leaf_forms, more, f"{self._round} 1 {reads:d} {turns} {gather_order}", sent)

    def check_gather_order(self) -> None:
        """Raises RuntimeError where a peer whose message was read has another `gather_order` in this round.

        Called when all sums have ended: then no rank waits for this rank.
        """
        ranks = [rank for rank, each in self._received.items() if each.done and each.gather_order != self._gather_order]
        if ranks:
            raise RuntimeError(
                f"rank {this_rank()} lacks gradients that {format_ranks(sorted(ranks))} has, and parameters were "
                f"gathered between the sums of gradients (ZeRO 3): gathers and sums met in different orders, so this "
                f"step's gradients are wrong. Give all ranks gradients of the same parameters (freeze unused "
                f"parameters, or add 0 times an unused output to the loss), or shard with ZeRO 2"
            )

    def advance(self) -> None:
        """Ends the round: the next message is about the next round. Called at the end of `wait()` and of `paused()`."""
        self._round, self._published_early = self._round + 1, False

    def any_gradient_on(self, mesh: ProcessMesh) -> bool:
        """Whether another rank of the mesh has a gradient of any parameter.

        Waits until a rank has published a gradient, or all messages are final.
        """
        return self._wait_until(mesh, lambda message: any(message.leaf_forms) or None) or False

    def forms_of(self, index: int) -> Forms:
        """The forms of a leaf's gradients on the first rank found with a gradient; () for none.

        index: of the leaf in `leaves`. Waits as `any_gradient_on`.
        """
        return self._wait_until(self._leaves[index].mesh, lambda message: message.leaf_forms[index] or None) or ()

    def is_sent(self, mesh: ProcessMesh, position: int) -> bool | None:
        """Whether other ranks of the mesh sent this position in backward; None if no rank has come to the position.

        Waits until a rank has come to the position, or all messages are final.
        """
        return self._wait_until(mesh, lambda message: message.sent.includes(position))

    def peer_messages(self, leaf: Leaf) -> dict[int, PresenceMessage]:
        """By rank, the messages of a parameter's mesh, without this rank's. Waits until all are final.

        Called at the end of a round for each leaf, on a rank that reads messages.
        """
        self._wait_until(leaf.mesh, lambda message: None)
        return {rank: self._received[rank] for rank in self._peers[leaf.mesh]}

    def _publish(self, leaf_forms: tuple[Forms, ...], more: dict[int, int], header: str, sent: Sent) -> None:
        content = leaf_forms, more, sent.skipped
        if content != self._last_text[0]:
            distinct = dict.fromkeys(form for forms in leaf_forms for form in forms)
            form_index = {form: i for i, form in enumerate(distinct)}
            form_indices = {i: [form_index[form] for form in forms] for i, forms in enumerate(leaf_forms) if forms}
            body = json.dumps([[str(form) for form in distinct], form_indices, more, sorted(sent.skipped)])
            self._last_text = content, body
        self._world.publish(self._key(this_rank()), f"{header} {sent.position} {self._last_text[1]}".encode())

    def _wait_until(self, mesh: ProcessMesh, read: Callable[[PresenceMessage], Result | None]) -> Result | None:
        """Calls `read` on the messages of the mesh's ranks as messages come, until a result is not None; returns it.

        Returns None once all messages are final. Raises RuntimeError where a message is not final within the store's
        timeout.
        """
        end, pause = time.monotonic() + patience(), _PAUSE
        while True:
            for rank in self._peers[mesh]:
                if rank in self._received and (result := read(self._received[rank])) is not None:
                    return result
            missing = [
                rank for rank in self._peers[mesh] if rank not in self._received or not self._received[rank].done
            ]
            if not missing:
                return None
            if self._poll(missing):
                continue
            if time.monotonic() > end:
                raise RuntimeError(
                    f"rank {this_rank()} must know which gradients other ranks have, and waited {patience():g} s in "
                    f"round {self._round} of its GradientSync for {format_ranks(missing)}; {_REMEDY}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _poll(self, ranks: Sequence[int]) -> bool:
        """Reads the present messages of `ranks` from the store; returns whether any is new.

        Raises RuntimeError where a rank is in a later round.
        """
        any_new = False
        for rank, value in zip(ranks, self._world.published([self._key(rank) for rank in ranks]), strict=True):
            number = -1 if value is None else int(value.split(b" ", 1)[0])
            if number > self._round:
                raise RuntimeError(
                    f"rank {rank} has come to round {number} of its GradientSync, and rank {this_rank()} to round "
                    f"{self._round}; {_REMEDY}"
                )
            if value is not None and number == self._round:
                message = self._parse(value.decode())
                any_new = any_new or message != self._received.get(rank)
                self._received[rank] = message
        return any_new

    def _parse(self, text: str) -> PresenceMessage:
        number, done, reads, turns, gather_order, position, body = text.split(" ", 6)
        forms, form_indices, more, skipped = json.loads(body)
        leaf_forms = tuple(
            tuple([GradientForm.parse(forms[index], leaf.mesh) for index in form_indices.get(str(i), ())])
            for i, leaf in enumerate(self._leaves)
        )
        sent = Sent(int(position), frozenset(skipped))
        more = {int(i): total for i, total in more.items()}
        return PresenceMessage(
            round=int(number),
            done=done == "1",
            reads=reads == "1",
            turns=int(turns),
            gather_order=int(gather_order),
            sent=sent,
            leaf_forms=leaf_forms,
            more=more,
        )

    @cached_property
    def _peers(self) -> dict[ProcessMesh, list[int]]:
        return {mesh: sorted(set(mesh) - {this_rank()}) for mesh in {leaf.mesh for leaf in self._leaves}}

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}/{self._round % _SLOTS}"


def _unique_name(leaves: Sequence[Leaf]) -> str:
    """A name for these parameters, equal on all ranks; a second GradientSync of the parameters gets another name."""
    text = "\n".join(f"{leaf.name} {tuple(leaf.parameter.shape)} {leaf.mesh.digest}" for leaf in leaves)
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    counts: dict[str, int] = world_cache().setdefault("gradient presence", {})
    counts[digest] = counts.get(digest, 0) + 1
    return f"gradients {digest} {counts[digest]}"
