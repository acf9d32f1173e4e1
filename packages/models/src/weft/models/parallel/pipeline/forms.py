"""The form of a message between stages, as JSON for the receiver: structure, shapes, dtypes and layouts.

JSON and not pickle: forms are told through a store to which strangers may be able to write, and a pickle can run
any program.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from weft.reshard import layout_of

_PLAIN = (bool, int, float, str, type(None))  # types known to JSON
_SEQUENCES: Mapping[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "list": list}
_MAPPINGS: Mapping[str, Callable[[Iterable[Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict}


@dataclass(frozen=True, slots=True)
class Sent:
    """The description of a tensor in the form of a message."""

    local: tuple[int, ...]  # the shape of a rank's part, as sent to the peer
    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]  # the global shape
    placements: str | None  # a DTensor's layout as text; None for a plain tensor


def form_of(message: Any) -> Any:
    """The message with a `Sent` in place of each tensor."""
    return tree_map(_described, message)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    local, placements = leaf, None
    if isinstance(leaf, DTensor):
        local, placements = leaf.to_local(), str(layout_of(leaf))
    return Sent(tuple(local.shape), leaf.dtype, leaf.requires_grad, tuple(leaf.shape), placements)


def written(form: Any) -> bytes:
    """A form as JSON. Raises TypeError for a value of a type unknown to `read`."""
    return json.dumps(_as_json(form)).encode()


def read(told: bytes) -> Any:
    """The form written by `written`. Nothing is called by a name in the text; only dtypes are looked up by name.

    Raises ValueError for other text.
    """
    try:
        return _of_json(json.loads(told))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{told[:200]!r} is not the form of a message between stages") from error


def _as_json(form: Any) -> Any:
    if type(form) in _PLAIN:
        return form
    if type(form) in _SEQUENCES.values():
        return {type(form).__name__: [_as_json(each) for each in form]}
    if type(form) in _MAPPINGS.values():
        return {type(form).__name__: [[_as_json(key), _as_json(each)] for key, each in form.items()]}
    if isinstance(form, Sent):
        dtype = str(form.dtype).removeprefix("torch.")
        return {"Sent": [form.local, dtype, form.requires_grad, form.shape, form.placements]}
    raise TypeError(
        f"a {type(form).__name__} cannot be told to the next stage; use tensors, numbers, text and None, "
        f"in tuples, lists and dicts"
    )


def _of_json(value: Any) -> Any:
    if not isinstance(value, dict):
        if type(value) not in _PLAIN:
            raise TypeError
        return value
    ((kind, content),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_of_json(each) for each in content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]((_of_json(key), _of_json(each)) for key, each in content)
    if kind != "Sent":
        raise TypeError
    local, name, requires_grad, shape, placements = content
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or type(requires_grad) is not bool or not isinstance(placements, str | None):
        raise TypeError
    return Sent(tuple(map(int, local)), dtype, requires_grad, tuple(map(int, shape)), placements)
