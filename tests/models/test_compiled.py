"""Models under torch.compile: a graph per block, or a graph for the model, and the values of the uncompiled model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key
from weft.models import GPTConfig, Llama, LlamaConfig, QwenConfig, initialize, lay_out_batch, parallelize
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.parallel.pipeline.step import Microbatch
from weft.models.step.find_gradients import find_gradients
from weft.reshard import GradientSync, layout_of, reshard, to_global

from tests.support.pool import Pool
from tests.support.sample import number_of

SIZES: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4}
CONFIG = LlamaConfig(**SIZES, num_kv_heads=2, attention_bias=True)
SHORT = replace(CONFIG, num_layers=1)
BATCH, TOKENS = 4, 6


def by_the_block(model: nn.Module, backend: str) -> Callable[..., Tensor]:
    for layer in model.blocks:  # type: ignore[union-attr]
        layer.compile(fullgraph=True, backend=backend)
    return model


def whole(model: nn.Module, backend: str) -> Callable[..., Tensor]:
    return torch.compile(model, fullgraph=True, backend=backend)


WAYS = {"block": by_the_block, "model": whole}
# Blocks alone are compiled by test_recompute.py and test_zero_blocks.py, on one process and on a mesh.
EACH_WAY = [pytest.param("block", marks=pytest.mark.exhaustive), pytest.param("model")]


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, CONFIG.vocab_size, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def key(step: int) -> Tensor:
    return torch.tensor(derive_key(0, "dropout", step), dtype=torch.uint64)


def stepped(
    model: nn.Module, forward: Callable[..., Tensor], laid: Callable[[Tensor], Tensor], step: int
) -> list[Tensor]:
    """The loss and the gradients of a step, without an update."""
    tokens, target = map(laid, batch(step))
    model.zero_grad()
    loss = cross_entropy(forward(tokens, dropout_key=key(step)), target)
    loss = reshard(loss) if isinstance(loss, DTensor) else loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def collectives_of(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Counter[str]]:
    """The result of `run`, and the collectives that it starts, by name.

    Counted by the profiler: torch.compile does not compile under a dispatch mode, which counts in other tests.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = run()
    return found, Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, DTensor) or isinstance(other, DTensor):
            assert layout_of(one) == layout_of(other)
            one, other = one.to_local(), other.to_local()
        torch.testing.assert_close(one, other)


