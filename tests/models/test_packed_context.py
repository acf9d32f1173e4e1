"""Context parallelism by documents: packed rows equal their documents one at a time, at the lower bound of bytes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key
from weft.models import (
    GPT,
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
from weft.models.layers import DotProductAttention
from weft.models.parallel.packed.exchange import RowOrders
from weft.reshard import GradientSync, reshard, to_global

from tests.models.cases import whole

SIZES: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_heads=8, num_kv_heads=4, max_seq_len=256)
KEY = derive_key(3, "dropout", 0)
DROPS = {"dropout": 0.2, "attention_dropout": 0.1}


def make(family: str = "llama", change: dict[str, Any] | None = None) -> Any:
    change = change or {}
    model: Any
    if family in ("llama", "capped"):
        model = Llama(replace(CONFIG, **change))
    elif family == "gpt":
        model = GPT(GPTConfig(vocab_size=31, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=256, **change))
    else:  # one layer with a window and one without
        window = {"sliding_window": 5, "sliding_layers": (0,)}
        model = Qwen(QwenConfig(version=2, **SIZES, num_heads=8, num_kv_heads=4, **window, **change))
    initialize(model, seed=3)
    return capped(model) if family == "capped" else model


def capped(model: Any) -> Any:
    """The model with a softcap, and with sinks as a parameter of each attention."""
    for attend in [each for each in model.modules() if isinstance(each, DotProductAttention)]:
        attend.softcap, attend.sinks = 0.5, torch.nn.Parameter(torch.linspace(-1, 2, CONFIG.num_heads))
        attend.register_forward_pre_hook(lambda at, args, given: (args, {**given, "sinks": at.sinks}), with_kwargs=True)
    return model


def packed(length: int, rows: int, seed: int = 0) -> tuple[dict[str, Tensor], list[list[slice]]]:
    """Rows of documents, long and short in each, and the places of the documents of each row."""
    draw, generator = Random(seed + length), torch.Generator().manual_seed(length + seed)
    tokens, targets = (torch.randint(0, 31, (rows, length), generator=generator) for _ in range(2))
    targets[torch.rand(rows, length, generator=generator) < 0.3] = -100
    documents, positions, places = torch.zeros(rows, length, dtype=torch.int64), torch.zeros_like(tokens), []
    for row in range(rows):
        start, found = 0, []
        while start < length:
            stop = min(length, start + draw.choice([1, 3, draw.randint(1, 8), draw.randint(1, length)]))
            documents[row, start:stop], positions[row, start:stop] = len(found), torch.arange(stop - start)
            found.append(slice(start, stop))
            start = stop
        places.append(found)
    given = {"tokens": tokens, "targets": targets, "positions": positions, "documents": documents}
    return given, places


def stepped(model: Any, tokens: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
    loss = cross_entropy(model(tokens, KEY, **inputs), targets, reduction="sum")
    loss = reshard(loss) if isinstance(loss, DTensor) else loss
    loss.backward()
    return loss.detach()


def one_at_a_time(
    family: str, length: int, rows: int, change: dict[str, Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the documents, each alone."""
    model, (given, places) = make(family, change), packed(length, rows)
    loss = torch.zeros(())
    for row, found in enumerate(places):
        for place in found:
            loss += stepped(model, given["tokens"][row : row + 1, place], given["targets"][row : row + 1, place])
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def on_mesh(
    mesh: dict[str, int], family: str, change: dict[str, Any], plan: dict[str, Any], length: int, rows: int
) -> Any:
    """Loss, gradients and logits in reading order on a mesh, and whether rows were cut by documents."""
    grid = ProcessMesh.grid(**mesh)
    model = make(family, change)
    chosen = replace(model.parallel_plan(), context="all_gather", **plan)
    parallelize(model, grid, chosen)
    sync = GradientSync(model)
    laid = lay_out_batch(grid, chosen, **packed(length, rows)[0])
    inputs = {"positions": laid.positions, "documents": laid.documents}
    loss = stepped(model, laid.tokens, laid.targets, **inputs)
    sync.wait()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        logits = laid.as_read(to_global(model(laid.tokens, **inputs)))
    return whole(loss), gradients, logits, isinstance(laid.order, RowOrders)


