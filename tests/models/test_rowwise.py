"""Modules that are declared row by row, and rows of several lengths under dynamic rope scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPT,
    DynamicRopeScaling,
    GPTConfig,
    Llama,
    LlamaConfig,
    PipelinePlan,
    Qwen,
    QwenConfig,
    forward_backward,
    initialize,
    lay_out_batch,
    parallelize,
)
from weft.models.layers import ROW_INDEPENDENT
from weft.models.parallel.local_modules import is_row_independent
from weft.reshard import to_global

from tests.models.cases import gradients_off, whole
from tests.support.pool import Pool

B, T, V = 4, 8, 23
SIZES = {"vocab_size": V, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 4}
ROPED = SIZES | {"intermediate_size": 24}
DYNAMIC = LlamaConfig(**ROPED, rope_scaling=DynamicRopeScaling(factor=2.0))
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "llama": (Llama, LlamaConfig(**ROPED)),
    "llama-dynamic": (Llama, DYNAMIC),
    "llama-dropout": (Llama, LlamaConfig(**ROPED, dropout=0.3, attention_dropout=0.3)),
    "qwen": (Qwen, QwenConfig(**ROPED)),
    "gpt": (GPT, GPTConfig(**SIZES | {"max_seq_len": 64})),
}


def make(name: str) -> nn.Module:
    """A model whose weights are large enough for rotary angles to matter."""
    kind, config = MODELS[name]
    model = kind(config)
    initialize(model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)
    return model


def a_batch() -> dict[str, Tensor]:
    """Rows of two lengths: of positions below 8, and below 16."""
    ids = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(T) + torch.tensor([[0], [0], [8], [8]])
    documents = torch.tensor([0] * 3 + [1] * 5).expand(B, T)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "positions": positions, "documents": documents.contiguous()}


def with_others(value: Any) -> Any:
    """A module's input, with changed numbers in every row but the first."""
    if not isinstance(value, Tensor) or value.shape[:1] != (B,):
        return value
    changed = value.clone()
    if value.shape == (B, T, 2) and not value.is_floating_point():  # bounds of documents: of other documents
        changed[1:] = torch.tensor([[0, 5]] * 5 + [[5, T]] * 3)
        return changed
    changed[1:] = value[1:].flip(-1) + 1 if value.is_floating_point() else (value[1:] * 3 + 1) % V
    return changed


def rows_that_follow_others(model: nn.Module) -> tuple[set[str], set[type]]:
    """The `row_independent` classes whose first output row depends on other rows; and all such classes called."""
    calls: list[tuple[nn.Module, Any, Any]] = []
    hooks = [
        module.register_forward_pre_hook(lambda m, args, kwargs: calls.append((m, args, kwargs)), with_kwargs=True)
        for module in model.modules()
        if is_row_independent(module)
    ]
    given = a_batch()
    given.pop("targets")
    model(**given, dropout_key=7)
    for hook in hooks:
        hook.remove()
    wrong = set()
    for module, args, kwargs in calls:
        first, second = (module(*tree_map(f, args), **tree_map(f, kwargs)) for f in (lambda x: x, with_others))
        firsts, seconds = ((x,) if isinstance(x, Tensor) else x for x in (first, second))
        for a, b in zip(firsts, seconds, strict=True):
            if a.shape[0] == B and not torch.allclose(a[0], b[0], rtol=0, atol=1e-6 * a.abs().max().item()):
                wrong.add(type(module).__name__)
    return wrong, {type(module) for module, _, _ in calls}


@pytest.mark.exhaustive
def test_a_module_declared_row_by_row_reads_no_other_row() -> None:
    called = set()
    for name in MODELS:
        wrong, seen = rows_that_follow_others(make(name))
        assert not wrong, name
        called |= seen
    assert called >= {kind for kind in ROW_INDEPENDENT if kind.__module__.startswith("weft.")}


def test_a_model_whose_angles_follow_the_longest_row_is_not_declared_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the test above would tell."""
    assert not is_row_independent(make("llama-dynamic"))
    monkeypatch.setattr(Llama, "reads_other_rows", False)
    assert rows_that_follow_others(make("llama-dynamic"))[0] == {"Llama"}


def logits_on(axes: dict[str, int]) -> Tensor:
    model, mesh = make("llama-dynamic"), ProcessMesh.grid(**axes)
    plan = replace(model.parallel_plan(), context="all_gather" if "cp" in axes else None)
    parallelize(model, mesh, plan)
    laid = lay_out_batch(mesh, plan, **a_batch())
    found = model(laid.tokens, positions=laid.positions, documents=laid.documents)
    return laid.as_read(to_global(found.detach()))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_rows_of_several_lengths_have_the_logits_of_one_process(axes: dict[str, int], pool: Pool) -> None:
    given = a_batch()
    given.pop("targets")
    expected = make("llama-dynamic")(**given).detach()
    for logits in pool.run(logits_on, axes, ranks=2):
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * expected.abs().max().item())


def stepped(axes: dict[str, int], microbatches: int) -> tuple[float, dict[str, Tensor]]:
    model = make("llama-dynamic")
    if axes:
        plan = replace(model.parallel_plan(), context="all_gather" if "cp" in axes else None)
        if "pp" in axes:
            plan = replace(plan, pipeline=PipelinePlan(microbatches=microbatches))
        parallelize(model, ProcessMesh.grid(**axes), plan)
    given = a_batch()
    loss = forward_backward(
        model, cross_entropy, given["tokens"], given["targets"], microbatches=microbatches, positions=given["positions"]
    )
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("axes", "microbatches"),
    [
        pytest.param({}, 2, id="alone-2"),
        pytest.param({}, 4, id="alone-4"),
        pytest.param({"dp": 2}, 2, id="dp2"),
        pytest.param({"cp": 2}, 4, id="cp2"),
        pytest.param({"pp": 2}, 2, id="pp2"),
    ],
)
def test_microbatches_of_several_lengths_have_the_gradients_of_the_batch(
    axes: dict[str, int], microbatches: int, pool: Pool
) -> None:
    loss, gradients = stepped({}, 1)
    steps = pool.run(stepped, axes, microbatches, ranks=2) if axes else [stepped(axes, microbatches)]
    for found, its in steps:
        assert found == pytest.approx(loss, rel=2e-6)
        assert not gradients_off(its, {name: gradients[name] for name in its})


@pytest.mark.exhaustive
def test_a_compiled_model_knows_the_length_of_the_batch() -> None:
    torch._dynamo.reset()
    given, model = a_batch(), make("llama-dynamic")
    expected, _ = stepped({}, 1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = forward_backward(
        compiled, cross_entropy, given["tokens"], given["targets"], microbatches=2, positions=given["positions"]
    )
    assert loss.item() == pytest.approx(expected, rel=2e-6)
