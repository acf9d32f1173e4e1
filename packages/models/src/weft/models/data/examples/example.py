"""The tasks of a training run, and the form of their examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Task = Literal["pretrain", "sft", "dpo", "kto"]
# Segments of an example. dpo: chosen, rejected. kto: prompt with own completion, prompt with mismatched completion.
SEGMENTS = {"sft": 1, "dpo": 2, "kto": 2}


@dataclass(frozen=True, slots=True, eq=False)
class MaskedTokens:
    """A sequence of tokens, with a mask of the tokens to learn."""

    tokens: NDArray[np.int64]  # [n]
    learned: NDArray[np.bool_]  # [n]: whether the token is a target of the loss; False for a prompt's tokens


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """The tokens of a record: a conversation (sft), a pair (dpo), or a judged completion (kto)."""

    segments: tuple[MaskedTokens, ...]  # SEGMENTS[task] of them
    label: bool | None = None  # kto: whether the completion is desirable
