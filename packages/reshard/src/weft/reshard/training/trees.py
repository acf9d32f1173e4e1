"""The tensors in nested arguments and results of a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a tree, in order.

    Most arguments are tensors and plain values. For these, torch's own tree functions take as much host time as an op.
    """
    found: list[Tensor] = []
    _add(tree, found)
    return found


def differentiable(tree: Any) -> list[Tensor]:
    """The tensors in a tree that require grad, in order."""
    return [each for each in tensors_of(tree) if each.requires_grad]


def _add(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list):
        for each in tree:
            _add(each, found)
    elif type(tree) is dict:
        for each in tree.values():
            _add(each, found)
    elif tree is not None and not isinstance(tree, bool | int | float | str):
        found += [each for each in tree_iter(tree) if isinstance(each, Tensor)]
