"""Guesses the upstream gradient of a scalar loss: then forward can compute the gradient while it reads the logits.

The first guess is 1. Afterwards the guess is the upstream gradient of the last two backwards, if they were equal;
otherwise there is no guess. The guess stays on the device, and no host waits for the guess. The guess decides which
kernel computes the gradient, and does not change a bit of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HISTORY: dict[torch.device, Tensor] = {}


def history(device: torch.device) -> Tensor:
    """The device's history [2], float32: the next guess, NaN for none, and the last upstream gradient.

    Written by `kernel.gradient_unless_guessed` on a GPU and by `was_right` on a CPU.
    """
    if device not in _HISTORY:
        _HISTORY[device] = torch.ones(2, dtype=torch.float32, device=device)
    return _HISTORY[device]


def guess(device: torch.device) -> Tensor:
    """The current guess, a scalar on the device."""
    return history(device)[0].clone()


def was_right(guessed: Tensor, grad: Tensor | None) -> bool:
    """On a CPU: whether the upstream gradient equals the guess. Also updates the history.

    The upstream gradient becomes the next guess if the previous upstream gradient was equal.
    """
    assert grad is not None, "the loss is the only output"
    stored, number = history(guessed.device), grad.item()
    if stored.tolist() != [number, number]:
        narrow = grad.reshape(()).to(torch.float32)
        stored[0] = torch.where(narrow == stored[1], narrow, torch.nan)
        stored[1] = narrow
    return bool(guessed.item() == number)  # compared in float64: the history holds float32
