"""Context parallelism, tokens sharded over "cp": the loss and gradients of one process, by the fewest collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.kernels.attention import options, stretches
from weft.mesh import Layout, ProcessMesh, Shard, derive_key
from weft.models import Llama, LlamaConfig, ParallelPlan, initialize, lay_out_batch, parallelize
from weft.models.parallel.packed.order import balanced_order
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, distribute, reshard, to_global

from tests.models.cases import whole
from tests.support.collectives import Collectives

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=8, num_kv_heads=4, max_seq_len=64
)
KEY = derive_key(3, "dropout", 0)
KINDS = ["all_gather", "ulysses"]


def make(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def batch(length: int, packed: bool = False, rows: int = 3) -> dict[str, Any]:
    """Tokens and targets [rows, length], a third of the targets ignored. packed: documents with own positions."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length), generator=generator)
    targets = torch.randint(0, CONFIG.vocab_size, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = -100
    made: dict[str, Any] = {"tokens": tokens, "targets": targets}
    if packed:
        starts = torch.rand(rows, length, generator=generator) < 0.2
        starts[:, 0] = True
        places = torch.arange(length).expand(rows, length)
        made["positions"] = places - torch.where(starts, places, 0).cummax(-1).values
        made["documents"] = starts.long().cumsum(-1)
    return made


def axes(mesh: dict[str, int]) -> ProcessMesh:
    return ProcessMesh.grid(**mesh)


def stepped(model: Llama, tokens: Tensor, targets: Tensor, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = cross_entropy(model(tokens, KEY, **inputs), targets)
    loss = reshard(loss) if isinstance(loss, DTensor) else loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def on_mesh(
    mesh: dict[str, int], config: LlamaConfig, plan: dict[str, Any], given: dict[str, Any], natural: bool
) -> Any:
    """Loss and gradients on a mesh. natural: tokens are distributed in reading order."""
    grid = axes(mesh)
    model = make(config)
    chosen = replace(model.parallel_plan(), **plan)
    parallelize(model, grid, chosen)
    sync = GradientSync(model)
    with Collectives() as seen, CollectiveCount() as count:
        if natural:
            layout = Layout(grid, {"dp": Shard(0), "cp": Shard(1)} if "dp" in mesh else {"cp": Shard(1)})
            shape = given["tokens"].shape
            given = {"positions": torch.arange(shape[1]).expand(shape), **given}
            inputs = {name: distribute(tensor, layout) for name, tensor in given.items()}
        else:
            laid = lay_out_batch(grid, chosen, **given)
            inputs = {
                "tokens": laid.tokens,
                "targets": laid.targets,
                "positions": laid.positions,
                "documents": laid.documents,
            }
        loss, _ = stepped(model, **inputs)
        sync.wait()
    assert Counter(seen.kinds) == count.issued  # none was issued inside a DTensor's own ops
    return whole(loss), {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def check(
    pool: Any, mesh: dict[str, int], config: LlamaConfig, plan: dict[str, Any], given: Any, natural: bool = False
) -> None:
    """Compares with one process: the loss within 1e-6, each gradient within 1e-5 of its largest element."""
    expected, gradients = stepped(make(config), **given)
    for loss, found in pool.run(on_mesh, mesh, config, plan, given, natural, ranks=axes(mesh).size):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in gradients.items():
            allowed = 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(
                found[name], gradient, rtol=0, atol=allowed, msg=lambda text, n=name: f"{n}: {text}"
            )


MESHES = {
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "dp2-cp2": {"dp": 2, "cp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "dp2-cp2-tp2": {"dp": 2, "cp": 2, "tp": 2},
    "tp2-cp2": {"tp": 2, "cp": 2},
}
DROPS = {"dropout": 0.2, "attention_dropout": 0.1}


@pytest.mark.parametrize(
    ("mesh", "kind", "change", "plan", "length", "packed", "natural"),
    [
        pytest.param("cp2-tp2", "all_gather", {}, {"sequence": True}, 19, True, False, id="gather-sequence-packed"),
        # Masks are drawn for long; the sample has those of test_packed_context.py.
        *(
            pytest.param(
                "cp2-tp2", kind, DROPS, {"sequence": True}, 19, True, False,
                id=f"{word}-sequence-dropout-packed", marks=pytest.mark.exhaustive,
            )
            for kind, word in (("all_gather", "gather"), ("ulysses", "ulysses"))
        ),
        pytest.param("dp2-cp2", "all_gather", {}, {}, 16, False, True, id="gather-natural"),
        pytest.param("cp4", "all_gather", {"num_kv_heads": 1}, {}, 16, False, False, id="gather-one-key-head"),
    ],
)  # fmt: skip
def test_anchor_28_context_parallel_has_the_loss_and_gradients_of_one_process(
    mesh: str, kind: str, change: Any, plan: Any, length: int, packed: bool, natural: bool, pool: Any
) -> None:
    check(pool, MESHES[mesh], replace(CONFIG, **change), {"context": kind, **plan}, batch(length, packed), natural)


def table() -> list[Any]:
    """Every mesh and kind, with sequence parallelism and without, under each option, laid out and natural in turn."""
    tied = {"tie_embeddings": True, "attention_bias": True}
    options = [({}, 16, False, True), (DROPS, 16, True, False), (tied, 13, False, False), ({}, 9, True, True)]
    cases = []
    for name, mesh in MESHES.items():
        for kind in KINDS:
            for sequence in (False, True) if "tp" in mesh else (False,):
                for change, length, packed, natural in options:
                    plan = {"sequence": sequence, "loss_parallel": length != 13}
                    words = (
                        ["sequence"] * sequence
                        + ["packed"] * packed
                        + ["options"] * bool(change)
                        + ["natural"] * natural
                    )
                    made = "-".join([name, kind, str(length), *words])
                    cases.append(pytest.param(name, kind, change, plan, length, packed, natural, id=made))
    for kind in KINDS:  # some ranks have no tokens, or few
        few = [pytest.param("cp4", kind, DROPS, {}, n, True, False, id=f"cp4-{kind}-{n}") for n in (1, 3, 5, 6)]
        cases += few
    few_heads = {**DROPS, "num_kv_heads": 1}
    for sequence in (False, True):  # each key head lies on several tp ranks
        plan = {"sequence": sequence}
        cases.append(
            pytest.param("cp2-tp2", "all_gather", few_heads, plan, 13, True, False, id=f"few-heads-{sequence}")
        )
    for kind, again in product(KINDS, ("full", "selective")):
        plan = {"sequence": True, "recompute": again}
        cases.append(pytest.param("cp2-tp2", kind, DROPS, plan, 16, True, False, id=f"{kind}-recompute-{again}"))
    return cases


@pytest.mark.exhaustive  # the tests of anchor 28 are its sample
@pytest.mark.parametrize(("mesh", "kind", "change", "plan", "length", "packed", "natural"), table())
def test_every_mesh_has_the_loss_and_gradients_of_one_process(
    mesh: str, kind: str, change: Any, plan: Any, length: int, packed: bool, natural: bool, pool: Any
) -> None:
    check(pool, MESHES[mesh], replace(CONFIG, **change), {"context": kind, **plan}, batch(length, packed), natural)


def scores(cp: int, length: int, natural: bool) -> int:
    """The attention scores that this rank's queries see in a forward, for one head and row."""
    grid = ProcessMesh.grid(cp=cp)
    model = make(replace(CONFIG, num_layers=1))
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    tokens = torch.zeros(1, length, dtype=torch.long)
    laid = lay_out_batch(grid, plan, tokens)
    count = 0
    fused_calls_of = stretches.fused_calls_of

    def counting(seen: Tensor, *rest: Any) -> Any:
        nonlocal count
        count += int((seen[..., 1] - seen[..., 0]).sum())
        return fused_calls_of(seen, *rest)

    stretches.fused_calls_of = counting
    options._cached_fused_calls.cache_clear()
    try:
        if natural:
            places = torch.arange(length).expand(1, length)
            layout = Layout(grid, {"cp": Shard(1)})
            model(distribute(tokens, layout), positions=distribute(places, layout))
        else:
            model(laid.tokens, positions=laid.positions)
    finally:
        stretches.fused_calls_of = fused_calls_of
    return count


def test_causal_work_is_even_over_the_ranks(pool: Any) -> None:
    length, cp, run = 32, 4, 4  # a rank has two runs of 4 queries, after i * 4 and (7 - i) * 4 keys
    triangles = run * (run + 1)  # of both runs
    assert pool.run(scores, cp, length, False, ranks=cp) == [run * run * (2 * cp - 1) + triangles] * cp
    natural = [2 * run * 2 * run * i + run * (2 * run + 1) for i in range(cp)]
    assert pool.run(scores, cp, length, True, ranks=cp) == natural


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 16, 17, 31, 48])
def test_the_balanced_order_has_each_token_once_and_even_work(tokens: int, parts: int) -> None:
    order = balanced_order(tokens, parts)
    lying = [token for start, stop in order for token in range(start, stop)]
    assert sorted(lying) == list(range(tokens))
    size = -(-tokens // parts)
    work = [sum(token + 1 for token in lying[part * size : (part + 1) * size]) for part in range(parts)]
    if tokens % (2 * parts) == 0:
        assert len(set(work)) <= 1
    elif tokens % parts == 0:
        assert max(work) - min(work) <= tokens


def test_heads_that_ulysses_cannot_cut_are_refused_with_the_degrees_that_work() -> None:
    model = make()
    plan = replace(model.parallel_plan(), context="ulysses")
    layer = r"layers\.0\.self_attn"
    with pytest.raises(
        ValueError, match=rf"tp x cp = 1 x 8, .* {layer}\.k_proj 4 and {layer}\.v_proj 4; cp that work: 1, 2, 4;"
    ):
        parallelize(model, ProcessMesh.grid(cp=8), plan)
    with pytest.raises(ValueError, match=r"tp x cp = 2 x 4, .*; cp that work: 1, 2; context 'all_gather' takes any$"):
        parallelize(model, ProcessMesh.grid(cp=4, tp=2), plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"context is 'ring'; it must be one of 'all_gather', 'ulysses' or None"):
        ParallelPlan(context="ring")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Linear has no DotProductAttention"):
        parallelize(torch.nn.Linear(2, 2), ProcessMesh.grid(cp=2), ParallelPlan(context="ulysses"))


class Wrapper(torch.nn.Module):
    """A user's module around a model, which passes its arguments on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs)


def wrapped(merged: bool) -> Tensor:
    grid = ProcessMesh.grid(cp=2)
    model = Wrapper()
    own = replace(model.inner.parallel_plan(), context="all_gather")
    tensor = {f"inner.{pattern}": style for pattern, style in own.tensor.items()}
    whole_plan = ParallelPlan(tensor=tensor, context="all_gather")
    parallelize(model, grid, ParallelPlan.merge({"": ParallelPlan(), "inner": own}) if merged else whole_plan)
    laid = lay_out_batch(grid, own, batch(8)["tokens"])
    return laid.as_read(to_global(model(laid.tokens, KEY, positions=laid.positions))).detach()


@pytest.mark.parametrize("merged", [False, True], ids=["one-plan", "merged"])
def test_a_module_around_a_model_hands_the_order_on(merged: bool, pool: Any) -> None:
    expected = make()(batch(8)["tokens"]).detach()
    for logits in pool.run(wrapped, merged, ranks=2):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def inner_in_reading_order() -> tuple[str, Tensor]:
    """A wrapper without positions around a model with a plan: the error, and the logits with positions."""
    grid = ProcessMesh.grid(cp=2)
    model = Wrapper()
    own = replace(model.inner.parallel_plan(), context="all_gather")
    parallelize(model, grid, ParallelPlan.merge({"": ParallelPlan(), "inner": own}))
    tokens, layout = batch(8)["tokens"], Layout(grid, {"cp": Shard(1)})
    natural = distribute(tokens, layout)
    positions = distribute(torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous(), layout)
    with pytest.raises(ValueError) as caught:
        model(natural, KEY)
    return str(caught.value), to_global(model(natural, KEY, positions=positions)).detach()


def test_an_inner_model_is_named_with_the_remedy(pool: Any) -> None:
    expected = make()(batch(8)["tokens"]).detach()
    for error, logits in pool.run(inner_in_reading_order, ranks=2):
        assert error.startswith("tokens of inner (Llama) are (Shard(dim=1),), and neither the tokens nor positions")
        assert "call inner (Llama) with positions=batch.positions of the same batch, or, for tokens in reading" in error
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def without_context(sharded: bool) -> Any:
    grid = ProcessMesh.grid(cp=2)
    model = make()
    parallelize(model, grid, model.parallel_plan())
    given = batch(8)
    inputs = {name: distribute(x, Layout(grid, {"cp": Shard(1)} if sharded else {})) for name, x in given.items()}
    try:
        loss, gradients = stepped(model, **inputs)
    except ValueError as error:
        return str(error)
    return whole(loss), {name: whole(gradient) for name, gradient in gradients.items()}


def test_without_context_sharded_tokens_are_refused_and_replicated_ones_computed_on_each_rank(pool: Any) -> None:
    for message in pool.run(without_context, True, ranks=2):
        assert "the tokens are (Shard(dim=1),), but the plan has context=None" in message
    expected, gradients = stepped(make(), **batch(8))
    for loss, found in pool.run(without_context, False, ranks=2):
        assert torch.equal(loss, expected)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-7)
