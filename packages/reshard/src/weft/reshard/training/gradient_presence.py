"""Messages between ranks at `GradientSync.wait()`: which gradients each rank has.

Each rank writes a message to the world's store. Only a rank without some gradient reads the messages, to give zeros
where other ranks have a gradient (sending.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from weft.mesh import ProcessMesh

from ..world.groups import format_ranks, this_rank, world_cache
from ..world.rendezvous import patience
from ..world.world import world
from .pending_gradient import Form, Forms, Leaf

_SLOTS = 64  # keys of a rank, used in turn: the most steps between two ranks, as hosts do not wait for a GPU
_PAUSE, _LONGEST_PAUSE = 1e-4, 5e-3  # seconds between two reads of the store; doubled up to the second

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Message:
    """A rank's message about a step, that is, about a `GradientSync.wait()`."""

    step: int
    done: bool  # whether the rank has come to `wait()`; the message is final then
    reads: bool  # whether the rank reads the other ranks' messages of the step
    leaf_forms: tuple[Forms, ...]  # of each parameter's gradients; () for none
    unexpected: frozenset[int]  # indices of the parameters whose gradients this rank sends after the expected ones


class GradientPresence:
    """Which gradients of the parameters `leaves` each rank has, step by step; made by GradientSync.

    Communication: each rank writes a message to the world's store in each step, and waits for no answer. A rank without
    some gradient, or with a gradient to send twice, also reads the messages from the parameters' meshes.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves, self._step = leaves, 0
        self._published_early = False
        self._last_text: tuple[object, str] = ((), "")  # the last message's content and text
        self._received: dict[int, Message] = {}  # by rank, this step's messages
        # Whether other processes have parts of these parameters.
        self.has_peers = any(leaf.mesh.size > 1 for leaf in leaves) and world().peers_run
        if self.has_peers:
            self._world, self._name = world(), _unique_name(leaves)

    def publish_early(self, leaf_forms: tuple[Forms, ...], *, anew: bool) -> None:
        """Publishes, during backward, which gradients this rank has sent; once in a step.

        anew: publish even if this step's message was published before.
        """
        if self.has_peers and (anew or not self._published_early):
            self._published_early = True
            self._publish(leaf_forms, frozenset(), done=False, reads=False)

    def publish_final(self, leaf_forms: tuple[Forms, ...], unexpected: frozenset[int], *, reads: bool) -> None:
        """Publishes, in `wait()`, which gradients this rank has in this step."""
        self._received.clear()
        if self.has_peers:
            self._publish(leaf_forms, unexpected, done=True, reads=reads)

    def end_step(self) -> None:
        """Ends the step: the next message is about the next `wait()`."""
        self._step, self._published_early = self._step + 1, False

    def any_gradient_on(self, mesh: ProcessMesh) -> bool:
        """Whether another rank of the mesh has a gradient of any parameter.

        Waits until a rank has published a gradient, or all messages are final.
        """
        return self._wait_until(mesh, lambda message: any(message.leaf_forms) or None) or False

    def forms_of(self, number: int) -> Forms:
        """The forms of a parameter's gradients on the first rank found with a gradient; () for none.

        number: the parameter's index in `leaves`. Waits as `any_gradient_on`.
        """
        return self._wait_until(self._leaves[number].mesh, lambda message: message.leaf_forms[number] or None) or ()

    def peer_messages(self, leaf: Leaf) -> dict[int, Message]:
        """By rank, the messages of a parameter's mesh, without this rank's. Waits until all are final."""
        self._wait_until(leaf.mesh, lambda message: None)
        return {rank: self._received[rank] for rank in self._peers[leaf.mesh]}

    def _publish(self, leaf_forms: tuple[Forms, ...], unexpected: frozenset[int], *, done: bool, reads: bool) -> None:
        if (leaf_forms, unexpected) != self._last_text[0]:
            forms = {form: None for each in leaf_forms for form in each}
            places = {form: place for place, form in enumerate(forms)}
            places_of = {number: [places[form] for form in each] for number, each in enumerate(leaf_forms) if each}
            self._last_text = (
                (leaf_forms, unexpected),
                json.dumps([[str(form) for form in forms], places_of, sorted(unexpected)]),
            )
        text = f"{self._step} {done:d} {reads:d} {self._last_text[1]}"
        self._world.publish(self._key(this_rank()), text.encode())

    def _wait_until(self, mesh: ProcessMesh, found: Callable[[Message], Result | None]) -> Result | None:
        """Calls `found` on the messages of the mesh's ranks; returns the first result that is not None.

        Returns None once all messages are final. Raises RuntimeError where a message is not final within the store's
        timeout.
        """
        end, pause = time.monotonic() + patience(), _PAUSE
        while True:
            for rank in self._peers[mesh]:
                if rank in self._received and (result := found(self._received[rank])) is not None:
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
                    f"rank {this_rank()} lacks gradients that other ranks may have, and waited {patience():g} s at "
                    f"wait() number {self._step} of its GradientSync for {format_ranks(missing)}; call wait() equally "
                    f"often on every rank of the parameters' meshes"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _poll(self, ranks: Sequence[int]) -> bool:
        """Reads the present messages of `ranks` from the store; returns whether any is new.

        Raises RuntimeError where a rank is at a later step.
        """
        more = False
        for rank, value in zip(ranks, self._world.published([self._key(rank) for rank in ranks]), strict=True):
            number = -1 if value is None else int(value.split(b" ", 1)[0])
            if number > self._step:
                raise RuntimeError(
                    f"rank {rank} has come to wait() number {number} of its GradientSync, and rank {this_rank()} to "
                    f"number {self._step}; call wait() equally often on every rank of the parameters' meshes"
                )
            if value is not None and number == self._step:
                message = self._parse(value.decode())
                more = more or message != self._received.get(rank)
                self._received[rank] = message
        return more

    def _parse(self, text: str) -> Message:
        number, done, reads, body = text.split(" ", 3)
        forms, places_of, unexpected = json.loads(body)
        leaf_forms = tuple(
            tuple([Form.parse(forms[place], leaf.mesh) for place in places_of.get(str(i), ())])
            for i, leaf in enumerate(self._leaves)
        )
        return Message(int(number), done == "1", reads == "1", leaf_forms, frozenset(unexpected))

    @cached_property
    def _peers(self) -> dict[ProcessMesh, list[int]]:
        return {mesh: sorted(set(mesh) - {this_rank()}) for mesh in {leaf.mesh for leaf in self._leaves}}

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}/{self._step % _SLOTS}"


def _unique_name(leaves: Sequence[Leaf]) -> str:
    """A name for these parameters, equal on all ranks; another for each further GradientSync of the same parameters."""
    text = "\n".join(f"{leaf.name} {tuple(leaf.home.shape)} {leaf.mesh.digest}" for leaf in leaves)
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    counts: dict[str, int] = world_cache().setdefault("gradient presence", {})
    counts[digest] = counts.get(digest, 0) + 1
    return f"gradients {digest} {counts[digest]}"