MESHES = {
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "dp2-cp2": {"dp": 2, "cp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
    "cp8": {"cp": 8},
    "dp2-cp4": {"dp": 2, "cp": 4},
    "cp4-tp2": {"cp": 4, "tp": 2},
    "dp2-cp2-tp2": {"dp": 2, "cp": 2, "tp": 2},
    "tp2-cp2-dp2": {"tp": 2, "cp": 2, "dp": 2},
    "dp4-cp2": {"dp": 4, "cp": 2},
    "cp2-tp4": {"cp": 2, "tp": 4},
}


@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("length", [64, 61])
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        pytest.param("cp2", {}, id="cp2"),
        pytest.param("cp4", {}, id="cp4"),
        pytest.param("dp2-cp2", {}, id="dp2-cp2"),
        pytest.param("cp2-tp2", {"sequence": True}, id="cp2-tp2-sequence"),
        pytest.param("dp2-cp2", {"zero": 3}, id="dp2-cp2-zero3"),
        pytest.param("cp2", {"recompute": "full"}, id="recompute-full"),
        pytest.param("cp2-tp2", {"recompute": "selective"}, id="recompute-selective"),
        pytest.param("cp8", {}, id="cp8"),
        pytest.param("dp2-cp4", {"zero": 2, "recompute": "selective"}, id="dp2-cp4-zero2-recompute"),
        pytest.param("cp4-tp2", {"sequence": True, "loss_parallel": True}, id="cp4-tp2-loss-parallel"),
        pytest.param("dp2-cp2-tp2", {"zero": 3, "sequence": True}, id="dp2-cp2-tp2-zero3"),
        pytest.param("tp2-cp2-dp2", {"recompute": "full"}, id="tp2-cp2-dp2-recompute"),
        pytest.param("dp4-cp2", {"zero": 1}, id="dp4-cp2-zero1"),
        pytest.param("cp2-tp4", {"sequence": True}, id="cp2-tp4-sequence"),
    ],
)
def test_packed_rows_equal_their_documents_one_at_a_time(
    mesh: str, plan: dict[str, Any], length: int, family: str, pool: Any
) -> None:
    axes, rows = MESHES[mesh], 2
    expected, gradients = one_at_a_time(family, length, rows)
    model, (given, _) = make(family).eval(), packed(length, rows)
    with torch.no_grad():
        alone = model(given["tokens"], positions=given["positions"], documents=given["documents"])
    ranks = ProcessMesh.grid(**axes).size
    for loss, found, logits, is_cut in pool.run(on_mesh, axes, family, {}, plan, length, rows, ranks=ranks):
        assert is_cut
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(logits, alone, rtol=0, atol=2e-6)
        for name, gradient in gradients.items():
            check(name, found[name], gradient)


DEEP = {"num_layers": 4}


