"""Operands of any op that do not fit together: devices and dtypes are refused, with the values and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.mesh import Layout
from weft.reshard import distribute

from tests.kernels.cases import TWO, ints, normal
from tests.support.pool import Pool

Made = dict[str, Tensor]


def grouped(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return kernels.grouped_matmul(a, b, offsets, bias=bias, residual=residual)


def projected(x: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return kernels.qkv_linear(x, weight, weight, weight, bias, bias, bias, cos=cos, sin=sin)


def tensors() -> Made:
    """Float32 operands by the names that ops use."""
    made = {
        "x": normal(4, 8), "y": normal(4, 8, seed=1), "weight": normal(8, 8),
        "up": normal(8, 8, seed=1), "vector": normal(8),
        "bias": normal(8, seed=1), "cos": normal(4, 2), "sin": normal(4, 2, seed=1),
        "of_rows": normal(4, 1),
        "of_head": normal(4), "stacked": normal(2, 8, 8), "of_groups": normal(2, 8), "one_row": normal(1, 4, 8),
    }  # fmt: skip
    made = {name: each.float() for name, each in made.items()}
    made |= {"shares": normal(4, 2).float(), "sums": normal(1, 17).float(), "experts": ints(8, 4, 2)}
    made |= {"load": normal(1, 8).float(), "ids": ints(8, 1, 4, 2)}
    return made | {"tokens": ints(8, 4), "offsets": torch.tensor([1, 4], dtype=torch.int32)}


# A call of the op, and the names of its operands.
CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (kernels.add, "x y"),
    "add_layer_norm": (kernels.add_layer_norm, "x y vector bias"),
    "add_rms_norm": (kernels.add_rms_norm, "x y vector"),
    "all_gather_matmul": (kernels.all_gather_matmul, "x weight"),
    "attention": (partial(kernels.attention, head_dim=4), "one_row one_row one_row"),
    "attention-sinks": (lambda x, sinks: kernels.attention(x, x, x, head_dim=1, sinks=sinks), "one_row vector"),
    "combine": (kernels.combine, "weight experts shares"),
    "cross_entropy": (kernels.cross_entropy, "x tokens"),
    "dispatch": (partial(kernels.dispatch, num_experts=8), "x experts"),
    "dropout": (lambda x, residual: kernels.dropout(x, 0.5, 7, residual=residual), "x y"),
    "embedding": (kernels.embedding, "tokens weight"),
    "experts": (kernels.experts, "x experts shares stacked stacked stacked"),
    "geglu": (kernels.geglu, "x y"),
    "gelu": (kernels.gelu, "x"),
    "grouped_matmul": (grouped, "x stacked offsets of_groups y"),
    "layer_norm": (kernels.layer_norm, "x vector bias"),
    "linear": (kernels.linear, "x weight vector"),
    "linear-gelu": (partial(kernels.linear, activation="gelu"), "x weight vector"),
    "linear_cross_entropy": (
        lambda x, weight, ids, bias: kernels.linear_cross_entropy(x, weight, ids, linear_bias=bias),
        "x weight tokens vector",
    ),
    "matmul": (lambda a, b, bias, residual: kernels.matmul(a, b, bias=bias, residual=residual), "x weight vector y"),
    "matmul_reduce_scatter": (kernels.matmul_reduce_scatter, "x weight"),
    "qkv_linear": (projected, "x weight vector cos sin"),
    "rms_norm": (kernels.rms_norm, "x vector"),
    "rms_norm_rope": (kernels.rms_norm_rope, "x of_head cos sin"),
    "rope": (kernels.rope, "x cos sin"),
    "rope_tables": (kernels.rope_tables, "tokens of_head"),
    "route": (lambda scores, bias: kernels.route(scores, 2, bias=bias), "x vector"),
    "sigmoid_gate": (kernels.sigmoid_gate, "x of_rows"),
    "router_statistics": (kernels.router_statistics, "x experts sums"),
    "router_statistics-load": (lambda x, ids, load: kernels.router_statistics(x, ids, load=load), "one_row ids load"),
    "sequence_load": (partial(kernels.sequence_load, num_experts=8), "ids"),
    "swiglu": (kernels.swiglu, "x y"),
    "swiglu_linear": (kernels.swiglu_linear, "x weight up"),
}  # fmt: skip
INTS = ("tokens", "offsets", "experts", "ids")
TAKES_ANY = ("add",)  # torch's own addition, of ints too
SEVERAL = [name for name, (_, operands) in CALLS.items() if " " in operands]


def run(name: str, **changed: Tensor) -> Any:
    call, operands = CALLS[name]
    made = tensors() | changed
    return call(*(made[each] for each in operands.split()))


@pytest.mark.parametrize("name", SEVERAL)
def test_two_devices_are_named(name: str, device: str) -> None:
    given = {each: tensor.to(device) for each, tensor in tensors().items()}
    operands = CALLS[name][1].split()
    for at in range(len(operands)):
        mixed = [given[each].to("meta") if i == at else given[each] for i, each in enumerate(operands)]
        with pytest.raises(ValueError, match=f"(?s)(meta.*{device}|{device}.*meta)"):
            CALLS[name][0](*mixed)


def test_every_op_was_asked() -> None:
    without = {
        "document_bounds",
        "on_local_tensors",
        "KeyValueCache",
        "normal",
        "uniform",
        "vocab_parallel_cross_entropy",
        "vocab_parallel_linear_cross_entropy",
    }
    assert {name.partition("-")[0] for name in CALLS} == set(kernels.__all__) - without


@pytest.mark.parametrize("name", CALLS)
def test_operands_without_data_go_together(name: str) -> None:
    run(name, **{each: tensor.to("meta") for each, tensor in tensors().items()})


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in TAKES_ANY])
def test_floats_alone_are_taken(name: str, dtype: torch.dtype, device: str) -> None:
    """Each floating operand in turn gets a wrong dtype: the error names it, and is not torch's own."""
    given = {each: tensor.to(device) for each, tensor in tensors().items()}
    operands = CALLS[name][1].split()
    for at, of in enumerate(operands):
        if of in INTS:
            continue
        mixed = [given[each].to(dtype) if i == at else given[each] for i, each in enumerate(operands)]
        with pytest.raises(ValueError, match=f"{dtype}"):
            CALLS[name][0](*mixed)