def compiles(
    way: str,
    backend: str,
    config: ModelConfig,
    mesh: ProcessMesh | None,
    sequence: bool,
    context: Literal["all_gather", "ulysses"] | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """The compiled model has the eager model's values and number of collectives, and is not compiled again.

    ranks: which ranks compile, each for itself; all where None. The rest take the same steps uncompiled.
    """
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = make_model(config), make_model(config)
    laid: Callable[[Tensor], Any] = lambda tensor: tensor  # noqa: E731
    for model in (eager, compiled):
        initialize(model, seed=0)
        if mesh is not None:
            plan = replace(model.parallel_plan(), sequence=sequence, context=context)
            parallelize(model, mesh, plan)
    options = {}
    if mesh is not None:
        laid = lambda tensor: lay_out_batch(mesh, plan, tensor).tokens  # noqa: E731
        options = {"positions": lay_out_batch(mesh, plan, batch(0)[0]).positions}
    here = ranks is None or dist.get_rank() in ranks
    forward = WAYS[way](compiled, backend) if here else compiled
    for step in range(3):
        if step == 2:
            made = counters["stats"]["unique_graphs"]
        wanted, expected = collectives_of(partial(stepped, eager, partial(eager, **options), laid, step))
        found, issued = collectives_of(partial(stepped, compiled, partial(forward, **options), laid, step))
        same(found, wanted)
        assert issued == expected
    assert counters["stats"]["unique_graphs"] == made
    assert (made > 0) == here


Ranks = Sequence[int] | None


def on_ranks(way: str, backend: str, config: ModelConfig, sequence: bool, ranks: Ranks = None) -> None:
    compiles(way, backend, config, ProcessMesh.grid(dp=2, tp=2), sequence, ranks=ranks)


def on_context(config: ModelConfig, context: Literal["all_gather", "ulysses"], ranks: Ranks) -> None:
    compiles("block", "aot_eager", config, ProcessMesh.grid(cp=2, tp=2), True, context, ranks)


def compiling(config: ModelConfig, case: object) -> Ranks:
    """The ranks that compile: all four for the plain model, else one, chosen by the case, as compiling is slow."""
    return None if config is CONFIG else [number_of(case) % 4]


CONFIGS = [
    pytest.param(SHORT, id="one-layer", marks=pytest.mark.exhaustive),  # dropout-tied has one layer, too
    pytest.param(CONFIG, id="plain", marks=pytest.mark.exhaustive),
    pytest.param(
        replace(CONFIG, dropout=0.3, attention_dropout=0.2, tie_embeddings=True, num_layers=1), id="dropout-tied"
    ),
    pytest.param(QwenConfig(**SIZES, sliding_window=2, sliding_layers=(1,)), id="qwen", marks=pytest.mark.exhaustive),
    pytest.param(GPTConfig(**SIZES, embedding_dropout=0.3, dropout=0.1), id="gpt", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("way", EACH_WAY)
def test_a_model_compiles_to_one_graph(way: str, config: ModelConfig) -> None:
    compiles(way, "aot_eager", config, None, False)


@pytest.mark.exhaustive  # a minute of all cores each; the sample has the model on one process
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("config", CONFIGS[1:])
@pytest.mark.parametrize("way", WAYS)
def test_a_parallel_model_compiles_to_one_graph(pool: Pool, way: str, config: ModelConfig, sequence: bool) -> None:
    ranks = compiling(config, (way, type(config), sequence))
    pool.run(on_ranks, way, "aot_eager", config, sequence, ranks, ranks=4)


@pytest.mark.exhaustive
def test_inductor_takes_a_block(pool: Pool) -> None:
    pool.run(on_ranks, "block", "inductor", CONFIG, True, ranks=4)


def packed_rows(mesh: ProcessMesh | None) -> None:
    """Documents and positions are operands of the graph, which is compiled once."""
    torch._dynamo.reset()
    counters.clear()
    model = Llama(SHORT)
    initialize(model, seed=0)
    laid: Callable[[Tensor], Any] = lambda tensor: tensor  # noqa: E731
    if mesh is not None:
        parallelize(model, mesh, model.parallel_plan())
        laid = lambda tensor: lay_out_batch(mesh, model.parallel_plan(), tensor).tokens  # noqa: E731
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = laid(batch(0)[0])
    for cut in (2, 5):
        documents = (torch.arange(TOKENS) >= cut).long().expand(BATCH, -1)
        positions = torch.arange(TOKENS) - cut * documents
        given = {"documents": laid(documents.contiguous()), "positions": laid(positions.contiguous())}
        same([compiled(tokens, **given)], [model(tokens, **given)])
    assert counters["stats"]["unique_graphs"] == 1


def packed_rows_on_ranks() -> None:
    packed_rows(ProcessMesh.grid(dp=2, tp=2))


@pytest.mark.exhaustive  # the sample has the model without packed rows
def test_packed_rows_compile_to_one_graph() -> None:
    packed_rows(None)


@pytest.mark.exhaustive
def test_packed_rows_compile_to_one_graph_on_ranks(pool: Pool) -> None:
    pool.run(packed_rows_on_ranks, ranks=4)


@pytest.mark.exhaustive
def test_a_key_that_is_an_int_is_compiled_in_and_says_so() -> None:
    torch._dynamo.reset()
    model = Llama(replace(SHORT, dropout=0.3))
    initialize(model, seed=0)
    tokens, _ = batch(0)
    with pytest.raises(Exception, match=r"torch\.tensor\(derive_key"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(tokens, dropout_key=derive_key(0, "dropout"))


@pytest.mark.exhaustive  # half a minute each
@pytest.mark.parametrize("config", CONFIGS[1:])
@pytest.mark.parametrize("context", ["all_gather", "ulysses"])
def test_a_block_compiles_under_context_parallelism(context: str, config: ModelConfig, pool: Pool) -> None:
    heads = {"num_heads": 8} if isinstance(config, GPTConfig) else {"num_heads": 8, "num_kv_heads": 4}
    ranks = compiling(config, (context, type(config)))
    pool.run(on_context, replace(config, **heads), context, ranks)  # type: ignore[arg-type]


def whole_on_context(context: Literal["all_gather", "ulysses"]) -> None:
    config = replace(CONFIG, num_heads=8, num_kv_heads=4)
    compiles("model", "aot_eager", config, ProcessMesh.grid(cp=2), False, context)


def gradients_where(ranks: Sequence[int], zero: int) -> list[float]:
    """The norm of each gradient and of all together, where the given ranks compile their blocks and the rest do not."""
    torch._dynamo.reset()
    mesh, model = ProcessMesh.grid(dp=2), Llama(CONFIG)
    initialize(model, seed=0)
    plan = replace(model.parallel_plan(), zero=zero)
    parallelize(model, mesh, plan)
    if dist.get_rank() in ranks:
        by_the_block(model, "aot_eager")
    sync, (tokens, targets) = GradientSync(model), batch(0)
    laid = lay_out_batch(mesh, plan, tokens, targets)
    assert laid.targets is not None, "they were given"
    microbatch = Microbatch(args=(laid.tokens,), kwargs={}, targets=laid.targets)
    found = find_gradients(
        model, partial(cross_entropy, denominator=float(BATCH * TOKENS)), [microbatch], sync, clip_norm=1e9
    )
    assert found.grad_norm is not None, "it was asked for"
    return [found.grad_norm.item(), *(to_global(each.grad).norm().item() for each in model.parameters())]


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_are_the_same_where_one_rank_compiles(zero: int, pool: Pool) -> None:
    alone, *_ = pool.run(gradients_where, (), zero, ranks=2)
    for rank in range(2):
        for found in pool.run(gradients_where, (rank,), zero, ranks=2):
            assert found == pytest.approx(alone, rel=1e-5, abs=1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", ["all_gather", "ulysses"])
def test_a_whole_model_compiles_under_context_parallelism(context: str, pool: Pool) -> None:
    pool.run(whole_on_context, context, ranks=2)
