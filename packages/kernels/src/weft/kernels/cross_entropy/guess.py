"""What gradient of a scalar loss is going to arrive, so that forward makes that of the logits while it reads them.

It is 1, or what arrived the last two times; where the last two differ there is no guess. A device keeps this for itself, and
no host waits for it. A guess changes which kernel does the work, and never a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ARRIVED: dict[torch.device, Tensor] = {}


class Once:
    """Of one forward: whether the gradient that it made has been given away; a second backward makes one of its own."""

    __slots__ = ("given",)

    def __init__(self) -> None:
        self.given = False


def arrived(device: torch.device) -> Tensor:
    """Of the device [2], float32: the guess, NaN where there is none, and what arrived last; for `kernel.gradient` to keep."""
    if device not in _ARRIVED:
        _ARRIVED[device] = torch.ones(2, dtype=torch.float32, device=device)
    return _ARRIVED[device]


def guess(device: torch.device) -> Tensor:
    """The guess as it is now, a number."""
    return arrived(device)[0].clone()


def was_right(guessed: Tensor, arrived_now: Tensor | None) -> bool:
    """On a CPU: whether what arrives is what was guessed; and the next guess: what arrives, if it did the last time too."""
    assert arrived_now is not None, "the loss is the only output"
    kept, number = arrived(guessed.device), arrived_now.to(torch.float32)
    kept[0] = torch.where(number == kept[1], number, torch.nan)
    kept[1] = number
    return bool(arrived_now == guessed)  # exactly: float64 does not fit into what is kept
