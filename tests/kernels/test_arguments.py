"""Arguments of a wrong kind, of every op: a single error names the op's argument, the value and the remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from weft import kernels
from weft.mesh import ProcessMesh

from tests.kernels.cases import ints, normal

NAN, INF = float("nan"), float("inf")
HALF, TWO = torch.tensor(0.5), torch.tensor(2)
NUMBER = ("1e-5", None, True, NAN, INF, -INF, HALF, torch.nn.Parameter(HALF), [0.5], 1j, 10**400)
NOT_NEGATIVE = (*NUMBER, -1.0)
POSITIVE_OR_NONE = tuple(each for each in (*NOT_NEGATIVE, 0.0) if each is not None)
SHARE = (*NOT_NEGATIVE, 1.5)
FLAG = ("no", "", None, 0, 1, 0.5, NAN, torch.tensor(True), [False])
INT = ("2", None, True, 2.0, 1.5, NAN, INF, TWO, [2])
INT_OR_NONE = tuple(each for each in INT if each is not None)
COUNT, COUNT_OR_NONE = (*INT, 0, -1), (*INT_OR_NONE, 0, -1)
NAME_OR_NONE: tuple[Any, ...] = ("none ", "MEAN", 1, True, ["none"], b"none", TWO, {})
NAME = (*NAME_OR_NONE, None)
TEXT_OR_NONE: tuple[Any, ...] = (1, b"a", True, TWO, ["a"], 1.0, NAN, {})
DTYPE_OR_NONE = ("float32", torch.int64, float, torch.float8_e5m2, [torch.float32], torch.complex64, 1, torch.bool)
KEY = (-1, 2**64, "1", None, True, 1.0, torch.tensor(3), NAN, [1])
ORDER: tuple[Any, ...] = (
    5,
    "ab",
    [3, 4],
    [(0, 2, 4)],
    [("0", "4")],
    [(0.0, 4.0)],
    [(False, 4)],
    [(0, NAN)],
    torch.tensor([[0, 4]]),
    [],
)
ORDERS: tuple[Any, ...] = (5, "ab", [((0, 4),)] * 2, [], [5], [((0.0, 4.0),)])
GROUPS = (
    2,
    "22",
    (2,),
    (2.0, 1.0),
    (True, True),
    (0, 1),
    (2, 3),
    torch.tensor([2, 1]),
    (NAN, 1),
    ("2", "1"),
    (2, None),
)
DENOMINATOR = ("5", True, NAN, INF, -1.0, [4.0], 1j, torch.tensor([1.0, 2.0]), torch.tensor(True), torch.tensor(1j))
SHAPE = (None, "44", (4.0, 2), (-1, 4), (True, 4), (NAN,), 1.5, torch.tensor([4.0, 2.0]), ("4",))
LAYOUT: tuple[Any, ...] = ("dp: R", 1, [], TWO, True, {}, ProcessMesh.grid(tp=1), 1.0)
DEVICE: tuple[Any, ...] = (1.5, "cpuu", [], NAN, b"cpu", {}, TWO, True)
DECLARED = ("x", None, 1, [1], {"x": {"tp": True}}, {"x": {"tp": 1.0}}, {"x": {1: "R"}}, {"x": {"tp": "Q"}})
OUTPUTS = ("x", None, 1, [1], {"tp": True}, {"tp": 1.0}, {1: "R"}, {"tp": "Q"})
OPERAND, OPTIONAL = "an operand", "an operand or None"
Wrong = Mapping[str, Any]  # by the name of an argument: OPERAND, OPTIONAL, or wrong values

X, ROWS, WEIGHT, VECTOR = (normal(*shape).float() for shape in ((4, 8), (1, 4, 8), (8, 8), (8,)))
COS, SIN = kernels.rope_tables(torch.arange(4), torch.tensor([1.0, 0.5]))
CLASSES, OFFSETS, STACKED = ints(8, 4), torch.tensor([1, 4], dtype=torch.int32), normal(2, 8, 8).float()
EXPERTS, SHARES = kernels.route(X, 2)
MATRICES = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(0))
BOTH = {"a": OPERAND, "b": OPERAND}
EPILOGUE: Wrong = {
    "bias": OPTIONAL, "activation": NAME_OR_NONE, "residual": OPTIONAL, "out_dtype": DTYPE_OR_NONE, "alpha": NUMBER,
    "beta": NUMBER, "accumulate_into": OPTIONAL, "a_scale": OPTIONAL, "b_scale": OPTIONAL,
}  # fmt: skip
LOSS: Wrong = {
    "target": OPERAND, "weight": OPTIONAL, "ignore_index": INT, "reduction": NAME, "label_smoothing": SHARE,
    "z_loss": NOT_NEGATIVE, "softcap": POSITIVE_OR_NONE, "logit_scale": NUMBER, "denominator": DENOMINATOR,
    "inplace_backward": FLAG, "return_lse": FLAG, "return_z_loss": FLAG, "return_token_accuracy": FLAG,
}  # fmt: skip


def declare(**arguments: Any) -> Any:
    return kernels.on_local_tensors(**arguments)(lambda x: x)


# Of each op, a right call, and wrong values of its arguments. A name may end in "-" and what is special about the call.
CALLS: dict[str, tuple[dict[str, Any], Wrong]] = {
    "KeyValueCache": ({"capacity": 4}, {"capacity": COUNT}),
    "add": ({"x": X, "y": X}, {"x": OPERAND, "y": OPERAND, "alpha": NUMBER}),
    "add_layer_norm": (
        {"x": X, "residual": X, "weight": VECTOR, "bias": VECTOR},
        {"x": OPERAND, "residual": OPERAND, "weight": OPTIONAL, "bias": OPTIONAL, "eps": NOT_NEGATIVE},
    ),
    "add_rms_norm": (
        {"x": X, "residual": X, "weight": VECTOR},
        {"x": OPERAND, "residual": OPERAND, "weight": OPTIONAL, "eps": NOT_NEGATIVE},
    ),
    "all_gather_matmul": ({"a": X, "b": WEIGHT}, BOTH),
    "attention": (
        {"query": ROWS, "key": ROWS, "value": ROWS, "head_dim": 4},
        {
            "query": OPERAND, "key": OPERAND, "value": OPERAND, "head_dim": COUNT, "causal": FLAG, "order": ORDER,
            "scale": POSITIVE_OR_NONE, "window": COUNT_OR_NONE, "softcap": POSITIVE_OR_NONE, "sinks": OPTIONAL,
            "documents": OPTIONAL, "dropout": SHARE, "dropout_key": tuple(each for each in KEY if each is not None),
            "dropout_name": TEXT_OR_NONE, "cache": (5, "x", {}, TWO, True),
        },
    ),
    "attention-dropout": (
        {"query": ROWS, "key": ROWS, "value": ROWS, "head_dim": 4, "dropout": 0.5, "dropout_key": 7},
        {"dropout_key": KEY, "dropout_name": TEXT_OR_NONE},
    ),
    "combine": (
        {"y": WEIGHT, "experts": EXPERTS, "weights": SHARES}, {"y": OPERAND, "experts": OPERAND, "weights": OPERAND}
    ),
    "cross_entropy": ({"logits": X, "target": CLASSES}, {"logits": OPERAND, "class_dim": (*INT, 2, -3), **LOSS}),
    "dispatch": (
        {"x": X, "experts": EXPERTS, "num_experts": 8}, {"x": OPERAND, "experts": OPERAND, "num_experts": COUNT}
    ),
    "document_bounds": ({"documents": CLASSES}, {"documents": OPERAND}),
    "dropout": (
        {"x": X, "p": 0.5, "key": 7},
        {"x": OPERAND, "p": SHARE, "key": KEY, "name": TEXT_OR_NONE, "order": ORDER, "residual": OPTIONAL},
    ),
    "dropout-zero": (
        {"x": X, "p": 0.0, "key": 7},
        {"x": OPERAND, "key": KEY, "name": TEXT_OR_NONE, "order": ORDER, "residual": OPTIONAL},
    ),
    "dropout-rows": ({"x": ROWS, "p": 0.5, "key": 7}, {"orders": ORDERS}),
    "embedding": (
        {"tokens": CLASSES, "weight": WEIGHT},
        {"tokens": OPERAND, "weight": OPERAND, "padding_idx": (*INT_OR_NONE, 8, -9)},
    ),
    "experts": (
        {"x": X, "experts": EXPERTS, "weights": SHARES, "gate": MATRICES, "up": MATRICES, "down": MATRICES},
        {
            "x": OPERAND, "experts": OPERAND, "weights": OPERAND, "gate": OPERAND, "up": OPERAND, "down": OPERAND,
            "first": (*INT, -1), "rows": tuple(each for each in (*INT, -1) if each is not None),
        },
    ),
    "geglu": ({"gate": X, "up": X}, {"gate": OPERAND, "up": OPERAND, "approximate": NAME}),
    "gelu": ({"x": X}, {"x": OPERAND, "approximate": NAME}),
    "grouped_matmul": ({"a": X, "b": STACKED, "offsets": OFFSETS}, {**BOTH, "offsets": OPERAND, **EPILOGUE}),
    "grouped_matmul-residual": (
        {"a": X, "b": STACKED, "offsets": OFFSETS, "residual": X}, {"alpha": NUMBER, "beta": NUMBER}
    ),
    "layer_norm": (
        {"x": X, "weight": VECTOR, "bias": VECTOR},
        {"x": OPERAND, "weight": OPTIONAL, "bias": OPTIONAL, "eps": NOT_NEGATIVE},
    ),
    "layer_norm-bfloat16": ({"x": X.bfloat16()}, {"eps": NOT_NEGATIVE}),
    "linear": (
        {"input": X, "weight": WEIGHT, "bias": VECTOR},
        {
            "input": OPERAND, "weight": OPERAND, "bias": OPTIONAL, "activation": NAME_OR_NONE,
            "input_activation": NAME_OR_NONE,
        },
    ),
    "linear_cross_entropy": (
        {"input": X, "linear_weight": WEIGHT, "target": CLASSES},
        {
            "input": OPERAND, "linear_weight": OPERAND, "linear_bias": OPTIONAL, "chunk_tokens": COUNT_OR_NONE,
            "compute_dtype": DTYPE_OR_NONE, **LOSS,
        },
    ),
    "matmul": ({"a": X, "b": WEIGHT}, {**BOTH, **EPILOGUE}),
    "matmul-residual": ({"a": X, "b": WEIGHT, "residual": X}, {"alpha": NUMBER, "beta": NUMBER}),
    "matmul-sum": (
        {"a": X, "b": WEIGHT, "accumulate_into": X.clone()},
        {"alpha": NUMBER, "beta": NUMBER, "activation": NAME_OR_NONE},
    ),
    "matmul_reduce_scatter": ({"a": X, "b": WEIGHT}, {**BOTH, "dim": (*INT[:3], *INT[4:], 1, -3)}),
    "normal": (
        {"shape": (4, 2), "key": 7},
        {"shape": SHAPE, "key": KEY, "layout": LAYOUT, "dtype": (None, *DTYPE_OR_NONE), "device": DEVICE},
    ),
    "on_local_tensors": (
        {"in_layouts": {"x": {"tp": "R"}}, "out_layouts": {"tp": "R"}},
        {
            "in_layouts": DECLARED, "out_layouts": OUTPUTS, "out_shapes": ("x", 1, [1], (4,), True, 1.5, TWO),
            "grad_layouts": tuple(each for each in DECLARED if each is not None), "reshard_inputs": FLAG,
        },
    ),
    "qkv_linear": (
        {
            "input": X, "q_weight": WEIGHT, "k_weight": WEIGHT, "v_weight": WEIGHT, "q_bias": VECTOR, "k_bias": VECTOR,
            "v_bias": VECTOR, "cos": COS, "sin": SIN,
        },
        {
            "input": OPERAND, "q_weight": OPERAND, "k_weight": OPERAND, "v_weight": OPERAND, "q_bias": OPTIONAL,
            "k_bias": OPTIONAL, "v_bias": OPTIONAL, "cos": OPERAND, "sin": OPERAND,
        },
    ),
    "rms_norm": (
        {"x": X, "weight": VECTOR},
        {"x": OPERAND, "weight": OPTIONAL, "eps": NOT_NEGATIVE, "head_dim": COUNT_OR_NONE},
    ),
    "rms_norm_rope": (
        {"x": X, "weight": VECTOR[:4], "cos": COS, "sin": SIN},
        {
            "x": OPERAND, "weight": OPERAND, "cos": OPERAND, "sin": OPERAND, "eps": NOT_NEGATIVE, "interleaved": FLAG
        },
    ),
    "rope": (
        {"x": X, "cos": COS, "sin": SIN},
        {"x": OPERAND, "cos": OPERAND, "sin": OPERAND, "interleaved": FLAG, "inplace": FLAG},
    ),
    "rope_tables": (
        {"positions": torch.arange(4), "frequencies": VECTOR[:2]},
        {"positions": OPERAND, "frequencies": OPERAND, "scale": NUMBER},
    ),
    "route": (
        {"scores": X, "k": 2},
        {
            "scores": OPERAND, "k": (*COUNT, 9), "score": NAME, "softmax_after": FLAG, "normalize": FLAG,
            "bias": OPTIONAL, "scale": NUMBER, "groups": GROUPS,
        },
    ),
    "router_statistics": (
        {"logits": X, "experts": EXPERTS},
        {
            "logits": OPERAND, "experts": OPERAND, "statistics": OPTIONAL, "load": OPTIONAL, "layer": (*INT, -1, 1),
            "layers": COUNT,
        },
    ),
    "sequence_load": ({"experts": EXPERTS[None], "num_experts": 8}, {"experts": OPERAND, "num_experts": COUNT}),
    "sigmoid_gate": ({"x": X, "score": X[:, :1]}, {"x": OPERAND, "score": OPERAND}),
    "swiglu": ({"gate": X, "up": X}, {"gate": OPERAND, "up": OPERAND}),
    "swiglu_linear": (
        {"input": X, "gate_weight": WEIGHT, "up_weight": WEIGHT},
        {"input": OPERAND, "gate_weight": OPERAND, "up_weight": OPERAND},
    ),
}  # fmt: skip
CALLS["uniform"] = CALLS["normal"]
WITH_GROUPS = ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy")
ARGUMENTS = [(name, argument) for name, (_, wrong) in CALLS.items() for argument in wrong]


def op_of(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(kernels, name.partition("-")[0])
    return declare if own is kernels.on_local_tensors else own


def wrong_values(name: str, argument: str) -> tuple[Any, ...]:
    given, wrong = CALLS[name]
    if wrong[argument] not in (OPERAND, OPTIONAL):
        values: tuple[Any, ...] = wrong[argument]
        return values
    operand = given.get(argument, VECTOR)
    wanted = (operand.tolist(), operand.numpy()) if operand.dtype != torch.bfloat16 else ()
    return *wanted, [[1.0, 2.0]], 1.0, 1, True, "x", (), *((None,) if wrong[argument] is OPERAND else ())


@pytest.mark.every_value
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=[" ".join(each) for each in ARGUMENTS])
def test_wrong_kinds_are_refused(name: str, argument: str) -> None:
    op, (given, _) = op_of(name), CALLS[name]
    op(**given)
    for value in wrong_values(name, argument):
        with pytest.raises(ValueError, match=rf"\b{argument}\b.*; ") as error:
            op(**(given | {argument: value}))
        assert "\n" not in str(error.value)


def test_every_argument_of_every_op_was_asked() -> None:
    asked: dict[str, set[str]] = {}
    for name, argument in ARGUMENTS:
        asked.setdefault(name.partition("-")[0], set()).add(argument)
    assert set(asked) == set(kernels.__all__) - {*WITH_GROUPS}
    for name, arguments in asked.items():
        assert arguments == set(inspect.signature(getattr(kernels, name)).parameters), name


RIGHT: dict[str, dict[str, Any]] = {
    "add": {"alpha": 2},
    "cross_entropy": {
        "class_dim": -1, "ignore_index": -1, "label_smoothing": 1, "z_loss": 2, "softcap": 3, "logit_scale": -1,
        "return_lse": True, "denominator": 4,
    },
    "dispatch": {"num_experts": 8},
    "dropout": {"p": 1},
    "embedding": {"padding_idx": -8},
    "experts": {"first": 0, "rows": 8},
    "grouped_matmul-residual": {"alpha": -2, "beta": 0},
    "layer_norm": {"eps": 0},
    "linear_cross_entropy": {"chunk_tokens": 3, "label_smoothing": 0, "denominator": 0.5},
    "matmul-residual": {"alpha": -2, "beta": 0},
    "matmul_reduce_scatter": {"dim": 0},
    "rms_norm": {"eps": 0},
    "rms_norm_rope": {"eps": 1, "interleaved": True},
    "rope": {"interleaved": True, "inplace": False},
    "rope_tables": {"scale": -1},
    "route": {"k": 2, "softmax_after": False, "normalize": False, "scale": 3, "groups": (2, 1)},
    "router_statistics": {"layer": 0, "layers": 1},
}  # fmt: skip


def of_numpy(value: Any) -> Any:
    numpy = pytest.importorskip("numpy")
    if isinstance(value, tuple):
        return tuple(map(of_numpy, value))
    return {bool: numpy.bool_, int: numpy.int64, float: numpy.float64}[type(value)](value)


@pytest.mark.every_value
@pytest.mark.parametrize("name", RIGHT)
def test_numpy_and_the_ends_of_ranges_are_taken(name: str) -> None:
    """Also an int for a number: every op gives the same result as for the floats and bools of Python."""
    op, right = op_of(name), RIGHT[name]
    given = {argument: each for argument, each in CALLS[name][0].items() if argument not in right}
    expected = op(**given, **right)
    numpys = op(**given, **{argument: of_numpy(value) for argument, value in right.items()})
    numbers = {argument: float(each) if argument in FLOATS else each for argument, each in right.items()}
    for found in (numpys, op(**given, **numbers)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


FLOATS = ("alpha", "beta", "eps", "scale", "p", "label_smoothing", "z_loss", "softcap", "logit_scale", "denominator")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        pytest.param(
            lambda: kernels.router_statistics(X, EXPERTS + 8),
            "router_statistics: experts.* outside the 8 experts; experts must be 0 to 7",
            id="an-expert-above",
        ),
        pytest.param(
            lambda: kernels.router_statistics(X, EXPERTS - 8),
            "router_statistics: experts.* outside the 8 experts; experts must be 0 to 7",
            id="an-expert-below",
        ),
        pytest.param(
            lambda: kernels.embedding(CLASSES, WEIGHT[:0]), "outside the table of 0 rows", id="a-table-without-rows"
        ),
        pytest.param(
            lambda: kernels.add(CLASSES, CLASSES, alpha=0.5),
            "add: alpha is 0.5 for tensors of torch.int64 .*; give an int, or cast x",
            id="a-fraction-of-ints",
        ),
        pytest.param(
            lambda: kernels.rope_tables(CLASSES > 3, VECTOR[:2]), "rope_tables takes positions .* of ints", id="a-mask"
        ),
        pytest.param(
            lambda: kernels.dropout(torch.cat([ROWS, ROWS]), 0.5, 7, orders=[((0, 4),)]),
            "dropout: orders has 1 orders for 2 rows; give one for each row",
            id="an-order-too-few",
        ),
    ],
)
def test_values_that_torch_refuses_are_named(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()
