"""Models cut into stages: the loss and every gradient of one process, under every schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPTConfig,
    LlamaConfig,
    PipelinePlan,
    QwenConfig,
    forward_backward,
    from_pretrained,
    initialize,
    parallelize,
    save_pretrained,
)
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.parallel.parallelize import pipeline_of
from weft.models.schedules.schedule import simulate
from weft.models.step.find_gradients import clip_gradients

from tests.models.cases import deviations, gradients_off, whole
from tests.support.sample import together

SIZES = {"vocab_size": 31, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_seq_len": 32}
GATED = {"intermediate_size": 48, "num_kv_heads": 4}
CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SIZES, **GATED),
    "tied": LlamaConfig(**SIZES, **GATED, tie_embeddings=True),
    "dropout": LlamaConfig(**SIZES, **GATED, dropout=0.2, attention_dropout=0.1),
    "qwen": QwenConfig(**SIZES, **GATED),
    "gpt": GPTConfig(**SIZES),
}
KEY = 77
ROWS, MICROBATCHES = 8, 4


def make(name: str, layers: int = SIZES["num_layers"]) -> nn.Module:
    model = make_model(replace(CONFIGS[name], num_layers=layers))
    initialize(model, seed=3)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets; some targets are ignored, more in some microbatches than in others."""
    tokens = torch.randint(0, 31, (ROWS, 10), generator=torch.Generator().manual_seed(0))
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    targets[0, 1:] = targets[5, :3] = -100
    return tokens, targets


def one_step(axes: dict[str, int], name: str, plan: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Any]:
    """This rank's results of a step: the loss, its stage's gradients gathered, its bytes and its pipeline's numbers."""
    mesh = ProcessMesh.grid(**axes)
    model = make(name, layers_for(axes, pipeline))
    own = replace(model.parallel_plan(), **plan, pipeline=PipelinePlan(**{"microbatches": MICROBATCHES, **pipeline}))
    parallelize(model, mesh, own)
    tokens, targets = batch()
    loss = forward_backward(model, cross_entropy, tokens, targets, dropout_key=KEY if name == "dropout" else None)
    ran = pipeline_of(model)
    return {
        "loss": loss.item(),
        "gradients": {name: whole(p.grad) for name, p in model.named_parameters()},
        "bytes": sum(_local(p).nbytes for p in model.parameters()),
        "in_flight": ran.in_flight,
        "ran": ran.ran,
        "planned": ran.schedule.actions[mesh.coordinate(torch.distributed.get_rank())["pp"]],
    }


