"""experts on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_devices
from ..matmul.sharded.layout_rule import GRADIENT
from . import function

BACKWARD = "experts, backward"
BY_EXPERT = ", or call experts on local tensors with first="  # how to compute with experts of their own on each rank
NAMES = ("x", "experts", "weights", "gate", "up", "down")


@autocasts("experts")
def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    first: int = 0,
    rows: int | None = None,
) -> Tensor:
    """The gated MLPs of a mixture of experts: each token's chosen experts, weighted and added.

    The output of a token is the sum over its choices j of `weights[j] * mlp(experts[j])`, where expert e's MLP is
    `down[e] @ (silu(gate[e] @ x) * (up[e] @ x))`. No token is dropped, and an expert may have any number of tokens.

    x: [..., H].
    experts, weights: [..., k], the experts chosen by each token (int32 or int64) and the weight of each choice, for
    example of `route`.
    gate, up: [E, I, H]. down: [E, H, I].
    first: the number of the first expert here: gate, up and down are those of experts first to first + E - 1. The
    choices of experts outside add nothing, and the gradient of their weights is 0.
    rows: how many choices to allocate memory for, where the caller knows how many are of the experts here; by default
    all N * k. On a GPU, choices beyond `rows` are left out. On a CPU the op counts by itself.
    Returns [..., H] in x's dtype. A token's choices are added in float32, on a GPU in the order of the choices, on a
    CPU in the order of the experts: two runs are equal to the bit. On a GPU the host waits for nothing.
    Saved for backward: the operands, the sorted order, and both pre-activations [rows, I]. Backward makes the sorted
    inputs and the gated activations again.

    Layouts: x, experts and weights sharded alike on the tokens; gate, up and down replicated there. On other axes x,
    experts and weights are replicated, and gate S(1), up S(1) and down S(2) give a Partial(sum) output; the gradients
    of x and weights are then Partial(sum), too. Communication: none.
    Raises LayoutError for any other layouts; ValueError for mismatched shapes, dtypes, devices or options, and on a CPU
    for more choices than `rows`.
    """
    check_devices("experts", x, experts, weights, gate, up, down)
    function.check(x, experts, weights, gate, up, down, rows)
    return apply(EXPERTS, x, experts, weights, gate, up, down, first=first, rows=rows)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    x, experts, weights, gate, up, down = layouts
    shape = shapes[0]
    assert x is not None and experts is not None and weights is not None and shape is not None, "apply passes all"
    assert gate is not None and up is not None and down is not None, "apply passes all"
    dims = len(shape) - 1
    for name, layout, dim in (("x", x, dims), ("experts", experts, dims), ("weights", weights, dims)):
        _check_unsharded(name, layout, dim, "a rank computes whole tokens, with all choices")
    for name, layout, dim in (("gate", gate, 2), ("up", up, 2), ("down", down, 1)):
        _check_unsharded(name, layout, 0, "a token chooses from all experts", BY_EXPERT)
        _check_unsharded(name, layout, dim, "only the dim I may be sharded")
    for name, layout in zip(NAMES, (x, experts, weights, gate, up, down), strict=True):
        _check_complete(name, layout)
    lead = ascii_lowercase[:dims]  # the tokens' dims
    terms = (f"{lead}x", f"{lead}k", f"{lead}k", "eix", "eix", "eyi")
    output = infer.einsum(
        f"{','.join(terms)}->{lead}y", x, experts, weights, gate, up, down, name="experts", operands=NAMES
    )

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        def gradient(position: int) -> Layout:
            of = [i for i in range(6) if i != position]
            return infer.einsum(
                f"{lead}y,{','.join(terms[i] for i in of)}->{terms[position]}",
                grad, *(each for i in of if (each := layouts[i]) is not None),
                name=BACKWARD, operands=(GRADIENT, *(NAMES[i] for i in of)),
            )  # fmt: skip

        return tuple(None if position == 1 else gradient(position) for position in range(6))

    return Sharding(output, shape, gradient_layouts)


def _check_unsharded(name: str, layout: Layout, dim: int, why: str, remedy: str = "") -> None:
    """Raises LayoutError where the operand is sharded on `dim`. why, remedy: for the message."""
    if axes := layout.shard_order.get(dim):
        wanted = layout.replace(**dict.fromkeys(axes, "R"))
        raise LayoutError(
            f"experts: {name} is sharded on dim {dim} over {', '.join(map(repr, axes))}, and {why}; reshard {name} to "
            f"({wanted}){remedy}",
            (wanted,),
        )


def _check_complete(name: str, layout: Layout) -> None:
    """Raises LayoutError where the operand is Partial on an axis: silu of an addend is no addend."""
    addends = {axis: "R" for axis in layout.mesh.axis_names if isinstance(layout[axis], Partial)}
    if addends:
        wanted = layout.replace(**addends)
        raise LayoutError(
            f"experts: {name} is ({layout}), and each rank needs its sum, not an addend; reshard {name} to ({wanted})",
            (wanted,),
        )


EXPERTS = Op(
    "experts",
    function.forward,
    function.backward,
    _rule,
    inference=function.inference,
    weights=(3, 4, 5),
)