def in_stages(axes: dict[str, int], length: int, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and gradients of a step by a pipeline, whose stages cut the rows by documents."""
    grid, model = ProcessMesh.grid(**axes), make("llama", DEEP)
    plan = replace(model.parallel_plan(), context="all_gather", pipeline=PipelinePlan(microbatches=2))
    parallelize(model, grid, plan)
    laid = lay_out_batch(grid, plan, **packed(length, rows)[0])
    assert isinstance(laid.order, RowOrders)
    inputs = {"positions": laid.positions, "documents": laid.documents, "dropout_key": KEY}
    loss = forward_backward(model, cross_entropy, laid.tokens, laid.targets, **inputs)
    return loss, {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "axes",
    [{"pp": 2, "cp": 4}, {"pp": 4, "cp": 2}, {"pp": 2, "dp": 2, "cp": 2}, {"pp": 2, "cp": 2, "tp": 2}],
    ids=lambda axes: "-".join(f"{name}{size}" for name, size in axes.items()),
)
def test_packed_rows_in_stages_equal_their_documents_one_at_a_time(axes: dict[str, int], pool: Any) -> None:
    length, rows = 61, 4
    total, gradients = one_at_a_time("llama", length, rows, DEEP)
    count = int((packed(length, rows)[0]["targets"] != -100).sum())
    everywhere = pool.run(in_stages, axes, length, rows, ranks=8)
    assert {name for _, found in everywhere for name in found} == gradients.keys()
    for loss, found in everywhere:
        assert float(loss) == pytest.approx(float(total) / count, rel=1e-6)
        for name, gradient in found.items():  # of the rank's stage
            check(name, count * gradient, gradients[name])


def check(name: str, found: Tensor, gradient: Tensor, largest: float | None = None) -> None:
    """Compares within 1e-6 of `largest`, or of the gradient's largest element, or of 1 for key biases.

    The gradient of key biases is 0. largest: of a gradient made of the same numbers, where the gradient is 0.

    Float32 alone errs by 7e-7 here: gradients in float32 differ as much from gradients in float64, for documents one at
    a time and for a packed row on a single process.
    """
    largest = gradient.abs().max().item() if largest is None else largest
    allowed = 1e-6 * (1.0 if name.endswith("k_proj.bias") else largest)
    torch.testing.assert_close(found, gradient, rtol=0, atol=allowed, msg=lambda text: f"{name}: {text}")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "qwen", "capped"])
@pytest.mark.parametrize("length", [64, 61])
def test_packed_rows_on_one_process_equal_their_documents(length: int, family: str) -> None:
    expected, gradients = one_at_a_time(family, length, 2)
    model = make(family)
    assert stepped(model, **packed(length, 2)[0]).item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        check(name, parameter.grad, gradients[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "family", "plan"),
    [
        pytest.param("cp2-tp2", "llama", {"sequence": True}, id="llama-cp2-tp2-sequence"),
        pytest.param("dp2-cp2", "llama", {"recompute": "full"}, id="llama-dp2-cp2-recompute"),
        pytest.param("cp4", "gpt", {}, id="gpt-cp4"),
    ],
)
def test_dropout_draws_the_masks_of_one_process(mesh: str, family: str, plan: dict[str, Any], pool: Any) -> None:
    axes, (given, _) = MESHES[mesh], packed(61, 4)
    model = make(family, DROPS if family == "llama" else {"dropout": 0.2})
    change = DROPS if family == "llama" else {"dropout": 0.2}
    expected = stepped(model, **given)
    for loss, found, _, is_cut in pool.run(on_mesh, axes, family, change, plan, 61, 4, ranks=4):
        assert is_cut
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            check(name, found[name], parameter.grad)


@pytest.mark.exhaustive
def test_softcap_and_sinks_count_once_in_own_and_received_keys(pool: Any) -> None:
    expected, gradients = one_at_a_time("capped", 61, 2)
    assert gradients["layers.0.self_attn.attend.sinks"].abs().max() > 1e-3
    for loss, found, _, is_cut in pool.run(on_mesh, {"cp": 4}, "capped", {}, {}, 61, 2, ranks=4):
        assert is_cut
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in gradients.items():
            check(name, found[name], gradient)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_ranks_with_few_tokens_or_none(length: int, pool: Any) -> None:
    expected, gradients = one_at_a_time("llama", length, 2)
    for loss, found, _, _ in pool.run(on_mesh, {"cp": 4}, "llama", {}, {}, length, 2, ranks=4):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in gradients.items():
            largest = None
            if length == 1 and ("q_proj" in name or "k_proj" in name):
                # The softmax over a single key is 1, whatever the query and the key are.
                largest = gradients[name.replace("q_proj", "v_proj").replace("k_proj", "v_proj")].abs().max().item()
            check(name, found[name], gradient, largest)


@pytest.mark.exhaustive
def test_a_data_rank_without_rows(pool: Any) -> None:
    expected, gradients = one_at_a_time("llama", 31, 1)
    for loss, found, _, _ in pool.run(on_mesh, {"dp": 2, "cp": 2}, "llama", {}, {}, 31, 1, ranks=4):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in gradients.items():
            check(name, found[name], gradient)


@pytest.mark.exhaustive
@pytest.mark.parametrize("heads", [1, 2])
def test_each_key_head_may_lie_on_several_ranks(heads: int, pool: Any) -> None:
    model, (given, _) = make("llama", {"num_kv_heads": heads}), packed(64, 2)
    expected = stepped(model, **given)
    mesh = {"cp": 2, "tp": 4 if heads == 2 else 2}
    ranks = ProcessMesh.grid(**mesh).size
    for loss, found, _, _ in pool.run(on_mesh, mesh, "llama", {"num_kv_heads": heads}, {}, 64, 2, ranks=ranks):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            check(name, found[name], parameter.grad)


def losses_of_microbatches() -> list[float]:
    found = []
    given, _ = packed(32, 4)
    for lays_out in (False, True):
        grid, model = ProcessMesh.grid(cp=2), make()
        plan = replace(model.parallel_plan(), context="all_gather")
        parallelize(model, grid, plan)
        inputs = dict(given)
        if lays_out:
            laid = lay_out_batch(grid, plan, **given)
            inputs = {name: getattr(laid, name) for name in given}
        found.append(forward_backward(model, cross_entropy, **inputs, microbatches=2).item())
    return found


@pytest.mark.exhaustive
def test_the_rows_of_a_microbatch_have_their_orders(pool: Any) -> None:
    given, _ = packed(32, 4)
    targets = given.pop("targets")
    expected = cross_entropy(make()(**given), targets).item()
    for found in pool.run(losses_of_microbatches, ranks=2):
        assert found == pytest.approx([expected, expected], rel=1e-6)


def refused() -> list[str]:
    grid, model, messages = ProcessMesh.grid(dp=2, cp=2), make(), []
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, grid, plan)
    given, _ = packed(32, 2)
    laid = lay_out_batch(grid, plan, **given)
    rank = torch.distributed.get_rank() // 2
    mine = {name: each[rank : rank + 1] for name, each in given.items()}
    again = torch.tensor([[0, 0, 1, 1, 0, 2]])
    for run in (
        lambda: model(laid.tokens, positions=laid.positions),
        lambda: lay_out_batch(grid, plan, **mine, rows=2).as_read(given["tokens"]),
        lambda: lay_out_batch(grid, plan, again, documents=again),
    ):
        with pytest.raises(ValueError) as caught:
            run()
        messages.append(str(caught.value))
    return messages


def test_mismatched_documents_and_tensors_are_named(pool: Any) -> None:
    for messages in pool.run(refused, ranks=4):
        assert messages[0].endswith(
            "call the model with documents=batch.documents, or lay the batch out without documents"
        )
        assert messages[1] == (
            "the tensor has 2 rows, and lay_out_batch was given the documents of 1; give lay_out_batch all rows, "
            "without rows="
        )
        assert messages[2] == (
            "documents: document 0 of row 0 ended before token 2 and comes back at token 4; give each stretch of "
            "tokens its own number"
        )
