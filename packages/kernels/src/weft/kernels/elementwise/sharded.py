"""add on plain tensors and DTensors."""

from __future__ import annotations

from torch import Tensor

from ..op import Op
from ..sharded import apply, autocasts
from . import reference
from .pairs import check_same_shape, pair_rule


@autocasts("add")
def add(x: Tensor, y: Tensor) -> Tensor:
    """`x + y`, for residual streams: unlike DTensor's own addition it never communicates to make layouts agree.

    x, y: one shape, which the output has too.
    Layouts: one for both, Partial(sum) included; the output lies the same. Communication: none.
    """
    check_same_shape("add", x, y)
    return apply(ADD, x, y)


ADD = Op("add", reference.forward, reference.backward, pair_rule("add", linear=True))