@pytest.mark.parametrize(
    "name", ["linear", "swiglu_linear", "qkv_linear", "all_gather_matmul", "matmul_reduce_scatter"]
)
def test_factors_of_8_bits_are_for_matmul(name: str, device: str) -> None:
    given = {each: tensor.to(device) for each, tensor in tensors().items()}
    eight = {each: given[each].to(torch.float8_e4m3fn) for each in ("x", "weight", "up")}
    with pytest.raises(ValueError, match=f"{name}: .*have scales.*call matmul with a_scale and b_scale"):
        run(name, **given | eight)


LINEAR = r"cannot be multiplied; cast one with .to\(\)"
BIAS = r"the bias is torch.bfloat16 beside factors of torch.float32; cast it with .to\(\), to torch.float32"


@pytest.mark.parametrize(
    ("name", "narrow", "told"),
    [
        ("linear", "weight", LINEAR),
        ("swiglu_linear", "up", LINEAR),
        ("qkv_linear", "weight", LINEAR),
        ("all_gather_matmul", "weight", LINEAR),
        ("linear", "vector", BIAS),
        ("linear-gelu", "vector", BIAS),
        ("matmul", "vector", BIAS),
        ("qkv_linear", "vector", BIAS),
        ("grouped_matmul", "of_groups", BIAS),
    ],
)
def test_two_floats_that_do_not_mix(name: str, narrow: str, told: str, device: str) -> None:
    given = {each: tensor.to(device) for each, tensor in tensors().items()}
    with pytest.raises(ValueError, match=told):
        run(name, **given | {narrow: given[narrow].bfloat16()})


