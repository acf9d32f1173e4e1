"""The communication of a context-parallel block: its amount, its number, and the work that it overlaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import GPT, GPTConfig, Llama, LlamaConfig, Qwen, QwenConfig, initialize, parallelize
from weft.reshard import distribute

from tests.support.collectives import Collectives
from tests.support.events import Events

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4, max_seq_len=64
)


def made() -> Llama:
    model = Llama(CONFIG)
    initialize(model, seed=3)
    return model


def taken(seen: Collectives) -> list[tuple[str, int]]:
    """Kinds of collectives since the last call, with the bytes that each received from further ranks."""
    found = list(zip(seen.kinds, seen.nbytes, strict=True))
    seen.kinds.clear()
    seen.nbytes.clear()
    return found


def one_block(mesh: dict[str, int], kind: str) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    grid = ProcessMesh.grid(**mesh)
    model = made()
    parallelize(model, grid, replace(model.parallel_plan(), context=kind))
    stream = Layout(grid, {"cp": Shard(1)})
    x, upstream = (distribute(torch.randn(2, 16, CONFIG.hidden_size), stream) for _ in range(2))
    cos, sin = (distribute(torch.ones(16, CONFIG.head_dim // 2), Layout(grid, {"cp": Shard(0)})) for _ in range(2))
    with Collectives() as seen:
        y = model.layers[0](x.requires_grad_(), cos, sin)
        forward = taken(seen)
        y.backward(upstream)
        return forward, taken(seen)


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_block_gathers_keys_and_values_once_and_scatters_their_gradients_once(cp: int, pool: Any) -> None:
    gathered = 2 * 2 * 16 * CONFIG.num_kv_heads * CONFIG.head_dim * 4  # keys and values, B, T, their width, bytes
    for forward, backward in pool.run(one_block, {"cp": cp}, "all_gather", ranks=cp):
        from_others = gathered * (cp - 1) // cp
        assert forward == [("all-gather", from_others)]
        assert backward == [("reduce-scatter", from_others)]


def block_events(family: str, recompute: str) -> tuple[list[str], list[str]]:
    """A block's starts and waits of collectives, and its work on queries, in forward and in backward."""
    grid = ProcessMesh.grid(cp=2)
    rope: tuple[DTensor, ...] = ()
    model: Any
    if family == "gpt":
        model = GPT(GPTConfig(vocab_size=31, hidden_size=32, num_layers=1, num_heads=4, max_seq_len=16))
    else:
        window: dict[str, Any] = {"sliding_window": 3, "sliding_layers": (0,)} if family == "window" else {}
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 4}
        model = Qwen(QwenConfig(version=2 if window else 3, vocab_size=31, **sizes, **window))
        angles = torch.ones(16, model.config.head_dim // 2)
        rope = tuple(distribute(angles, Layout(grid, {"cp": Shard(0)})) for _ in range(2))
    initialize(model, seed=3)
    parallelize(model, grid, replace(model.parallel_plan(), context="all_gather", recompute=recompute))
    stream = Layout(grid, {"cp": Shard(1)})
    x, upstream = (distribute(torch.ones(2, 16, 32), stream) for _ in range(2))
    q_proj = model.get_submodule("h.0.attn.q_proj" if family == "gpt" else "layers.0.self_attn.q_proj")
    with Events() as seen:
        q_proj.register_forward_hook(lambda *_: seen.events.append("queries"))
        q_proj.weight.register_post_accumulate_grad_hook(
            lambda _: seen.events.append("gradient of the queries' weight")
        )
        y = model.blocks[0](x.requires_grad_(), *rope)
        forward = list(seen.events)
        seen.events.clear()
        y.backward(upstream)
        return forward, seen.events


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("qwen", "none"),
        pytest.param("gpt", "none", marks=pytest.mark.exhaustive),
        pytest.param("window", "none", marks=pytest.mark.exhaustive),
        pytest.param("qwen", "selective", marks=pytest.mark.exhaustive),
        pytest.param("qwen", "full", marks=pytest.mark.exhaustive),
    ],
)
def test_queries_are_computed_while_keys_and_values_travel(family: str, recompute: str, pool: Any) -> None:
    forward = ["all-gather", "queries", "waited"]
    again = {"none": [], "selective": ["queries"], "full": forward}[recompute]
    for seen in pool.run(block_events, family, recompute, ranks=2):
        assert seen[0] == forward
        assert seen[1] == [*again, "reduce-scatter", "gradient of the queries' weight", "waited"]


def compiled_events(recompute: str) -> list[str]:
    """A compiled block's started transfers, products and waits, in a forward and a backward."""
    torch._dynamo.reset()
    grid = ProcessMesh.grid(cp=2)
    model = made()
    parallelize(model, grid, replace(model.parallel_plan(), context="all_gather", recompute=recompute))
    stream = Layout(grid, {"cp": Shard(1)})
    x, upstream = (distribute(torch.ones(2, 16, CONFIG.hidden_size), stream) for _ in range(2))
    rope = [distribute(torch.ones(16, CONFIG.head_dim // 2), Layout(grid, {"cp": Shard(0)})) for _ in range(2)]
    block = model.layers[0]
    block.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):  # it is compiled, and then seen
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            block(x.requires_grad_(), *rope).backward(upstream)
    named = {"weft::begin_reshard": "started", "weft::finish_reshard": "waited", "aten::mm": "product"}
    events = sorted(seen.events(), key=lambda event: event.time_range.start)
    return [named[event.name] for event in events if event.name in named]


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_queries_are_computed_while_keys_and_values_travel_in_a_compiled_block(recompute: str, pool: Any) -> None:
    for events in pool.run(compiled_events, recompute, ranks=2):
        starts, ends = ([i for i, event in enumerate(events) if event == what] for what in ("started", "waited"))
        between = [events[start:end].count("product") for start, end in zip(starts, ends, strict=True)]
        assert between == [1, 2]  # the queries; their gradients


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_ulysses_block_exchanges_twice_each_way(cp: int, pool: Any) -> None:
    width = CONFIG.num_heads * CONFIG.head_dim
    kv_width = CONFIG.num_kv_heads * CONFIG.head_dim
    arrives = [2 * 16 * w * 4 // cp * (cp - 1) // cp for w in (width + 2 * kv_width, width)]  # all but this rank's own
    for forward, backward in pool.run(one_block, {"cp": cp}, "ulysses", ranks=cp):
        assert forward == [("all-to-all", nbytes) for nbytes in arrives]
        assert backward == [("all-to-all", nbytes) for nbytes in reversed(arrives)]


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_beside_tensor_parallelism_a_block_has_those_and_its_all_reduces(kind: str, pool: Any) -> None:
    own = {"all_gather": [{"all-gather": 1}, {"reduce-scatter": 1}], "ulysses": [{"all-to-all": 2}] * 2}[kind]
    for phases in pool.run(one_block, {"cp": 2, "tp": 2}, kind, ranks=4):
        for phase, its in zip(phases, own, strict=True):
            assert Counter(name for name, _ in phase) == Counter({"all-reduce": 2, **its})
