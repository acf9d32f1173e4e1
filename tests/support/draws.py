"""A cache of random initial values: tests of models draw the same small models again and again.

A model of a test has tens of parameters, each a few kilobytes, and to draw a parameter takes torch 150 operations. The
worker processes keep draws, and tests of models in pytest's own process. There tests of kernels, of Philox too, draw
every number anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from weft.kernels.random import philox, sharded
from weft.kernels.random.philox import Part

draw = sharded._fill_normal
SMALL = 2**14  # elements; larger parts are drawn anew
MOST = 2**24  # bytes kept, then the cache starts anew

_kept: dict[tuple[Any, ...], torch.UntypedStorage] = {}  # not tensors, which tests of memory count


def keep_draws() -> None:
    """Draw the normal numbers of a (part, key) once in this process, from now on."""
    sharded._fill_normal = drawn_once


def drawn_once(local: Tensor, part: Part, key: int, std: float = 1.0) -> None:
    """As `draw`, which is called for numbers not kept, and where a test has changed how Philox is computed."""
    if local.device.type != "cpu" or isinstance(local, FakeTensor) or local.numel() > SMALL:
        draw(local, part, key, std)
        return
    way = (philox.fill, philox._BLOCKS_A_THREAD, torch.get_num_threads())
    values = _kept.get(question := (part, key, std, local.dtype, *way))
    if values is not None:
        local.copy_(torch.empty(0, dtype=local.dtype).set_(values).view(local.shape))
        return
    draw(local, part, key, std)
    if sum(values.nbytes() for values in _kept.values()) > MOST:
        _kept.clear()
    _kept[question] = local.detach().clone(memory_format=torch.contiguous_format).untyped_storage()