def test_a_bias_may_have_the_outputs_dtype(device: str) -> None:
    x, weight, bias = (tensors()[each].to(device) for each in ("x", "weight", "vector"))
    found = kernels.matmul(x.bfloat16(), weight.bfloat16(), bias=bias, out_dtype=torch.float32)
    truth = x.bfloat16().double() @ weight.bfloat16().double() + bias.double()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.complex64, torch.float32], ids=str)
def test_tokens_are_ints_of_32_or_64_bits(dtype: torch.dtype, device: str) -> None:
    weight = tensors()["weight"].to(device)
    with pytest.raises(ValueError, match=rf"int tokens, got {dtype}; cast them with .to\(torch.int64\)"):
        kernels.embedding(torch.ones(3, dtype=dtype, device=device), weight)
    for taken in (torch.int32, torch.int64):
        found = kernels.embedding(torch.ones(3, dtype=taken, device=device), weight)
        assert torch.equal(found, weight[1].expand(3, 8))


@dataclass(frozen=True)
class Eight:
    """Factors of 8 bits and their scales."""

    name: str
    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ((4, 8), (8, 8), (), ())


def by_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    return kernels.matmul(a, b, a_scale=a_scale, b_scale=b_scale)


def by_groups(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    offsets = torch.tensor([1, 4], dtype=torch.int32, device=a.device)
    return kernels.grouped_matmul(a, b, offsets, a_scale=a_scale, b_scale=b_scale)


@pytest.mark.parametrize(
    "of",
    [Eight("matmul", by_matmul), Eight("grouped_matmul", by_groups, ((4, 8), (2, 8, 8), (), ()))],
    ids=["matmul", "grouped"],
)  # fmt: skip
@pytest.mark.parametrize("at", range(4), ids=["a", "b", "a_scale", "b_scale"])
def test_factors_of_8_bits_have_no_gradient(of: Eight, at: int, device: str) -> None:
    given = [normal(*shape).float().abs().to(device) for shape in of.shapes]
    given[:2] = [each.to(torch.float8_e4m3fn) for each in given[:2]]
    given[at].requires_grad_()
    told = rf"{of.name}: {('a', 'b', 'a_scale', 'b_scale')[at]} needs a gradient.*detach\(\) it"
    with pytest.raises(ValueError, match=told):
        of.call(*given)
    with torch.no_grad():
        found = of.call(*given)
    given[at] = given[at].detach()
    assert torch.equal(of.call(*given), found)


def test_a_bias_beside_factors_of_8_bits_has_its_gradient(device: str) -> None:
    a, b = (normal(*shape).to(torch.float8_e4m3fn).to(device) for shape in ((4, 8), (8, 8)))
    bias = torch.ones(8, device=device, requires_grad=True)
    kernels.matmul(a, b, bias=bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((8,), 4.0, device=device))


def refused_on_a_mesh() -> list[str]:
    """The same checks, of DTensors."""
    whole = Layout(TWO)
    given = {each: distribute(tensor, whole) for each, tensor in tensors().items()}
    narrow = {each: distribute(tensors()[each].bfloat16(), whole) for each in ("weight", "vector")}
    eight = {each: distribute(tensors()[each].to(torch.float8_e4m3fn), whole) for each in ("x", "weight")}
    messages = []
    for call in (
        lambda: run("linear", **given | {"weight": narrow["weight"]}),
        lambda: run("linear", **given | {"vector": narrow["vector"]}),
        lambda: run("all_gather_matmul", **given | eight),
        lambda: run("rms_norm", **given | {"x": distribute(tensors()["x"].int(), whole)}),
        lambda: run("rms_norm", **given | {"vector": tensors()["vector"].to("meta")}),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_dtensors_are_refused_alike(pool: Pool) -> None:
    for weight, bias, eight, ints_, device in pool.run(refused_on_a_mesh, ranks=2):
        assert "linear: factors of torch.float32 and torch.bfloat16 cannot be multiplied; cast one" in weight
        assert "linear: the bias is torch.bfloat16" in bias
        assert "call matmul with a_scale and b_scale" in eight
        assert "rms_norm: x is torch.int32; cast it" in ints_
        assert "rms_norm: the operands are on cpu and meta" in device


X, WEIGHT, VECTOR = (tensors()[each] for each in ("x", "weight", "vector"))
TABLE = torch.ones(4, 0)
SHAPES: dict[str, tuple[Callable[[], Any], str]] = {
    "add": (lambda: kernels.add(X, WEIGHT), r"got \(4, 8\) and \(8, 8\); exchange or expand them"),
    "linear": (lambda: kernels.linear(X, WEIGHT[:, :5]), "transpose the weight with .mT where this is meant"),
    "linear-bias": (lambda: kernels.linear(X, WEIGHT, VECTOR[:3]), r"shape \(8,\), got \(3,\); expand or flatten it"),
    "matmul-residual": (
        lambda: kernels.matmul(X, WEIGHT, residual=X[:3]),
        r"a residual of shape \(3, 8\) does not broadcast to the output, "
        r"\(4, 8\); give its dims the output's sizes, or 1",
    ),
    "grouped_matmul": (lambda: kernels.grouped_matmul(X, WEIGHT, tensors()["offsets"]), "flatten the rows of a, stack"),
    "swiglu_linear": (
        lambda: kernels.swiglu_linear(X, WEIGHT, WEIGHT[:3]), "transpose a weight with .mT where this is meant"
    ),
    "swiglu": (lambda: kernels.swiglu(X, WEIGHT), r"got \(4, 8\) and \(8, 8\); expand one"),
    "geglu": (lambda: kernels.geglu(X, WEIGHT), r"geglu .* got \(4, 8\) and \(8, 8\); expand one"),
    "rms_norm": (lambda: kernels.rms_norm(X, VECTOR[:3]), "give a number for each element of a row"),
    "rms_norm-heads": (
        lambda: kernels.rms_norm(X, head_dim=3),
        "give a head_dim, 1 or more, which divides the last size of x",
    ),
    "add_rms_norm": (lambda: kernels.add_rms_norm(X, X, VECTOR[:3]), "give a number for each element of a row"),
    "layer_norm": (lambda: kernels.layer_norm(X, VECTOR, VECTOR[:3]), r"bias \[H\], .* give a number for each element"),
    "rope": (
        lambda: kernels.rope(X, X[:, :3], X[:, :3]),
        "give both tables a row of D / 2 numbers for each token, as rope_tables makes them",
    ),
    "rope-no-angles": (lambda: kernels.rope(X, TABLE, TABLE), r"got \(4, 8\), \(4, 0\) and \(4, 0\); give both tables"),
    "rms_norm_rope": (
        lambda: kernels.rms_norm_rope(X, VECTOR[:3], X[:, :2], X[:, :2]),
        r"give a weight of shape \(4,\), for all heads"
    ),
    "embedding": (
        lambda: kernels.embedding(tensors()["tokens"], VECTOR),
        "give a row for each token of the vocabulary",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_go_together_name_the_remedy(name: str) -> None:
    call, told = SHAPES[name]
    with pytest.raises(ValueError, match=told):
        call()


def on_two_devices() -> str:
    """The error on ranks of a mesh of two, and the result on ranks outside."""
    x, vector = distribute(X.to("meta"), Layout(TWO, "tp: S(0)")), distribute(VECTOR, Layout(TWO))
    if torch.distributed.get_rank() < 2:
        with pytest.raises(ValueError) as caught:
            kernels.rms_norm(x, vector)
        return str(caught.value)
    return f"{tuple(kernels.rms_norm(x, vector).shape)}"


def test_a_rank_outside_of_the_mesh_is_asked_for_no_device(pool: Pool) -> None:
    """torch's ops leave empty parts, such as a parameter's, on the CPU, whatever device the mesh's ranks use."""
    told = "rms_norm: the operands are on meta and cpu; move them to one device"
    assert pool.run(on_two_devices) == [told, told, "(4, 8)", "(4, 8)"]
