"""swiglu on plain tensors and DTensors."""

from __future__ import annotations

from torch import Tensor

from ..elementwise.pairs import check_same_shape, pair_rule
from ..op import Op
from ..sharded import apply, autocasts
from . import reference


@autocasts("swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020).

    gate, up: one shape, which the output has too.
    Layouts: one for both, without Partial; the output lies the same. Communication: none.
    """
    check_same_shape("swiglu", gate, up)
    return apply(SWIGLU, gate, up)


SWIGLU = Op("swiglu", reference.forward, reference.backward, pair_rule("swiglu", linear=False))
