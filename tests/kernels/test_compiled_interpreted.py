"""Ops with kernels under torch.compile(fullgraph=True): one graph, in which each launch is an op of Weft's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from weft import kernels

from tests.kernels.cases import normal

ENDS, TOKENS = torch.tensor([1, 4], dtype=torch.int32), torch.tensor([1, 0, 4, 2])
COS, SIN = normal(4, 2).float(), normal(4, 2, seed=1).float()
EXPERTS = torch.tensor([[1, 0], [2, 1], [0, 2], [1, 2]], dtype=torch.int32)
KEY = torch.tensor(7, dtype=torch.uint64)


Operands = dict[str, Tensor]


def layers(of: Operands) -> list[Tensor]:
    """Each op that has a kernel, once."""
    x, y, weight, up, vector, bias = (of[name] for name in ("x", "y", "weight", "up", "vector", "bias"))
    return [
        kernels.rms_norm(x, vector),
        *kernels.add_layer_norm(x, y, vector, bias),
        kernels.rope(x, COS, SIN),
        kernels.rms_norm_rope(x, of["of_head"], COS, SIN),
        kernels.swiglu(x, y),
        kernels.gelu(x),
        kernels.embedding(TOKENS, weight),
        kernels.dropout(x, 0.5, KEY),
        kernels.linear(x, weight, activation="gelu"),
        kernels.swiglu_linear(x, weight, up),
        kernels.grouped_matmul(x, of["stacked"], ENDS),
        kernels.experts(x, EXPERTS, of["choices"], of["stacked"], of["experts_up"], of["down"]),
        kernels.route(x, 2, groups=(4, 2))[1],
        kernels.dispatch(x, EXPERTS, num_experts=3)[0],
        kernels.combine(weight, EXPERTS, of["shares"]),
        kernels.router_statistics(x, EXPERTS),
    ]


OPS = {
    "rms_norm", "layer_norm", "rope", "rms_norm_rope", "gate",
    "embedding", "dropout", "matmul", "swiglu_linear", "grouped_matmul", "experts",
    "route", "sort_by_expert", "gather_rows", "sum_rows", "router_statistics",
}  # fmt: skip
OF_BACKWARD = {
    "rms_norm_backward", "layer_norm_backward", "rope",
    "rms_norm_rope_backward", "gate_backward", "embedding_backward", "dropout",
    "grouped_matmul", "grouped_matmul_weights", "experts_backward",
    "route_backward", "sum_rows", "sum_rows_backward", "router_statistics_backward",
}  # fmt: skip


def recording(names: set[str]) -> Callable[..., Any]:
    """A compiler that runs a graph unchanged, and records the names of Weft's ops in it."""

    def compiler(graph: torch.fx.GraphModule, example: Any) -> Any:
        for node in graph.graph.nodes:
            for each in (
                node.target,
                *node.args[:1],
            ):  # an op that writes into its operands is the first argument of one of torch's ops
                if isinstance(each, torch._ops.OpOverload) and each.namespace == "weft":
                    names.add(each.name().removeprefix("weft::").partition(".")[0])
        return make_boxed_func(graph.forward)

    return compiler


@pytest.mark.exhaustive
def test_each_launch_is_an_op_in_the_graph(interpreted: None) -> None:
    torch._dynamo.reset()
    forward: set[str] = set()
    backward: set[str] = set()
    backend = aot_autograd(fw_compiler=recording(forward), bw_compiler=recording(backward))
    shapes = {
        "x": (4, 8), "y": (4, 8), "weight": (8, 8), "up": (8, 8),
        "vector": (8,), "bias": (8,), "of_head": (4,), "stacked": (2, 8, 8), "choices": (4, 2),
        "experts_up": (2, 8, 8), "down": (2, 8, 8), "shares": (4, 2),
    }  # fmt: skip
    made = {name: normal(*shape, seed=i).float() for i, (name, shape) in enumerate(shapes.items())}
    found = []
    for run in (torch.compile(layers, fullgraph=True, backend=backend), layers):
        leaves = {name: each.clone().requires_grad_() for name, each in made.items()}
        outputs = run(leaves)
        upstream = [torch.full_like(each, 2.0) for each in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, list(leaves.values()), upstream)])
    assert forward == OPS
    assert backward == OF_BACKWARD
    for compiled, eager in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)
