"""The gradients that each rank has at a `GradientSync.wait()`: told to the store, and read by ranks without some gradient."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from weft.mesh import ProcessMesh

from .groups import of_this_world, this_rank
from .leaves import Form, Forms, Leaf
from .order import named_ranks
from .rendezvous import patience
from .worlds import world

_SLOTS = 64  # the most steps between two ranks: on a GPU the host waits for no collective
_PAUSE, _LONGEST_PAUSE = 1e-4, 5e-3  # seconds between two looks at the store

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Told:
    """A rank's message about a step. number: of the step. done: whether the rank has come to `wait()`; its message is final then.

    reads: whether the rank reads the messages of the step. has: the forms of each parameter's gradients, () for none. again: the numbers
    of parameters whose gradients the rank sends last, after the expected gradients.
    """

    number: int
    done: bool
    reads: bool
    has: tuple[Forms, ...]
    again: frozenset[int]


class Attendance:
    """The gradients that each rank has of the parameters `leaves`, step by step.

    Communication: each rank sends one message to the world's store, and waits for no answer. Only a rank without some gradient, or with
    a gradient to send twice, reads the messages of the ranks of the parameters' meshes.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves, self._number = leaves, 0
        self._begun = False
        self._last: tuple[object, str] = ((), "")  # the last message's content and text
        self._heard: dict[int, Told] = {}
        # Whether other processes have parts of these parameters.
        self.has_peers = any(leaf.mesh.size > 1 for leaf in leaves) and world().others_run
        if self.has_peers:
            self._world, self._name = world(), _named(leaves)

    def begin(self, has: tuple[Forms, ...], *, anew: bool) -> None:
        """Tells, in backward, the gradients that this rank has sent. anew: also after an earlier call in this step."""
        if self.has_peers and (anew or not self._begun):
            self._begun = True
            self._tell(has, frozenset(), done=False, reads=False)

    def come(self, has: tuple[Forms, ...], again: frozenset[int], *, reads: bool) -> None:
        """Tells all gradients that this rank has in this step."""
        self._heard.clear()
        if self.has_peers:
            self._tell(has, again, done=True, reads=reads)

    def leave(self) -> None:
        """The step is over."""
        self._number, self._begun = self._number + 1, False

    def someone_has_any(self, mesh: ProcessMesh) -> bool:
        """Whether another rank of the mesh has a gradient of any parameter. Waits until a rank has said yes, or all have come."""
        return self._until(mesh, lambda told: any(told.has) or None) or False

    def forms_of(self, number: int) -> Forms:
        """The forms of a parameter's gradients on the first rank found to have any; () for none. Waits as `someone_has_any`."""
        return self._until(self._leaves[number].mesh, lambda told: told.has[number] or None) or ()

    def others(self, leaf: Leaf) -> dict[int, Told]:
        """The messages of the rest of a parameter's mesh, by rank. Waits until all have come."""
        self._until(leaf.mesh, lambda told: None)
        return {rank: self._heard[rank] for rank in self._peers[leaf.mesh]}

    def _tell(self, has: tuple[Forms, ...], again: frozenset[int], *, done: bool, reads: bool) -> None:
        if (has, again) != self._last[0]:
            forms = {form: None for each in has for form in each}
            places = {form: place for place, form in enumerate(forms)}
            of = {number: [places[form] for form in each] for number, each in enumerate(has) if each}
            self._last = (has, again), json.dumps([[str(form) for form in forms], of, sorted(again)])
        text = f"{self._number} {done:d} {reads:d} {self._last[1]}"
        self._world.tell(self._key(this_rank()), text.encode())

    def _until(self, mesh: ProcessMesh, found: Callable[[Told], Found | None]) -> Found | None:
        """The first result of `found` on a message of a rank of the mesh; None when all ranks have come."""
        end, pause = time.monotonic() + patience(), _PAUSE
        while True:
            for rank in self._peers[mesh]:
                if rank in self._heard and (result := found(self._heard[rank])) is not None:
                    return result
            missing = [rank for rank in self._peers[mesh] if rank not in self._heard or not self._heard[rank].done]
            if not missing:
                return None
            if self._look(missing):
                continue
            if time.monotonic() > end:
                raise RuntimeError(
                    f"rank {this_rank()} lacks gradients that others may have, and waited {patience():g} s at wait() number "
                    f"{self._number} of its GradientSync for {named_ranks(missing)}; every rank of the parameters' meshes calls "
                    f"wait() as often"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look(self, ranks: Sequence[int]) -> bool:
        """Whether any of these ranks has a new message."""
        more = False
        for rank, value in zip(ranks, self._world.told([self._key(rank) for rank in ranks]), strict=True):
            number = -1 if value is None else int(value.split(b" ", 1)[0])
            if number > self._number:
                raise RuntimeError(
                    f"rank {rank} has come to wait() number {number} of its GradientSync, and rank {this_rank()} to number "
                    f"{self._number}; every rank of the parameters' meshes calls wait() as often"
                )
            if value is not None and number == self._number:
                told = self._parsed(value.decode())
                more = more or told != self._heard.get(rank)
                self._heard[rank] = told
        return more

    def _parsed(self, text: str) -> Told:
        number, done, reads, body = text.split(" ", 3)
        forms, of, again = json.loads(body)
        has = tuple(
            tuple([Form.parse(forms[place], leaf.mesh) for place in of.get(str(i), ())])
            for i, leaf in enumerate(self._leaves)
        )
        return Told(int(number), done == "1", reads == "1", has, frozenset(again))

    @cached_property
    def _peers(self) -> dict[ProcessMesh, list[int]]:
        return {mesh: sorted(set(mesh) - {this_rank()}) for mesh in {leaf.mesh for leaf in self._leaves}}

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}/{self._number % _SLOTS}"


def _named(leaves: Sequence[Leaf]) -> str:
    """A name for these parameters, the same on every rank; each GradientSync of the same parameters gets a name of its own."""
    text = "\n".join(f"{leaf.name} {tuple(leaf.home.shape)} {leaf.mesh.digest}" for leaf in leaves)
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    made: dict[str, int] = of_this_world().setdefault("attendances", {})
    made[digest] = made.get(digest, 0) + 1
    return f"gradients {digest} {made[digest]}"
