"""The tasks of a training run, and the form of their examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Task = Literal["pretrain", "sft", "dpo", "kto"]
# The segments of an example. dpo: chosen, rejected. kto: the record's own, and its prompt with another completion.
SEGMENTS = {"sft": 1, "dpo": 2, "kto": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One sequence of tokens. Made by `encode_example`."""

    tokens: NDArray[np.int64]  # [n]
    learned: NDArray[np.bool_]  # [n]: whether the token is a target of the loss; False for a prompt's tokens


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One record of the data: a conversation (sft), a pair (dpo), or a judged completion (kto)."""

    segments: tuple[Segment, ...]  # as many as SEGMENTS of the task
    label: bool | None = None  # of kto: whether the completion is desirable
