"""qkv_linear on plain tensors and DTensors."""

from __future__ import annotations

from string import ascii_lowercase
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import Layout, LayoutError, infer

from ..matmul.sharded.layouts import adds, check_operand, kept
from ..matmul.sharded.linear import check_linear
from ..op import Op
from ..rope.sharded import check_tables, turned_layout
from ..sharded import Shapes, Sharding, apply_many, autocasts
from . import function


@autocasts("qkv_linear")
def qkv_linear(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear` of one input by three weights, the first two outputs turned by `rope`: queries, keys and values, in one op.

    input: [..., T, K]. q_weight, k_weight, v_weight: [M, K], an M for each. q_bias, k_bias, v_bias: [M] of the weight, or None.
    cos, sin: as of `rope`; without them nothing is turned. Returns three tensors [..., T, M]. The gradients of the input are added
    up in the products that make them, where three layers write three and add twice. Saved for backward: the operands.
    Layouts: as of `linear`, one for all weights; with tables as of `rope` too, which takes no Partial(sum) and cuts no head. The
    gradients of the outputs arrive in one layout. Communication: none.
    Raises ValueError for shapes that do not go together, and LayoutError for other layouts.
    """
    for weight, bias in ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)):
        check_linear("qkv_linear", input, weight, bias)
    if (cos is None) != (sin is None):
        raise ValueError("qkv_linear takes cos and sin, or neither of them; give both")
    if cos is not None and sin is not None:
        for weight in (q_weight, k_weight):
            check_tables("qkv_linear", (*input.shape[:-1], weight.shape[0]), cos, sin)
    tensors = (input, q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, cos, sin)
    q, k, v = apply_many(QKV_LINEAR, *tensors)
    return q, k, v


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    input, weight, k_weight, v_weight, *biases, cos, sin = layouts
    input_shape, *weight_shapes = shapes[:4]
    assert input is not None and weight is not None and input_shape, "they are given"
    lead = ascii_lowercase[: len(input_shape) - 1]
    product = infer.einsum(f"{lead}z,yz->{lead}y", input, weight)
    for name, other in (("weight of keys", k_weight), ("weight of values", v_weight)):
        check_operand("qkv_linear", name, other, weight, product)
    beside = kept(product, f"{lead}y", "y")
    for name, bias in zip(("queries", "keys", "values"), biases, strict=True):
        check_operand("qkv_linear", f"bias of {name}", bias, beside, product)
    made = [(*input_shape[:-1], each[0]) for each in weight_shapes if each is not None]
    output = product
    operands = tuple(each for each in (product, cos, sin) if each is not None)  # of rope, where there are tables
    if cos is not None and sin is not None and (table := shapes[7]) is not None:
        for shape in made[:2]:
            output = turned_layout("qkv_linear", product, cos, sin, shape, table)

    def of_product(i: int, grad: Layout) -> Layout:
        turned = len(operands) > 1 and i < 2
        return infer.gradient(output, grad, product, operands) if turned else grad

    def gradients(*grads: Layout | None) -> tuple[Layout | None, ...]:
        arrived = [None if grad is None else of_product(i, grad) for i, grad in enumerate(grads)]
        one, *others = dict.fromkeys(grad for grad in arrived if grad is not None)
        if others:
            raise LayoutError(
                f"qkv_linear: the gradients lie as ({one}) and ({others[0]}); reshard those to ({one})", (one,)
            )
        of_weight, of_bias = infer.einsum(f"{lead}y,{lead}z->yz", one, input), infer.einsum(f"{lead}y->y", one)
        return (
            infer.einsum(f"{lead}y,yz->{lead}z", one, weight),
            *(None if grad is None else of_weight for grad in arrived),
            *(None if grad is None or bias is None else of_bias for grad, bias in zip(arrived, biases, strict=True)),
            None,
            None,
        )

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {"add_bias": adds(product, rank)}

    return Sharding(output, made[0], gradients, local, more=((output, made[1]), (product, made[2])))


QKV_LINEAR = Op(
    "qkv_linear",
    function.forward,
    function.backward,
    _rule,
    inference=function.inference,
    weights=(1, 2, 3, 4, 5, 6),
    of_products=function.of_products,
)
