"""`experts` on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, infer

from ..dispatch.op import Op
from ..dispatch.sharded import Shapes, Sharding, apply, autocasts, check_operands
from ..matmul.sharded.layout_rule import GRADIENT
from . import function

BACKWARD = "experts, backward"  # the op's name in messages of backward
# A message's remedy where the caller shards experts over ranks.
BY_EXPERT = ", or call experts on local tensors with first="
NAMES = ("x", "experts", "weights", "gate", "up", "down")  # the operands, in messages


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

    A token's output is the sum over the token's choices j of `weights[j] * mlp(experts[j])`, where expert e's MLP is
    `down[e] @ (silu(gate[e] @ x) * (up[e] @ x))`. No token is dropped, and an expert may have any number of tokens.

    x: [..., H].
    experts, weights: [..., k], the experts chosen by each token (int32 or int64) and the weight of each choice, for
    example of `route`.
    gate, up: [E, I, H]. down: [E, H, I].
    first: gate, up and down have the experts first to first + E - 1. Choices of further experts add nothing, and the
    gradient of their weights is 0.
    rows: for how many choices to allocate memory: at least the choices of these E experts. None: all N * k. On a GPU,
    choices beyond `rows` are left out. On a CPU the op counts the choices, and raises for too few rows.
    Returns [..., H] in x's dtype. A token's choices are added in float32, on a GPU in the order of the choices, on a
    CPU in the order of the experts: two runs are equal to the bit. The host does not wait for a GPU.
    Saved for backward: the operands, the sorted order, and both pre-activations [rows, I]. Backward computes the sorted
    inputs and the gated activations again.

    Layouts: an axis may shard the tokens of x, experts and weights alike, with gate, up and down replicated. Or an axis
    may shard I: gate S(1), up S(1) and down S(2), with x, experts and weights replicated. The output is then
    Partial(sum), and also the gradients of x and weights. Communication: none.
    Raises LayoutError for further layouts; ValueError for mismatched shapes, dtypes, devices or options, and on a CPU
    for more choices than `rows`.
    """
    check_operands("experts", NAMES, 6, x, experts, weights, gate, up, down)
    function.check(x, experts, weights, gate, up, down, first, rows)
    return apply(EXPERTS, x, experts, weights, gate, up, down, first=first, rows=rows)


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `EXPERTS`. layouts, shapes: of the operands, in the order of `NAMES`."""
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
    """Raises LayoutError if the operand is Partial on an axis: silu of addends does not add up to silu of the sum."""
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
