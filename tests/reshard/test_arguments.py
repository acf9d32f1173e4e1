"""Arguments of a wrong kind: an error names the argument, the value and the remedy, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import (
    GradientSync,
    Link,
    Muon,
    Topology,
    check_order,
    clip_grad_norm_,
    distribute,
    exact_sums,
    layout_of,
    plan,
    to_global,
)

NAN, INF = float("nan"), float("inf")
NUMBER = ("0.5", None, True, NAN, -1.0, [0.5], 1j)
FINITE = (*NUMBER, INF, torch.tensor(0.5))
FLAG: tuple[Any, ...] = ("no", 1, 0.5, [], NAN)
INT = ("2", None, True, 2.0, NAN, INF, [2])
SHAPE = (None, "44", (4.0, 4), (-1, 4), (True, 4), (NAN, 4), 1.5, ("4", "4"), torch.tensor([4.0, 4.0]))
LAYOUT: tuple[Any, ...] = ("dp: R", None, 1, [], True, ProcessMesh.grid(dp=2), 1.0)
DTYPE = ("float32", float, 1, [torch.float32], True, b"float32")
MESH = ProcessMesh.grid(dp=2)
SHARDED, WHOLE = Layout(MESH, "dp: S(0)"), Layout(MESH)
LINK = Link(1e-6, 1e9)


def muon(**options: Any) -> Any:
    return Muon([nn.Parameter(torch.eye(4))], **options)


def inside(context: Callable[..., Any], **arguments: Any) -> None:
    with context(**arguments):
        pass


MATRIX = nn.Parameter(torch.eye(4))
# Of each function, a right call, and wrong values of its arguments.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "Muon": (
        muon,
        {},
        {
            "lr": (*NUMBER, INF, torch.ones(2)), "weight_decay": FINITE, "momentum": (*FINITE, 1.0), "nesterov": FLAG,
            "ns_coefficients": (1, None, (1.0, 2.0), "abc", (NAN, 1.0, 1.0), (True, 1.0, 1.0)), "eps": FINITE,
            "ns_steps": (*INT, -1, 100), "rows": (*INT[:1], *INT[2:], 0, 3), "adamw": FLAG, "adamw_eps": FINITE,
            "betas": (1, None, (0.9,), (1.5, 0.9), (NAN, 0.9), "ab", (True, 0.9)), "fused": FLAG,
        },
    ),
    "plan": (
        plan,
        {"src": SHARDED, "dst": WHOLE, "shape": (4, 4), "dtype": torch.float32},
        {
            "src": LAYOUT, "dst": LAYOUT, "shape": SHAPE, "dtype": (*DTYPE, None), "topology": ("x", 1, True, {}),
            "memory_limit": (*INT[:1], *INT[2:]),
        },
    ),
    "Link": (Link, {"latency": 1e-6, "bandwidth": 1e9}, {"latency": FINITE, "bandwidth": (*NUMBER, 0.0)}),
    "Topology": (
        Topology,
        {"links": {"dp": LINK}},
        {"links": (None, "x", [LINK], {"dp": 1.0}), "between": (1, "x", True)},
    ),
    "check_order": (
        lambda **arguments: inside(check_order, **arguments), {"timeout": 60.0}, {"timeout": (*FINITE, 0.0)}
    ),
    "exact_sums": (
        lambda **arguments: inside(exact_sums, **arguments),
        {"axes": {"dp": 2}},
        {"axes": (1, "x", [1], {"dp": True}, {"dp": 2.0}, {"dp": 0}, {"dp": NAN}, {1: 2})},
    ),
    "GradientSync": (
        lambda **arguments: GradientSync(nn.Linear(2, 2), **arguments).close(),
        {},
        {"shard_over": (1, True, 1.0), "bucket_bytes": (*INT, -1, 0), "dtype": (*DTYPE, torch.int64)},
    ),
    "clip_grad_norm_": (
        clip_grad_norm_,
        {"parameters": [MATRIX], "max_norm": 1.0},
        {"max_norm": (*NUMBER, torch.tensor(1.0)), "norm_type": (*NUMBER, 0.0, torch.tensor(1.0))},
    ),
}  # fmt: skip
ARGUMENTS = [(name, argument) for name, (_, _, wrong) in CALLS.items() for argument in wrong]
EXACT = {"axes": "exact", "links": "link"}  # what a message calls the argument, where its name is another


@pytest.mark.every_value
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=[" ".join(each) for each in ARGUMENTS])
def test_wrong_kinds_are_refused(name: str, argument: str) -> None:
    function, given, wrong = CALLS[name]
    if name != "check_order":  # needs processes
        function(**given)
    for value in wrong[argument]:
        with pytest.raises(ValueError, match=EXACT.get(argument, argument)):
            function(**(given | {argument: value}))


@pytest.mark.parametrize("x", [torch.eye(2), [1.0], None, "x"], ids=["plain", "list", "none", "str"])
def test_a_plain_tensor_has_no_layout(x: Any) -> None:
    with pytest.raises(ValueError, match=r"layout_of takes a DTensor, got a .*; make a DTensor with distribute"):
        layout_of(x)
    with pytest.raises(ValueError, match="to_global takes a DTensor, got a "):
        to_global(x)


@pytest.mark.parametrize("x", [[1.0], None, "x", 1.0], ids=["list", "none", "str", "float"])
def test_only_tensors_are_distributed(x: Any) -> None:
    with pytest.raises(ValueError, match=r"distribute takes a tensor, got a .*; give torch.tensor\(\)"):
        distribute(x, WHOLE)


def test_a_rate_may_be_a_tensor_and_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    muon(lr=torch.tensor(0.1), weight_decay=numpy.float32(0.1), ns_steps=numpy.int64(5))
    clip_grad_norm_([MATRIX], numpy.float64(1.0), norm_type=INF)
    assert plan(SHARDED, WHOLE, numpy.array([4, 4]), torch.float32) == plan(SHARDED, WHOLE, (4, 4), torch.float32)
