"""Attention under torch.compile(fullgraph=True): one op forward and one backward, with the eager numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import KeyValueCache, attention, document_bounds
from weft.mesh import Layout
from weft.reshard import distribute

from tests.kernels.cases import TWO, ints, normal, upstream_of
from tests.support.pool import Pool

B, T, HEADS, D = 2, 7, 4, 4
IDS = ints(3, B, T).sort(-1).values
ORDER = ((5, 7), (0, 1), (3, 5), (1, 3))
KEY = torch.tensor(2**63 + 5, dtype=torch.uint64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": IDS},
    "bounds": {"documents": document_bounds(IDS)},
    "window-softcap-sinks": {"window": 3, "softcap": 0.7, "sinks": True},
    "dropout-in-order": {"dropout": 0.5, "dropout_key": KEY, "order": ORDER},
}


def tensors(sinks: bool) -> list[Tensor]:
    kv = [normal(B, T, 2 * D, seed=seed) for seed in (1, 2)]
    return [normal(B, T, HEADS * D), *kv, *[normal(HEADS, seed=3)] * sinks]


def run(leaves: list[Tensor], options: dict[str, Any]) -> Tensor:
    given = {name: each for name, each in options.items() if name != "sinks"}
    return attention(*leaves[:3], head_dim=D, sinks=leaves[3] if len(leaves) > 3 else None, **given)


def gradients(way: Any, leaves: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    output = way(leaves, options)
    upstream = upstream_of(output.shape).to(output.dtype)
    if isinstance(output, DTensor):
        upstream = distribute(upstream, Layout(TWO, "tp: S(2)"))
    found = [output, *torch.autograd.grad(output, leaves, upstream)]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def compiled_and_eager(leaves: list[Tensor], options: dict[str, Any]) -> None:
    """Compares values and gradients, and counts the ops of both graphs."""
    from torch._dynamo.backends.common import aot_autograd

    seen: Counter[str] = Counter()

    def counting(graph: Any, example: Any) -> Any:
        for node in graph.graph.nodes:
            name = str(node.target)
            if node.op == "call_function" and ("attention" in name or "softmax" in name or "bmm" in name):
                seen[name] += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=counting, bw_compiler=counting))
    found, expected = gradients(compiled, leaves, options), gradients(run, leaves, options)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert seen == {"weft.attention.default": 1, "weft.attention_backward.default": 1}


@pytest.mark.few(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_plain_tensors(options: dict[str, Any]) -> None:
    compiled_and_eager([x.requires_grad_() for x in tensors("sinks" in options)], options)


def on_mesh(name: str) -> None:
    options = dict(OPTIONS[name])
    if "documents" in options:
        options["documents"] = distribute(options["documents"], Layout(TWO))
    layouts = ("tp: S(2)", "tp: S(2)", "tp: S(2)", "tp: S(0)")
    given = zip(tensors("sinks" in options), layouts, strict=False)
    compiled_and_eager([distribute(x, Layout(TWO, text)).requires_grad_() for x, text in given], options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["documents", "window-softcap-sinks"])
def test_dtensors(name: str, pool: Pool) -> None:
    pool.run(on_mesh, name, ranks=2)


def test_fake_tensors_have_the_strides_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    real = gradients(run, [x.requires_grad_() for x in tensors(True)], {"softcap": 2.0})
    with mode:
        fake = gradients(run, [mode.from_tensor(x).requires_grad_() for x in tensors(True)], {"softcap": 2.0})
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


def test_opcheck() -> None:
    query, key, value, sinks = tensors(True)
    given = (query, key, value, IDS, None, sinks, D, True, None, 3, 0.7, 0.0, 0, None, None, None, None, None)
    torch.library.opcheck(torch.ops.weft.attention.default, given, test_utils=("test_schema", "test_faketensor"))
    output, lse = torch.ops.weft.attention.default(*given)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.weft.attention_backward.default, (output, output, lse, *given), test_utils=checks)


def test_a_cache_in_a_compiled_function() -> None:
    query, key, value = tensors(False)

    def read(cache: KeyValueCache) -> Tensor:
        with torch.no_grad():
            attention(query, key, value, head_dim=D, cache=cache)
            return attention(query[:, :1], key[:, :1], value[:, :1], head_dim=D, cache=cache)

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(read, backend="eager")(KeyValueCache(9)), read(KeyValueCache(9)))


@pytest.mark.exhaustive
def test_numbers_and_documents_of_a_graph_with_unknown_sizes() -> None:
    """A size which torch.compile does not know equals the documents' size, and such options are numbers."""

    def run(x: Tensor, window: int, softcap: float) -> Tensor:
        documents = document_bounds(torch.zeros(1, 12, dtype=torch.int64))
        return attention(x, x, x, head_dim=x.shape[-1] // 2, window=window, softcap=softcap, documents=documents)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    for width, window, softcap in ((8, 3, 1.5), (12, 4, 2.5), (20, 5, 0.5)):
        x = normal(1, 12, width)
        torch.testing.assert_close(compiled(x, window, softcap), run(x, window, softcap))
