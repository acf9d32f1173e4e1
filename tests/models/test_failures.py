"""Silent errors of other libraries' parallel training: a test each, under the number that the error has here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft.kernels import add, cross_entropy, rms_norm
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import (
    ColwiseParallel,
    LlamaConfig,
    ParallelPlan,
    PositionParallel,
    QwenConfig,
    RowwiseParallel,
    VocabParallel,
    clip_gradients,
    parallelize,
)
from weft.models.families import make_model
from weft.models.layers import DotProductAttention, Embedding, Linear
from weft.reshard import GradientSync, distribute, layout_of, reshard

from tests.models.cases import make, whole

SIZES: dict[str, Any] = {
    "vocab_size": 31,  # divided by no tp
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 32,
}
LLAMA, QWEN = LlamaConfig(**SIZES, tie_embeddings=True), QwenConfig(**SIZES, tie_embeddings=True)
SMOOTHED = {"label_smoothing": 0.2, "z_loss": 1e-2}


def qwen() -> nn.Module:
    return randomly_filled(make_model(QWEN))


def randomly_filled(model: nn.Module) -> nn.Module:
    """Fill all parameters at random, norms and biases too: a missing factor may not show where a norm's weight is 1."""
    for index, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))
    return model


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 31, (3, 9), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def stepped(model: nn.Module, mesh: ProcessMesh | None = None, **options: float) -> Tensor:
    """The loss on one process or on a mesh, after backward and the synchronization of gradients."""
    if mesh is None:
        loss = cross_entropy(model(batch()[0]), batch()[1], **options)
        loss.backward()
        return loss.detach()
    sync = GradientSync(model)
    tokens, target = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in batch())
    loss = reshard(cross_entropy(model(tokens), target, **options))
    loss.backward()
    sync.wait()
    sync.close()
    return whole(loss)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def check(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, gradient in gradients_of(model).items():
        assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-7, name


def smoothed(tp: int) -> tuple[Tensor, dict[str, Tensor]]:
    mesh = ProcessMesh.grid(dp=4 // tp, tp=tp)
    model = parallelize(make(LLAMA), mesh)
    return stepped(model, mesh, **SMOOTHED), gradients_of(model)


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_anchor_21_label_smoothing_and_z_loss_are_over_all_classes(tp: int, pool) -> None:
    alone = make(LLAMA)
    expected = stepped(alone, **SMOOTHED)
    assert abs(expected - stepped(make(LLAMA))) > 1e-2  # the options count
    for loss, gradients in pool.run(smoothed, tp):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        check(gradients, alone)


def normed(tp: int, sequence: bool) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(dp=4 // tp, tp=tp)
    model: Any = qwen()
    parallelize(model, mesh, replace(model.parallel_plan(), sequence=sequence))
    stepped(model, mesh)
    return gradients_of(model)


@pytest.mark.parametrize(
    ("tp", "sequence"),
    [(4, True), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(4, False), (2, True), (2, False)])],
)
def test_anchor_22_norms_of_queries_and_keys_get_the_gradients_of_all_heads(tp: int, sequence: bool, pool) -> None:
    alone = qwen()
    stepped(alone)
    assert alone.layers[0].self_attn.k_norm.weight.grad.abs().max() > 1e-4  # type: ignore[union-attr,index]
    for gradients in pool.run(normed, tp, sequence):
        check(gradients, alone)


class EachHead(nn.Module):
    """A norm of each head, with a weight that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, heads: Tensor) -> Tensor:
        return rms_norm(heads, self.weight, head_dim=4)


class Users(nn.Module):
    """A user's model whose plan replicates parameters that act on shards: positions, norms, a row layer's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = Embedding(31, 16), Embedding(8, 16)
        self.query, self.key, self.value = (Linear(16, 16, unit=4) for _ in range(3))
        self.query_norm, self.key_norm = EachHead(), EachHead()
        self.attend = DotProductAttention(4, name="attend")
        self.out, self.head = Linear(16, 16, bias=True), Linear(16, 31, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = add(self.tokens(tokens), self.positions(torch.arange(8)))
        query, key = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        return self.head(add(x, self.out(self.attend(query, key, self.value(x)))))


USERS = ParallelPlan(
    tensor={
        "tokens": VocabParallel(),
        "positions": PositionParallel(),
        "query": ColwiseParallel(),
        "key": ColwiseParallel(),
        "value": ColwiseParallel(),
        "out": RowwiseParallel(),
        "head": ColwiseParallel(),
    }
)


def users(sequence: bool) -> dict[str, Tensor]:
    mesh = ProcessMesh.grid(dp=1, tp=4)
    model = parallelize(randomly_filled(Users()), mesh, replace(USERS, sequence=sequence))
    stepped(model, mesh)
    named = dict(model.named_parameters())
    for name in ("positions.weight", "query_norm.weight", "key_norm.weight", "out.bias"):
        assert str(layout_of(named[name])) == "dp: R, tp: R", name  # type: ignore[arg-type]
    return gradients_of(model)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_anchor_18_what_a_plan_leaves_whole_gets_the_gradients_of_all_shards(sequence: bool, pool) -> None:
    alone = randomly_filled(Users())
    stepped(alone)
    for gradients in pool.run(users, sequence):
        check(gradients, alone)


PIECES = {"replicated": ("norm", "bias"), "heads": ("q_proj", "k_proj", "v_proj"), "all": ("",)}


def norms(mesh: ProcessMesh | None = None) -> dict[str, Tensor]:
    """The norm of the gradients, a few at a time. mesh: None takes torch's own norm, on one process."""
    model: Any = qwen()
    if mesh is not None:
        parallelize(model, mesh, replace(model.parallel_plan(), sequence=True))
    stepped(model, mesh)
    kept = {name: (parameter, parameter.grad) for name, parameter in model.named_parameters()}
    found = {}
    for piece, parts in PIECES.items():
        for name, (parameter, gradient) in kept.items():
            parameter.grad = gradient if any(part in name for part in parts) else None
        if mesh is None:
            found[piece] = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            found[piece] = clip_gradients(model, 1e-3)
            if piece == "all":
                found["clipped"] = torch.stack([whole(p.grad).norm() for p in model.parameters()]).norm()
    return found


@pytest.fixture(scope="module")
def norms_on_a_mesh(pool) -> list[dict[str, Tensor]]:
    return pool.run(norms, ProcessMesh.grid(dp=1, tp=4))


@pytest.fixture(scope="module")
def norms_alone() -> dict[str, Tensor]:
    return norms()


def test_anchor_23_the_norm_counts_a_replicated_parameter_once(norms_on_a_mesh, norms_alone) -> None:
    for found in norms_on_a_mesh:
        torch.testing.assert_close(found["replicated"], norms_alone["replicated"], rtol=1e-5, atol=0)


def test_anchor_25_the_norm_counts_the_heads_of_every_rank(norms_on_a_mesh, norms_alone) -> None:
    for found in norms_on_a_mesh:  # of keys and values each head lies on two ranks, and is counted once
        torch.testing.assert_close(found["heads"], norms_alone["heads"], rtol=1e-5, atol=0)


def test_anchor_26_gradients_on_several_meshes_are_clipped_by_one_norm(norms_on_a_mesh, norms_alone) -> None:
    for found in norms_on_a_mesh:  # tp of all ranks, and the heads and copies of keys and values
        torch.testing.assert_close(found["all"], norms_alone["all"], rtol=1e-5, atol=0)
        assert float(found["clipped"]) == pytest.approx(1e-3, rel=1e-4)


def norm_of_two() -> Tensor:
    """The gradients' norm of a module of two models, on two of the ranks each."""
    both = nn.ModuleList([make(LLAMA, seed) for seed in (0, 1)])
    meshes = [ProcessMesh.grid(dp=1, tp=2), ProcessMesh.grid(dp=2, first_rank=2)]
    for model, mesh in zip(both, meshes, strict=True):
        parallelize(model, mesh)
        stepped(model, mesh)
    return clip_gradients(both, 1.0)


def test_anchor_26_models_on_other_ranks_have_one_norm(pool) -> None:
    alone = nn.ModuleList([make(LLAMA, seed) for seed in (0, 1)])
    for model in alone:
        stepped(model)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    for norm in pool.run(norm_of_two):
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)


def trained(tp: int) -> dict[str, Tensor]:
    """A tied model's weights after some steps of AdamW, and its weights before."""
    model: Any = make(LLAMA)
    mesh = ProcessMesh.grid(dp=1, tp=tp) if tp > 1 else None
    if mesh is not None:
        parallelize(model, mesh)
        assert model.lm_head.weight is model.embed_tokens.weight
    before = whole(model.lm_head.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    for _ in range(3):
        stepped(model, mesh)
        optimizer.step()
        optimizer.zero_grad()
    return {"before": before} | {name: whole(parameter) for name, parameter in model.named_parameters()}


def test_anchor_27_the_last_ranks_rows_of_a_tied_uneven_table_are_updated(pool) -> None:
    expected = trained(1)
    for found in pool.run(trained, 4):  # 31 rows: 8, 8, 8 and 7
        last = (found["embed_tokens.weight"] - found["before"])[24:]
        assert (last.abs().amax(1) > 1e-4).all()  # each row has a gradient, as a class of the tied head
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
