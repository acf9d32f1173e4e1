"""Code compiled for DTensors, then called with new sizes: the local size may stay the same on one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy, linear, linear_cross_entropy, swiglu
from weft.mesh import Layout, ProcessMesh
from weft.models import GPT, GPTConfig, Llama, LlamaConfig, initialize, lay_out_batch, parallelize
from weft.reshard import distribute, layout_of, reshard, to_global

from tests.support.pool import Pool

ROWS = (8, 7, 5, 8, 6, 1)  # of 8 and 7 rows the first of two ranks has 4, of 6 and 5 it has 3
H, V = 4, 11


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def laid_rows(rows: int) -> tuple[DTensor, DTensor]:
    by_rows = Layout(ProcessMesh.grid(dp=2), "dp: S(0)")
    return distribute(numbers(rows, H).requires_grad_(), by_rows), distribute(torch.arange(rows) % V, by_rows)


def head() -> DTensor:
    return distribute(numbers(V, H), Layout(ProcessMesh.grid(dp=2)))


OPS = ["swiglu", "chain", "cross-entropy", "of-products", "moved"]


def compiled_op(name: str, dynamic: bool | None) -> None:
    """For each size, outputs and gradients are the eager op's, on every rank."""
    torch._dynamo.reset()
    weight, ones = head(), distribute(numbers(H, H), Layout(ProcessMesh.grid(dp=2)))
    ops: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "swiglu": lambda x, y: swiglu(x, x),
        "chain": lambda x, y: swiglu(linear(x, ones), x),
        "cross-entropy": lambda x, y: cross_entropy(linear(x, weight), y),
        "of-products": lambda x, y: linear_cross_entropy(x, weight, y),
        "moved": lambda x, y: reshard(x, placements="dp: R"),
    }
    compiled = torch.compile(ops[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in ROWS:
        x, y = laid_rows(rows)
        found, expected = (run(x, y) for run in (compiled, ops[name]))
        assert found.shape == expected.shape and layout_of(found) == layout_of(expected)
        torch.testing.assert_close(found.to_local(), expected.to_local())
        upstream = torch.ones_like(expected)
        gradients = [torch.autograd.grad(each, x, upstream)[0] for each in (found, expected)]
        assert gradients[0].shape == x.shape
        torch.testing.assert_close(*(each.to_local() for each in gradients))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["unsaid", "dynamic"])
@pytest.mark.parametrize("name", OPS)
def test_an_op_is_compiled_anew_for_another_whole_shape(name: str, dynamic: bool | None, pool: Pool) -> None:
    pool.run(compiled_op, name, dynamic, ranks=2)


BLOCKS: dict[str, tuple[Any, Any, dict[str, int], dict[str, Any]]] = {
    "gpt-sequence": (GPT, GPTConfig, {"tp": 2}, {"sequence": True}),
    "llama-sequence": (Llama, LlamaConfig, {"tp": 2}, {"sequence": True}),
    "llama-context": (Llama, LlamaConfig, {"cp": 2}, {"context": "all_gather"}),
    "llama-ulysses": (Llama, LlamaConfig, {"cp": 2}, {"context": "ulysses"}),
}


def model_of(name: str) -> Any:
    kind, config, _, _ = BLOCKS[name]
    inner = {"intermediate_size": 24} if kind is Llama else {}
    model = kind(config(vocab_size=V, hidden_size=16, num_layers=1, num_heads=2, max_seq_len=16, **inner))
    initialize(model, seed=0)
    return model


def compiled_blocks(name: str, lengths: tuple[int, ...]) -> list[Tensor]:
    torch._dynamo.reset()
    _, _, axes, changed = BLOCKS[name]
    model, mesh = model_of(name), ProcessMesh.grid(**axes)
    plan = replace(model.parallel_plan(), **changed)
    parallelize(model, mesh, plan)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    found = []
    for length in lengths:
        laid = lay_out_batch(mesh, plan, tokens(length))
        logits = model(laid.tokens, positions=laid.positions)
        found.append(laid.as_read(to_global(logits.detach())))
        logits.to_local().sum().backward()
    return found


def tokens(length: int) -> Tensor:
    return torch.arange(4 * length).view(4, length) % V


@pytest.mark.exhaustive  # the sample has an op that is compiled anew
# From 8 to 7 the local length of rank 1 alone changes, from 7 to 6 that of rank 0 alone.
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        pytest.param("gpt-sequence", (8, 7), id="gpt-sequence-shorter-on-rank-1"),
        *(pytest.param(name, (8, 7, 6, 3), id=name) for name in BLOCKS),
    ],
)
def test_blocks_are_compiled_anew_for_another_length(name: str, lengths: tuple[int, ...], pool: Pool) -> None:
    for found in pool.run(compiled_blocks, name, lengths, ranks=2):
        for logits, length in zip(found, lengths, strict=True):
            torch.testing.assert_close(logits, model_of(name)(tokens(length)).detach(), rtol=0, atol=2e-6)