def layers_for(axes: dict[str, int], pipeline: dict[str, Any]) -> int:
    """One layer more than there are stages; interleaving has two stages on a rank."""
    return axes["pp"] * (2 if pipeline.get("schedule") == "interleaved" else 1) + 1


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def expected(name: str, microbatches: int, layers: int = SIZES["num_layers"]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients on one process: of the whole batch, or with dropout of the same microbatches."""
    model = make(name, layers)
    tokens, targets = batch()
    if name == "dropout":
        loss = forward_backward(model, cross_entropy, tokens, targets, microbatches=microbatches, dropout_key=KEY)
    else:
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


MODELS = [pytest.param(name, id=name) for name in CONFIGS]
SCHEDULES = [
    pytest.param({"schedule": "gpipe"}, id="gpipe"),
    pytest.param({}, id="1f1b"),
    pytest.param({"schedule": "interleaved"}, id="interleaved"),
    pytest.param({"schedule": "zero_bubble"}, id="zero-bubble"),
]
MESHES = [
    pytest.param({"pp": 2}, {}, id="pp2"),
    pytest.param({"pp": 3}, {"recompute": "full"}, id="pp3-recompute"),
    pytest.param({"pp": 2, "dp": 2}, {"zero": 1}, id="pp2-dp2-zero1"),
    pytest.param({"dp": 2, "pp": 2}, {}, id="dp2-pp2", marks=pytest.mark.exhaustive),
    pytest.param({"pp": 2, "tp": 2}, {}, id="pp2-tp2", marks=pytest.mark.exhaustive),
    pytest.param({"pp": 2, "tp": 2}, {"sequence": True, "recompute": "selective"}, id="pp2-tp2-selective"),
    pytest.param({"pp": 2, "cp": 2}, {"context": "all_gather", "zero": 3}, id="pp2-cp2-zero3"),
    pytest.param(
        {"pp": 2, "dp": 2, "tp": 2},
        {"sequence": True, "zero": 3},
        id="pp2-dp2-tp2-zero3",
        marks=pytest.mark.exhaustive,
    ),
]


Case = tuple[dict[str, Any], str]  # a schedule, and the name of a config
Truth = tuple[float, dict[str, Tensor]]


def each_case(
    axes: dict[str, int], plan: dict[str, Any], cases: list[Case], truths: list[Truth]
) -> tuple[list[str], list[set[str]], list[tuple[float, float]]]:
    """For each case: its errors, the names of this rank's gradients, and the errors of loss and worst gradient."""
    wrong, seen, off = [], [], []
    for (pipeline, name), (loss, gradients) in zip(cases, truths, strict=True):
        found = one_step(axes, name, plan, pipeline)
        said = gradients_off(found["gradients"], gradients)
        if abs(found["loss"] - loss) > 1e-5 * loss:
            said.append(f"the loss is {found['loss']}, and {loss} on one process")
        if tuple(found["ran"]) != found["planned"]:
            said.append(f"it ran {found['ran']}, planned were {found['planned']}")
        wrong += [f"{pipeline}, {name}: {each}" for each in said]
        seen.append(set(found["gradients"]))
        off.append(
            (abs(found["loss"] - loss) / loss, max(deviations(found["gradients"], gradients).values(), default=0.0))
        )
    return wrong, seen, off


truth_of = functools.cache(expected)


@pytest.mark.table
@pytest.mark.parametrize(("axes", "plan", "cases"), together(MESHES, SCHEDULES, MODELS))
def test_paddlenlp_9412_stages_have_the_loss_and_gradients_of_one_process(
    axes: dict[str, int],
    plan: dict[str, Any],
    cases: list[Case],
    pool,
    combinations: Callable[[int], None],
    greatest: Callable[[float, float], None],
) -> None:
    combinations(len(cases))
    greatest(*check(axes, plan, cases, pool))


@pytest.mark.exhaustive  # the sample has cases with fewer microbatches than stages, or fewer processes
@pytest.mark.parametrize(
    ("axes", "plan", "schedule", "name"),
    [
        pytest.param({"pp": 4}, {}, "zero_bubble", "tied", id="pp4-zero-bubble"),
        pytest.param({"pp": 4}, {}, "interleaved", "gpt", id="pp4-interleaved"),
        pytest.param({"pp": 4, "dp": 2}, {"zero": 3}, "1f1b", "llama", id="pp4-dp2-zero3"),
        pytest.param(
            {"pp": 2, "cp": 2, "tp": 2},
            {"sequence": True, "context": "ulysses"},
            "interleaved",
            "qwen",
            id="pp2-cp2-tp2",
        ),
        pytest.param(
            {"pp": 2, "dp": 2, "cp": 2},
            {"context": "all_gather", "zero": 2},
            "zero_bubble",
            "dropout",
            id="pp2-dp2-cp2-zero2",
        ),
    ],
)
def test_four_stages_and_meshes_of_8_processes(
    axes: dict[str, int], plan: dict[str, Any], schedule: str, name: str, pool
) -> None:
    check(axes, plan, [({"schedule": schedule}, name)], pool)


@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(("1f1b",), id="1f1b"),
        pytest.param(("gpipe", "interleaved", "zero_bubble"), id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_fewer_microbatches_than_stages(schedules: tuple[str, ...], pool) -> None:
    check({"pp": 4}, {}, [({"schedule": each, "microbatches": 2}, "tied") for each in schedules], pool)


def check(axes: dict[str, int], plan: dict[str, Any], cases: list[Case], pool) -> tuple[float, float]:
    """How far a loss and a gradient are off at most."""
    truths = [truth_of(name, MICROBATCHES, layers_for(axes, pipeline)) for pipeline, name in cases]
    ranks = torch.Size(axes.values()).numel()
    found = pool.run(each_case, axes, plan, cases, truths, ranks=ranks)
    assert not any(wrong for wrong, _, _ in found), "\n".join(said for wrong, _, _ in found for said in wrong)
    for number, (_, gradients) in enumerate(truths):
        assert set().union(*(seen[number] for _, seen, _ in found)) == gradients.keys()
    losses, of_gradients = zip(*(each for _, _, off in found for each in off), strict=True)
    return max(losses), max(of_gradients)


@pytest.mark.exhaustive
@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_a_rank_holds_nothing_of_other_stages(pipeline: dict[str, Any], pool) -> None:
    layers = layers_for({"pp": 2}, pipeline)
    nbytes = {name: p.nbytes for name, p in make("llama", layers).named_parameters()}
    stages = {0: "embed_tokens", 1: "norm"}
    for rank, found in enumerate(pool.run(one_step, {"pp": 2}, "llama", {}, pipeline, ranks=2)):
        names = found["gradients"].keys()
        assert any(name.startswith(stages[rank]) for name in names)
        assert not any(name.startswith(stages[1 - rank]) for name in names)
        mine = layers // 2 + (rank == 0)  # of an odd number of layers, with 9 parameters each
        assert sum(name.startswith("layers") for name in names) == 9 * mine
        assert found["bytes"] == sum(nbytes[name] for name in names)


@pytest.mark.parametrize(
    ("ranks", "plan", "in_flight", "idle"),
    [
        pytest.param(3, {}, [3, 2, 1], Fraction(2, MICROBATCHES + 2), id="1f1b"),
        pytest.param(2, {"schedule": "gpipe"}, [4, 4], Fraction(1, MICROBATCHES + 1), id="gpipe"),
        pytest.param(
            *(2, {"schedule": "interleaved"}, [5, 3], Fraction(1, 2 * MICROBATCHES + 1)),
            id="interleaved",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *(2, {"schedule": "zero_bubble"}, [2, 2], Fraction(1, 3 * MICROBATCHES + 1)),
            id="zero-bubble",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_activations_in_flight_and_idle_slots_of_what_ran(
    ranks: int, plan: dict[str, Any], in_flight: list[int], idle: Fraction, pool
) -> None:
    found = pool.run(one_step, {"pp": ranks}, "llama", {}, plan, ranks=ranks)
    assert [each["in_flight"] for each in found] == in_flight
    planned = PipelinePlan(**plan).make_schedule(ranks, MICROBATCHES)
    timeline = simulate(replace(planned, actions=tuple(tuple(each["ran"]) for each in found)))
    assert [Fraction(timeline.idle(rank)) / Fraction(timeline.length) for rank in range(ranks)] == [idle] * ranks


def steps(axes: dict[str, int], count: int) -> dict[str, Any]:
    """Norms, losses and this rank's weights over AdamW steps whose gradients are clipped.

    AdamW divides each gradient by its size; eps has a usual gradient's size, so that gradients as small as a
    rounding do not become whole steps.
    """
    model = make("tied")
    if axes:
        plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=MICROBATCHES, split=(1, 2, 1)))
        parallelize(model, ProcessMesh.grid(**axes), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    tokens, targets = batch()
    norms, losses = [], []
    for _ in range(count):
        losses.append(forward_backward(model, cross_entropy, tokens, targets).item())
        norms.append(clip_gradients(model, 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    return {"norms": norms, "losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        pytest.param({"pp": 3}, 2, id="pp3"),
        pytest.param({"pp": 3}, 5, id="pp3-more-steps", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 3, "tp": 2}, 5, id="pp3-tp2", marks=pytest.mark.exhaustive),
    ],
)
def test_anchor_29_tied_weights_stay_equal_to_the_bit_and_count_once(axes: dict[str, int], count: int, pool) -> None:
    alone = steps({}, count)
    found = pool.run(steps, axes, count, ranks=torch.Size(axes.values()).numel())
    first, last = found[0]["weights"], found[-1]["weights"]
    assert torch.equal(first["embed_tokens.weight"], last["embed_tokens.weight"])
    assert "embed_tokens.weight" not in found[len(found) // 2]["weights"]
    for each in found:
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert each["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for name, weight in each["weights"].items():
            torch.testing.assert_close(weight, alone["weights"][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("keeps", [cross_entropy, nn.functional.cross_entropy], ids=["ours", "torch"])
def test_microbatches_without_stages_weigh_as_in_one_batch(microbatches: int, keeps: Any) -> None:
    loss, gradients = expected("llama", 1, layers=2)
    model = make("llama", layers=2)

    def criterion(logits: Tensor, targets: Tensor) -> Tensor:
        return keeps(logits.flatten(0, 1), targets.flatten())

    found = forward_backward(model, keeps if keeps is cross_entropy else criterion, *batch(), microbatches=microbatches)
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert not gradients_off({name: p.grad for name, p in model.named_parameters()}, gradients)


def test_an_ignored_index_and_sums_of_losses() -> None:
    tokens, _ = batch()
    for options in (
        {"ignore_index": 7},
        {"reduction": "sum"},
        {"denominator": 5.0},
        {"weight": torch.arange(1, 32) / 31},
    ):
        criterion = partial(cross_entropy, **options)
        targets = batch()[1].clamp(min=0) if "ignore_index" in options else batch()[1]
        together = criterion(make("llama", layers=1)(tokens), targets)
        found = forward_backward(make("llama", layers=1), criterion, tokens, targets, microbatches=4)
        assert found.item() == pytest.approx(together.item(), rel=1e-6), options


def saved_and_read(folder: str) -> bool:
    mesh, model = ProcessMesh.grid(pp=2, tp=2), make("tied")
    plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=MICROBATCHES))
    save_pretrained(parallelize(model, mesh, plan), folder)
    read = from_pretrained(folder, mesh, plan)
    return all(
        torch.equal(_local(parameter), _local(read.get_parameter(name))) for name, parameter in model.named_parameters()
    )


def test_one_checkpoint_is_saved_from_all_stages_and_read_into_any(pool, tmp_path) -> None:
    folder = tmp_path / "saved"
    assert pool.run(saved_and_read, str(folder), ranks=4) == [True] * 4
    read = from_pretrained(folder)
    for name, parameter in make("tied").named_parameters():
        assert torch.equal(read.get_parameter(name), parameter)
