"""A guess of the upstream gradient of a scalar loss. With it forward can compute the gradient of the logits while it reads them.

At first the guess is 1. Then it is what arrived the last two times; where these two differ there is no guess. It is kept on the device,
and no host waits for it. It decides which kernel computes the gradient, and changes none of its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HISTORY: dict[torch.device, Tensor] = {}


class Once:
    """Whether a backward has taken the gradient that forward computed. A second backward computes it again."""

    __slots__ = ("given",)

    def __init__(self) -> None:
        self.given = False


def history(device: torch.device) -> Tensor:
    """[2], float32, on the device: the next guess, NaN where there is none, and the last upstream gradient.

    `kernel.gradient_unless_guessed` writes it.
    """
    if device not in _HISTORY:
        _HISTORY[device] = torch.ones(2, dtype=torch.float32, device=device)
    return _HISTORY[device]


def guess(device: torch.device) -> Tensor:
    """The guess as it is now, a scalar."""
    return history(device)[0].clone()


def was_right(guessed: Tensor, grad: Tensor | None) -> bool:
    """On a CPU: whether the upstream gradient is the guessed one. It becomes the next guess if the one before it was the same."""
    assert grad is not None, "the loss is the only output"
    kept, number = history(guessed.device), grad.item()
    if kept.tolist() != [number, number]:
        narrow = grad.reshape(()).to(torch.float32)
        kept[0] = torch.where(narrow == kept[1], narrow, torch.nan)
        kept[1] = narrow
    return bool(guessed.item() == number)  # exactly: float64 does not fit into what is kept
