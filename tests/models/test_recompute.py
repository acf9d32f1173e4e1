"""Recomputed blocks: the same bits, less saved memory, and the forward's collectives issued again."""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard, derive_key
from weft.models import GPTConfig, LlamaConfig, ParallelPlan, QwenConfig, initialize, parallelize
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, distribute, reshard

from tests.models.cases import whole

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=32
)
DROPPING = {"dropout": 0.2, "attention_dropout": 0.1}
KEY = derive_key(3, "dropout", 0)
KINDS = ["full", "selective"]
ONE = ProcessMesh.grid(dp=1)


FAMILIES = [
    QwenConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, version=3
    ),
    GPTConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=4, dropout=0.2, attention_dropout=0.1),
]


class Held(TorchDispatchMode):
    """Counts the bytes of all living storages that were computed in this mode."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then runs ops on local tensors, which this mode sees
        for each in tree_iter((args, kwargs)):
            self._see(each, 0)  # older than the mode, unless seen before
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            self._see(each, each.untyped_storage().nbytes() if isinstance(each, Tensor) else 0)
        return out

    def _see(self, each: object, nbytes: int) -> None:
        if isinstance(each, Tensor):
            self._storages.setdefault(StorageWeakRef(each.untyped_storage()), nbytes)

    def nbytes(self) -> int:
        return sum(nbytes for storage, nbytes in self._storages.items() if not storage.expired())


def make(config: ModelConfig, mesh: ProcessMesh, **plan: Any) -> Any:
    model = make_model(config)
    initialize(model, seed=3)
    parallelize(model, mesh, replace(model.parallel_plan(), **plan))
    return model


def batch(rows: int = 5, length: int = 9) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def step(model: nn.Module, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The loss and every gradient."""
    tokens, target = batch()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = cross_entropy(model(tokens, dropout_key=KEY), target)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "change", [{}, DROPPING, {"tie_embeddings": True, "attention_bias": True, "mlp_bias": True}], ids=str
)
def test_one_process_has_the_same_bits(kind: str, dtype: torch.dtype | None, change: dict[str, Any]) -> None:
    config = replace(CONFIG, **change)
    assert same_bits(step(make(config, ONE, recompute=kind), dtype), step(make(config, ONE), dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: type(config).__name__)
def test_every_familys_blocks_have_the_same_bits(config: ModelConfig, kind: str) -> None:
    assert same_bits(step(make(config, ONE, recompute=kind)), step(make(config, ONE)))


def block_holds(mesh: ProcessMesh, layout: Layout | None, *kinds: str, **plan: Any) -> list[int]:
    """By kind of recomputation: bytes kept by a block's forward for backward, without input and output."""
    ran = [(held, y) for held, y in (forward_of_block(mesh, layout, recompute=kind, **plan) for kind in kinds)]
    if layout is not None:
        time.sleep(0.3)  # gloo's thread frees a sent tensor a moment after the wait
    return [held.nbytes() - y.untyped_storage().nbytes() for held, y in ran]


def forward_of_block(mesh: ProcessMesh, layout: Layout | None, **plan: Any) -> tuple[Held, Tensor]:
    """The memory held after a block's forward, and the output on this rank, which keeps the graph alive."""
    block = make(CONFIG, mesh, **plan).layers[0]
    x = torch.randn(2, 8, CONFIG.hidden_size)
    x = (x if layout is None else distribute(x, layout)).requires_grad_()
    half = CONFIG.head_dim // 2
    cos, sin = torch.ones(8, half), torch.zeros(8, half)
    with Held() as held:
        y = block(x, cos, sin)
    return held, y.to_local() if isinstance(y, DTensor) else y


def test_a_block_keeps_its_products_or_its_input_alone() -> None:
    none, selective, full = block_holds(ONE, None, "none", "selective", "full")
    tokens, H, inside = 2 * 8, CONFIG.hidden_size, CONFIG.intermediate_size
    # q, k and v, the attention's output, gate and up; down's output is needed by nothing.
    widths = H + 2 * 16 + H + 2 * inside
    assert full == 0
    assert selective == tokens * widths * 4 + 4  # and a scalar in place of down's output
    assert none > 1.15 * selective  # the residual streams, and a few numbers a row


def laid_out_block(sequence: bool) -> list[int]:
    mesh = ProcessMesh.grid(tp=2)
    layout = Layout(mesh, {"tp": Shard(1)} if sequence else {})
    return block_holds(mesh, layout, "none", "selective", "full", sequence=sequence)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_on_two_ranks_keeps_its_products_and_what_it_was_sent(sequence: bool, pool) -> None:
    tokens, H, inside = 2 * 8, CONFIG.hidden_size, CONFIG.intermediate_size
    cut = (H + 2 * 16 + 2 * inside) // 2  # q, k and v, gate and up
    received = 2 * H + H // 2 if sequence else H  # two gathered inputs and a scattered sum; an all-reduced sum
    for none, selective, full in pool.run(laid_out_block, sequence, ranks=2):
        assert full == 0
        assert 0 <= selective - tokens * (cut + received) * 4 <= 16  # scalars, in place of unread values
        assert none > selective


def kinds(count: CollectiveCount) -> Counter[str]:
    return Counter(each.kind for each in count.take_each())


def on_a_grid(
    change: dict[str, Any], sequence: bool, bucket_bytes: int
) -> list[tuple[list[Tensor], list[Counter[str]]]]:
    """Loss and gradients, and the collectives of forward and backward, for each kind."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    results = []
    for kind in ("none", *KINDS):
        model = make(replace(CONFIG, **change), mesh, sequence=sequence, recompute=kind)
        sync = GradientSync(model, bucket_bytes=bucket_bytes)
        tokens, target = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in batch())
        with CollectiveCount() as count:
            loss = reshard(cross_entropy(model(tokens, dropout_key=KEY), target, denominator=float(target.numel())))
            issued = [kinds(count)]
            loss.backward()
            issued.append(kinds(count))
            sync.wait()
        results.append(([whole(loss), *(whole(each.grad) for each in model.parameters())], issued))
    return results


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", [{}, {**DROPPING, "tie_embeddings": True}], ids=["plain", "dropout-tied"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("bucket_bytes", [2**20, 3_000], ids=["one-bucket", "overlapped"])
def test_paddlenlp_9412_recompute_full_repeats_the_forwards_collectives_and_selective_none(
    change: dict[str, Any], sequence: bool, bucket_bytes: int, pool
) -> None:
    again = Counter({"all-gather": 2, "reduce-scatter": 1} if sequence else {"all-reduce": 1})  # of a block
    for none, full, selective in pool.run(on_a_grid, change, sequence, bucket_bytes):
        (expected, (forward, backward)) = none
        for found, (same_forward, _) in (full, selective):
            assert same_bits(found, expected)
            assert same_forward == forward
        assert selective[1][1] == backward
        # Recomputation stops at the last value needed in backward: before the reduction at the end of a block.
        assert full[1][1] - backward == Counter({kind: 2 * n for kind, n in again.items()})


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_each_block_is_compiled_to_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    config = replace(CONFIG, num_layers=1)
    model = make(config, ONE, recompute=kind)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for found, expected in zip(step(model), step(make(config, ONE)), strict=True):
        torch.testing.assert_close(found, expected)


def compiled_on_a_grid(
    kind: str, change: dict[str, Any], context: str | None
) -> list[tuple[list[Tensor], Counter[str], int]]:
    """The eager, then the compiled model: loss and gradients, collectives of forward and backward, number of graphs."""
    torch._dynamo.reset()
    key = torch.tensor(KEY, dtype=torch.uint64)
    mesh = ProcessMesh.grid(tp=2) if context is None else ProcessMesh.grid(cp=2)
    results = []
    for compiled in (False, True):
        counters.clear()
        # A compiled "full" block issues an additional collective on each rank.
        compiles = compiled and (kind == "full" or dist.get_rank() == 0)
        # Under the dispatch mode of "selective" the profiler sees each collective twice.
        recompute = "none" if kind == "selective" and not compiles else kind
        config = replace(CONFIG, **change, num_layers=1)
        model = make(config, mesh, sequence=True, recompute=recompute, context=context)
        for layer in model.layers if compiles else ():
            layer.compile(fullgraph=True, backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            layout = Layout(mesh, {"cp": Shard(1)} if context else {})
            tokens, target = (distribute(each, layout) for each in batch())
            positions = distribute(torch.arange(tokens.shape[1]).expand(tokens.shape), layout)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                loss = reshard(cross_entropy(model(tokens, positions=positions, dropout_key=key), target))
                loss.backward()
        issued = Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))
        gradients = [whole(each.grad) for each in model.parameters()]
        results.append(([whole(loss), *gradients], issued, counters["stats"]["unique_graphs"]))
    return results


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("change", "context"),
    [
        pytest.param({}, None, id="plain"),
        pytest.param(DROPPING, None, id="dropout", marks=pytest.mark.exhaustive),
        pytest.param(DROPPING, "all_gather", id="context", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_on_a_mesh_is_compiled_to_one_graph(
    kind: str, change: dict[str, Any], context: str | None, pool
) -> None:
    for rank, (plain, compiled) in enumerate(pool.run(compiled_on_a_grid, kind, change, context, ranks=2)):
        for found, expected in zip(compiled[0], plain[0], strict=True):
            torch.testing.assert_close(found, expected)
        # A compiled "full" block is recomputed to the end of the block, with the last reduction; without "full", or
        # with dropout's key as a tensor, compiled and eager blocks issue the same.
        last = {} if change or kind == "selective" else {"c10d::alltoall_base_": 1}
        assert compiled[1] == plain[1] + Counter(last)
        assert compiled[2] == (kind == "full" or rank == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_may_come_twice(kind: str) -> None:
    tokens, target = batch()
    model, once = make(CONFIG, ONE, recompute=kind), step(make(CONFIG, ONE))
    loss = cross_entropy(model(tokens, dropout_key=KEY), target)
    loss.backward(retain_graph=True)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), once[1:], strict=True):
        assert torch.equal(parameter.grad, 2 * gradient)


def test_without_gradients_nothing_is_kept_or_computed_again() -> None:
    model, tokens = make(CONFIG, ONE, recompute="selective").eval(), batch()[0]
    with torch.no_grad():
        assert torch.equal(model(tokens), make(CONFIG, ONE).eval()(tokens))
        model(tokens[:, :4], cache=model.make_cache(9))


def test_a_copy_computes_with_its_own_parameters() -> None:
    model = make(CONFIG, ONE, recompute="full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.5)
    found, expected = step(other), step(model)
    assert not torch.equal(found[0], expected[0])
    assert not torch.equal(found[-2], expected[-2])


class Users(nn.Module):
    """A model of torch's own modules, whose blocks are named otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.encoder:
            x = x + block(x)
        return x


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_own_blocks_are_named_by_the_plan(kind: str) -> None:
    x = torch.randn(3, 8)
    models = Users(), parallelize(Users(), ONE, ParallelPlan(recompute=kind, blocks=("encoder.*",)))
    found = []
    for model in models:
        torch.manual_seed(1)  # torch's dropout draws from torch's generator, which the recomputation sets back
        model(x).square().sum().backward()
        found.append([each.grad for each in model.parameters()])
    assert same_bits(*found)
    with pytest.raises(ValueError, match=r"blocks 'layers\.\*' match no module of Users; .* nearest names are encoder"):
        parallelize(Users(), ONE, ParallelPlan(recompute=kind))


def test_a_product_that_is_changed_in_place_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    model = parallelize(Changing(), ONE, ParallelPlan(recompute="selective"))
    with pytest.raises(RuntimeError, match=r"shape \(3, 4\), which was changed in place since; .* recompute='full'"):
        model(torch.randn(3, 4)).sum().backward()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute is 'some'; it must be one of 'none', 'selective', 'full'"):
        ParallelPlan(recompute="some")  # type: ignore[arg-type]
