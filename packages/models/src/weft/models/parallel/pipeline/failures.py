"""Ends a pipeline's step on all ranks where the work of a rank raises an error.

The failed rank goes through the rest of its actions without work: it takes every message, and sends zeros, or the word
that no message comes. So no rank waits for it, no message is left over, and the next step can run. After the actions
the hosts of all ranks meet in the world's store. Where a rank has failed, every rank raises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from weft.mesh import ProcessMesh
from weft.reshard.extension import this_rank, world, world_cache

from ...schedules.schedule import Action

# Seconds for which a failed rank waits for a message, or for the other ranks at the end, if its stage has several
# ranks. Ranks of its stage may wait in a collective for the failed rank; then no message comes.
PATIENCE = 20.0
_LOST = 1 << 20  # stands for the number of failed ranks where messages are lost; more than ranks in a world
_CLASSES = {"ValueError": ValueError, "TypeError": TypeError}  # raised on further ranks in the same class
_REMEDY = "the step has ended on all ranks; its gradients are incomplete: call zero_grad() before the next step"


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's failure in a step: the action, and the error; no error where a message from a failed rank is missing."""

    action: Action
    error: Exception | None = None


class Failures:
    """Tells all ranks of a pipeline, after each step's actions, whether the work of a rank has failed.

    mesh: of the pipeline. is_alone: whether each stage has a single rank.
    """

    def __init__(self, mesh: ProcessMesh, *, is_alone: bool) -> None:
        self._mesh, self._name, self._round = mesh, "", 0
        self.patience = None if is_alone else PATIENCE  # of a failed rank, in seconds; None for the world's timeout
        self._lost = ""

    def refuse_if_lost(self) -> None:
        """Raises RuntimeError where messages of an earlier step are lost. Called before a step."""
        if self._lost:
            raise RuntimeError(
                f"an earlier step of this pipeline lost messages between stages, since {self._lost}; start the program "
                f"anew, from a checkpoint"
            )

    def meet(self, failure: Failure | None) -> Exception | None:
        """Waits for all ranks; returns the error that this rank has to raise, or None where no rank failed.

        failure: of this rank. Communication: as the world's `meet`; after a failure one more request.
        Raises RuntimeError where ranks do not come in time, and the error itself where messages are lost.
        """
        if not world().peers_run:
            return None
        if failure is not None and failure.error is not None:
            world().publish(self._of_rank(this_rank()), _as_json(failure.action, failure.error))
        try:
            patience = None if failure is None else self.patience
            found = world().meet(self._own_name(), self._round, self._mesh.size, int(failure is not None), patience)
        except RuntimeError:
            if failure is None:
                raise
            raise self.give_up(failure) from None
        error = self._error(failure) if found else None
        if error is not None and found >= _LOST:
            self._lost = str(error)
            raise error
        self._round += 1
        return error

    def give_up(self, failure: Failure) -> Exception:
        """Ends the step on a failed rank for which no further message comes; returns the error to raise."""
        error = self._error(failure)
        world().publish(f"{self._own_name()}/{self._round}", b"%d" % _LOST)
        self._lost = (
            f"rank {this_rank()} failed in {failure.action}, and the ranks of its stage wait for it: {failure.error}"
        )
        return error

    def _error(self, failure: Failure | None) -> Exception:
        """The error of this rank; on a rank without an error of its own, that of the rank which failed first."""
        if failure is not None and failure.error is not None:
            failure.error.add_note(f"raised by {failure.action}; {_REMEDY}")
            return failure.error
        ranks = list(self._mesh)
        published = world().published([self._of_rank(rank) for rank in ranks])
        found = [(rank, *json.loads(each)) for rank, each in zip(ranks, published, strict=True) if each is not None]
        if not found:
            return RuntimeError(f"another rank of the pipeline failed, see its output; {_REMEDY}")
        rank, _, action, kind, text = min(found, key=lambda each: each[1])
        error = _CLASSES.get(kind, RuntimeError)(f"rank {rank} raised {kind} in {action}: {text}")
        error.add_note(_REMEDY)
        return error

    def _own_name(self) -> str:
        """The pipeline's name in the world's store.

        Made at the first step, since all ranks use pipelines in the same order.
        """
        if not self._name:
            cache, key = world_cache(), ("pipelines", self._mesh)
            cache[key] = cache.get(key, 0) + 1
            self._name = f"pipeline {cache[key]} on {self._mesh.digest}"
        return self._name

    def _of_rank(self, rank: int) -> str:
        return f"{self._own_name()}/{self._round}/rank {rank}"


def _as_json(action: Action, error: Exception) -> bytes:
    """A rank's error as a list in JSON. By the first entry errors sort: by microbatch, up the stages, then down."""
    kind, stage, microbatch = action
    place = [microbatch, kind != "F", stage if kind == "F" else -stage]
    return json.dumps([place, str(action), type(error).__name__, str(error)]).encode()
