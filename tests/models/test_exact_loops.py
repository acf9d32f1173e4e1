"""A program's own training loop with `exact`: each part has the same bits on every mesh, or is refused in one line."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    LlamaConfig,
    MixtralConfig,
    PipelinePlan,
    RouterLosses,
    forward_backward,
    initialize,
    lora,
    parallelize,
    record,
)
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.rope_scaling import DynamicRopeScaling
from weft.models.step.find_gradients import clip_gradients
from weft.reshard import Muon, clip_grad_norm_, to_global

SIZES: dict[str, Any] = {
    "vocab_size": 33, "hidden_size": 36, "num_layers": 2, "num_heads": 4, "max_seq_len": 16, "intermediate_size": 44,
    "head_dim": 6, "num_kv_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_experts=4, experts_per_token=2),
}
EXACT = {"dp": 4, "tp": 2}
MESHES = [(1, 1), (2, 1), (1, 2)]
ROWS, LENGTH = 32, 7
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "for-loop": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "muon": partial(Muon, lr=1e-2),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2),
    "radam": partial(torch.optim.RAdam, lr=1e-2),
    "adamax": partial(torch.optim.Adamax, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adadelta": partial(torch.optim.Adadelta, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, centered=True),
    "asgd": partial(torch.optim.ASGD, lr=1e-2),
}


def make(family: str, sizes: tuple[int, int], **plan: Any) -> nn.Module:
    model = make_model(CONFIGS[family])
    initialize(model, seed=3)
    mesh = ProcessMesh.grid(dp=sizes[0], tp=sizes[1])
    return parallelize(model, mesh, replace(model.parallel_plan(), exact=EXACT, **plan))


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 33, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(sizes: tuple[int, int], optimizer: str, family: str, microbatches: int) -> list[Tensor]:
    """The losses and the norms of three steps, and the weights."""
    model = make(family, sizes)
    matrices = [each for each in model.parameters() if each.ndim == 2]
    step = OPTIMIZERS[optimizer](matrices if optimizer == "muon" else model.parameters())
    criterion: Any = cross_entropy
    inputs = {}
    if family == "mixtral":
        criterion, inputs = RouterLosses(cross_entropy, balance=0.05, z=0.01), {"router": True}
    results = []
    for _ in range(3):
        results.append(forward_backward(model, criterion, *batch(), microbatches=microbatches, **inputs).detach())
        results.append(clip_grad_norm_(model.parameters(), 0.1))
        step.step()
        step.zero_grad()
    return [*results, *(to_global(each.detach()) for each in model.parameters())]


def check_same(pool: Any, *arguments: Any) -> None:
    first, *further = [pool.run(train, sizes, *arguments, ranks=sizes[0] * sizes[1])[0] for sizes in MESHES]
    for sizes, found in zip(MESHES[1:], further, strict=True):
        for number, (expected, value) in enumerate(zip(first, found, strict=True)):
            assert torch.equal(expected, value), f"{sizes}: value {number} of {len(first)}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_norms_and_optimizers_outside_of_the_step_are_exact(pool: Any, optimizer: str) -> None:
    check_same(pool, optimizer, "llama", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("microbatches", [1, 8])
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_of_microbatches_and_of_routers_are_exact(pool: Any, family: str, microbatches: int) -> None:
    check_same(pool, "adamw", family, microbatches)


def norm_of_frozen_stage(stages: int) -> Tensor:
    """Clips outside of the step. The last layer and the head are frozen: with two stages, the whole last stage."""
    model = make_model(CONFIGS["llama"])
    initialize(model, seed=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0." in name or "embed" in name)
    pipeline = PipelinePlan(schedule="1f1b", microbatches=2) if stages > 1 else None
    axes = {"pp": stages, "dp": 1, "tp": 1} if stages > 1 else {"dp": 1, "tp": 1}
    plan = replace(model.parallel_plan(), exact=EXACT, pipeline=pipeline)
    model = parallelize(model, ProcessMesh.grid(**axes), plan)
    assert any(each.requires_grad for each in model.parameters()) == (dist.get_rank() == 0)
    forward_backward(model, cross_entropy, *batch(), microbatches=2)
    return clip_gradients(model, 0.1)


def test_a_frozen_stage_takes_part_in_the_exact_norm(pool: Any) -> None:
    (alone,) = pool.run(norm_of_frozen_stage, 1, ranks=1)
    for norm in pool.run(norm_of_frozen_stage, 2, ranks=2):
        assert torch.equal(norm, alone)


def train_from_meta(sizes: tuple[int, int], zero: int, adapted: bool) -> list[Tensor]:
    """As `weft train` does: laid out on the meta device, then allocated. Widths are no multiple of a vector."""
    with torch.device("meta"):
        model = make_model(replace(CONFIGS["llama"], hidden_size=12, head_dim=4))
    plan = replace(model.parallel_plan(), exact={"dp": 4}, zero=zero)
    model = parallelize(model, ProcessMesh.grid(dp=sizes[0]), plan).to_empty(device="cpu")
    initialize(model, seed=3)
    if adapted:
        lora(model, 3, 2.0, ["*_proj"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for _ in range(4):
        forward_backward(model, cross_entropy, *batch())
        optimizer.step()
        optimizer.zero_grad()
    return [to_global(each.detach()) for each in model.parameters()]


@pytest.mark.parametrize(("zero", "adapted"), [(1, False), (3, False), (1, True)], ids=["zero-1", "zero-3", "adapters"])
def test_steps_on_shards_are_exact_after_allocation(pool: Any, zero: int, adapted: bool) -> None:
    first, *further = [pool.run(train_from_meta, (dp, 1), zero, adapted, ranks=dp)[0] for dp in (1, 2, 4)]
    for found in further:
        for number, (expected, value) in enumerate(zip(first, found, strict=True)):
            assert torch.equal(expected, value), f"value {number} of {len(first)}"


def mean_by_torch(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sum_by_torch(logits: Tensor, targets: Tensor, denominator: Any = None) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / denominator


def error_of(sizes: tuple[int, int], criterion: Any, microbatches: int) -> str:
    model = make("llama", sizes)
    with pytest.raises(ValueError) as error:
        forward_backward(model, criterion, *batch(), microbatches=microbatches)
    return str(error.value)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)], ids=["one-rank", "dp-2"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("criterion", [mean_by_torch, sum_by_torch])
def test_criteria_computed_by_torch_are_refused(
    pool: Any, sizes: tuple[int, int], criterion: Any, microbatches: int
) -> None:
    for message in pool.run(error_of, sizes, criterion, microbatches, ranks=sizes[0] * sizes[1]):
        assert "exact dp=4,tp=2" in message
        assert "take weft.kernels.cross_entropy" in message or "take an op of weft.kernels" in message


def weighted(logits: Tensor, targets: Tensor, denominator: Any = None) -> Any:
    return 2.0 * cross_entropy(logits, targets, denominator=denominator)


def unweighted(logits: Tensor, targets: Tensor) -> Any:
    return cross_entropy(logits, targets)


@pytest.mark.exhaustive
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 1}, {"pp": 2, "dp": 2, "tp": 1}], ids=["dp-2", "pp-2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorded_step_takes_and_refuses_criteria_as_a_real_step(axes: dict[str, int], rank: int) -> None:
    with torch.device("meta"):
        model: Any = make_model(CONFIGS["llama"])
    pipeline = PipelinePlan(microbatches=2) if "pp" in axes else None
    plan = replace(model.parallel_plan(), exact=EXACT, pipeline=pipeline)
    step = partial(
        record, model, ProcessMesh.grid(**axes), plan, batch=(ROWS, LENGTH + 1), rank=rank * 2 if pipeline else rank
    )
    assert step(criterion=weighted).count == step(criterion=None).count > 0
    with pytest.raises(ValueError, match="the criterion unweighted cannot run with exact dp=4,tp=2"):
        step(criterion=unweighted, microbatches=2)


def own_loop() -> str:
    model = make("llama", (1, 1))
    with torch.no_grad():
        model(batch()[0])
    with pytest.raises(RuntimeError) as error:
        model(batch()[0])
    return str(error.value)


def test_a_forward_that_would_take_other_sums_is_refused(pool: Any) -> None:
    (message,) = pool.run(own_loop, ranks=1)
    assert "exact dp=4,tp=2" in message
    assert "forward_backward" in message


def train_in_context(
    sizes: dict[str, int], exact: dict[str, int], context: str, packed: bool, dtype: torch.dtype
) -> list[Tensor]:
    sizes_of_model = {**SIZES, "vocab_size": 32, "num_kv_heads": 4, "max_seq_len": 4}  # rows are longer: rope is scaled
    drops = {"dropout": 0.1, "attention_dropout": 0.1}
    config = LlamaConfig(**sizes_of_model, **drops, rope_scaling=DynamicRopeScaling(factor=2.0))
    model = make_model(config)
    initialize(model, seed=3)
    plan = replace(model.parallel_plan(), exact=exact, context=context)
    model = parallelize(model.to(dtype), ProcessMesh.grid(**sizes), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    length = 7 if "tp" not in exact else 8  # each cp rank's tokens are cut over tp
    documents = (torch.arange(length) >= torch.arange(ROWS)[:, None] % length).int() if packed else None
    tokens = torch.randint(0, 32, (ROWS, length + 1), generator=torch.Generator().manual_seed(5))
    results = []
    for step in range(2):
        given = {} if documents is None else {"documents": documents}
        loss = forward_backward(
            model, cross_entropy, tokens[:, :-1], tokens[:, 1:], microbatches=2, dropout_key=step, **given
        )
        results += [loss.detach(), clip_grad_norm_(model.parameters(), 0.1)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(to_global(each.detach()) for each in model.parameters())]


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])


def check_in_context(pool: Any, meshes: list[dict[str, int]], *arguments: Any) -> None:
    first, *further = [
        pool.run(train_in_context, each, *arguments, ranks=math.prod(each.values()))[0] for each in meshes
    ]
    for mesh, found in zip(meshes[1:], further, strict=True):
        for number, (expected, value) in enumerate(zip(first, found, strict=True)):
            assert torch.equal(expected, value), f"{mesh}: value {number} of {len(first)}"


@pytest.mark.exhaustive
@DTYPES
@PACKED
@pytest.mark.parametrize("context", ["all_gather", "ulysses"])
def test_tokens_over_context_ranks_are_exact(pool: Any, context: str, packed: bool, dtype: torch.dtype) -> None:
    exact = {"dp": 2, "cp": 2}
    check_in_context(pool, [exact | {"dp": dp} for dp in (1, 2)], exact, context, packed, dtype)


@pytest.mark.exhaustive
@DTYPES
@PACKED
def test_tokens_over_context_ranks_and_heads_over_tensor_ranks_are_exact(
    pool: Any, packed: bool, dtype: torch.dtype
) -> None:
    meshes = [{"dp": dp, "cp": 2, "tp": tp} for dp, tp in ((1, 1), (1, 2), (2, 1))]
    check_in_context(pool, meshes, {"dp": 2, "cp": 2, "tp": 2}, "all_gather", packed, dtype)


OUTPUTS: dict[str, Any] = {
    "mean": lambda x: x * x.mean(1, keepdim=True),
    "sum": lambda x: x * (1 + x.sum() * 1e-3),
    "elements": lambda x: x + torch.tanh(x),
    "rows": lambda x: x + torch.softmax(x, -1),
}


def with_output(output: str, sizes: tuple[int, int]) -> str | list[Tensor]:
    model = make_model(CONFIGS["llama"])
    initialize(model, seed=3)
    model.layers[0].register_forward_hook(lambda module, args, x: OUTPUTS[output](x))
    parallelize(model, ProcessMesh.grid(dp=sizes[0], tp=1), replace(model.parallel_plan(), exact={"dp": 4}))
    try:
        loss = forward_backward(model, cross_entropy, *batch())
    except ValueError as error:
        return str(error)
    return [loss.detach(), *(to_global(each.grad) for each in model.parameters())]


@pytest.mark.parametrize("output", ["mean", "sum"])
def test_sums_of_torch_in_a_model_are_refused(pool: Any, output: str) -> None:
    for sizes in [(1, 1), (2, 1)]:
        for message in pool.run(with_output, output, sizes, ranks=sizes[0]):
            assert f"torch's {output} of a DTensor cannot run with exact dp=4" in message


@pytest.mark.exhaustive
@pytest.mark.parametrize("output", ["elements", "rows"])
def test_torch_on_elements_and_rows_is_exact(pool: Any, output: str) -> None:
    first, second = (pool.run(with_output, output, (dp, 1), ranks=dp)[0] for dp in (1, 2))
    for expected, value in zip(first, second, strict=True):
        assert torch.equal(expected, value)


def norms(sizes: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """The norm of each parameter's gradient: by Weft, and by torch."""
    model = make("llama", sizes)
    forward_backward(model, cross_entropy, *batch())
    by_weft = [clip_grad_norm_([each], 1e9) for each in model.parameters()]
    by_torch = [to_global(torch.nn.utils.get_total_norm([each.grad])) for each in model.parameters()]
    clipped = [to_global(torch.nn.utils.clip_grad_norm_([each], 1e9)) for each in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(clipped, by_torch, strict=True))
    return by_weft, by_torch


@pytest.mark.exhaustive
def test_the_norm_by_torch_depends_on_the_mesh(pool: Any) -> None:
    """Torch has no place where the norm of such gradients could be refused; the guide warns."""
    (weft, own), *further = [pool.run(norms, sizes, ranks=sizes[0] * sizes[1])[0] for sizes in MESHES]
    for by_weft, by_torch in further:
        assert all(torch.equal(a, b) for a, b in zip(weft, by_weft, strict=True))
        torch.testing.assert_close(by_torch, by_weft)
    assert any(not torch.equal(a, b) for _, by_torch in further for a, b in zip(own, by_torch, strict=True))


def compiled() -> str:
    model = make("llama", (1, 1))
    model.layers[0].compile()
    with pytest.raises(ValueError) as error:
        forward_backward(model, cross_entropy, *batch())
    return str(error.value)


def test_a_compiled_model_is_refused(pool: Any) -> None:
    (message,) = pool.run(compiled, ranks=1)
    assert "the model is compiled" in message
