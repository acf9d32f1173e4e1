"""With `exact`, training has the same bits on every mesh whose axes divide the named axes, under every plan.

`torch.equal` compares losses, norms and weights of three steps. The truth is computed by a single rank, which stands
for the whole named mesh; every mesh and plan must give the same bits. Training without `exact` gives numbers close to
the truth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, derive_key
from weft.models import (
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    PipelinePlan,
    QwenConfig,
    QwenMoeConfig,
    RouterLosses,
    initialize,
    parallelize,
)
from weft.models.config import MixtureConfig, ModelConfig
from weft.models.families import make_model
from weft.models.schedules.schedule import NAMES
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.reshard import GradientSync, exact_sums, layout_of

SIZES: dict[str, Any] = {
    "vocab_size": 33, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16, "intermediate_size": 48
}  # fmt: skip
GATED: dict[str, Any] = {**SIZES, "head_dim": 8, "num_kv_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
FAMILIES: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**GATED),
    "llama-tied": LlamaConfig(**GATED, **DROPOUT, tie_embeddings=True),
    "qwen2": QwenConfig(**GATED, **DROPOUT, version=2, sliding_window=5, sliding_layers=(1,)),
    "qwen3": QwenConfig(**GATED, **DROPOUT),
    "gpt": GPTConfig(**SIZES, **DROPOUT, tie_embeddings=False),
    "mixtral": MixtralConfig(**GATED, num_experts=4, experts_per_token=2, seq_aux=True),
    "qwen3-moe": QwenMoeConfig(**GATED, **EXPERTS, moe_intermediate_size=24, shared_expert_size=16),
}
ROWS, LENGTH, STEPS = 32, 12, 3  # rows of 4 microbatches over dp=8
CLIP = 0.1  # below every norm, so all gradients are clipped
Sizes = tuple[int, int, int, int]  # of pp, dp, cp, tp
Named = tuple[tuple[str, int], ...]
NAMED: list[Named] = [(("dp", 4), ("tp", 2)), (("dp", 2), ("tp", 2)), (("dp", 8),), (("dp", 2), ("cp", 2))]


@dataclass(frozen=True, slots=True)
class Trained:
    losses: list[Tensor]
    norms: list[Tensor]
    shards: dict[str, tuple[Any, Tensor]]  # by weight: the slices on this rank, and the values


def mesh_of(sizes: Sizes, named: Named) -> ProcessMesh:
    axes = dict(zip(("pp", "dp", "cp", "tp"), sizes, strict=True))
    return ProcessMesh.grid(**{axis: size for axis, size in axes.items() if size > 1 or axis in dict(named)})


def make(family: str, layers: int, dtype: torch.dtype) -> Any:
    model = make_model(replace(FAMILIES[family], num_layers=layers))
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 33, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(model: Any, microbatches: int, exact: Any) -> Trained:
    """Train for STEPS steps; a mixture with the losses of routers."""
    from weft.models.step.find_gradients import clip_gradients

    sync = GradientSync(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    criterion: Any = partial(cross_entropy, denominator=float(ROWS * LENGTH))
    inputs: dict[str, Any] = {}
    if isinstance(model.config, MixtureConfig):
        criterion = RouterLosses(criterion, balance=0.05, z=0.01, microbatches=microbatches)
        inputs["router"] = True
    losses, norms = [], []
    for step in range(STEPS):
        with exact_sums(exact):
            inputs["dropout_key"] = derive_key(3, "dropout", step)
            parts = divide_batch(model, *batch(step), microbatches, inputs)
            losses.append(find_gradients(model, criterion, parts, sync).loss.detach().clone())
            norms.append(clip_gradients(model, CLIP).detach().clone())
            optimizer.step()
            optimizer.zero_grad()
    shards = {}
    for name, each in model.named_parameters():
        value = each.detach()
        if isinstance(value, DTensor):
            slices = layout_of(value).local_slices(value.shape, dist.get_rank())
            shards[name] = tuple((part.start, part.stop) for part in slices), value.to_local().clone()
        else:
            shards[name] = tuple((0, size) for size in value.shape), value.clone()
    return Trained(losses, norms, shards)


def on_mesh(
    sizes: Sizes, named: Named, family: str, changes: dict[str, Any], dtype: torch.dtype, layers: int
) -> Trained:
    microbatches = changes.pop("microbatches")
    model = make(family, layers, dtype)
    plan = replace(model.parallel_plan(), exact=dict(named), **changes)
    return train(parallelize(model, mesh_of(sizes, named), plan), microbatches, dict(named))


@functools.cache
def alone(family: str, layers: int, microbatches: int) -> Trained:
    return train(make(family, layers, torch.float32), microbatches, None)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def plans(sizes: Sizes, named: Named, family: str) -> list[dict[str, Any]]:
    """Four plans for a mesh: each level of zero, recomputation, with and without sequence.

    A mesh with stages has each schedule once, with another level of zero in the next family. In four families a mesh
    meets every schedule with every level.
    """
    pp = sizes[0]
    found: list[dict[str, Any]] = []
    schedules = [*NAMES] if pp > 1 else [None]
    turn = [*FAMILIES].index(family)
    for number, (schedule, zero) in enumerate(product(schedules, range(4))):
        if pp > 1 and (number // 4 + zero + turn) % 4:
            continue
        pipeline = None if schedule is None else PipelinePlan(schedule=schedule, microbatches=4)
        each: dict[str, Any] = {"zero": zero, "pipeline": pipeline, "microbatches": 4 if pp > 1 else 1}
        each["recompute"] = ("none", "full", "selective")[number % 3]
        each["context"] = ("all_gather", "ulysses")[number % 2] if dict(named).get("cp", 1) > 1 else None
        each["sequence"] = bool(number % 2)
        found.append(each)
    return found


def meshes(named: Named, family: str) -> list[Sizes]:
    sizes = dict(named)
    of = [[n for n in (1, 2, 4, 8) if sizes.get(axis, 1) % n == 0] for axis in ("dp", "tp")]
    cp = sizes.get("cp", 1)
    flat = [(1, dp, cp, tp) for dp, tp in product(*of) if dp * cp * tp <= 8]
    return flat + [(2, dp, cp, tp) for dp, tp in product(*of) if 2 * dp * cp * tp <= 8]


QUICK = {(1, 2, 1, 1), (1, 1, 1, 2)}


def cases() -> Iterator[Any]:
    for named, family in product(NAMED, FAMILIES):
        text = "-".join(f"{axis}{size}" for axis, size in named)
        for sizes in meshes(named, family):
            quick = family == "llama" and named == NAMED[1] and sizes in QUICK
            mark = [] if quick else [pytest.mark.exhaustive, pytest.mark.table]
            yield pytest.param(named, family, sizes, id=f"{text}-{family}-{'x'.join(map(str, sizes))}", marks=mark)


@functools.cache
def truth_of(
    pool: Any,
    named: Named,
    family: str,
    layers: int,
    microbatches: int,
    zero: int,
    context: str | None,
    dtype: torch.dtype,
) -> Trained:
    """Training on the fewest ranks: a single rank, or as many as the named mesh has along "cp".

    Kept: the meshes of a family share a truth.
    """
    sizes = (1, 1, dict(named).get("cp", 1), 1)
    changes = {"microbatches": microbatches, "context": context, "zero": zero}
    (first, *further) = pool.run(on_mesh, sizes, named, family, changes, dtype, layers, ranks=math.prod(sizes))
    return replace(
        first, shards={name: _whole([each.shards[name] for each in (first, *further)]) for name in first.shards}
    )


def _whole(shards: list[tuple[Any, Tensor]]) -> tuple[Any, Tensor]:
    """A whole weight, from (slices, shard) of all ranks."""
    shape = [max(stop for _, stop in of_ranks) for of_ranks in zip(*(slices for slices, _ in shards), strict=True)]
    whole = shards[0][1].new_empty(shape)
    for slices, shard in shards:
        whole[tuple(slice(*each) for each in slices)] = shard
    return tuple((0, size) for size in shape), whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("named", "family", "sizes"), list(cases()))
def test_training_has_the_same_bits_on_every_mesh(
    pool: Any, named: Named, family: str, sizes: Sizes, dtype: torch.dtype
) -> None:
    for changes in plans(sizes, named, family):
        pipeline, microbatches = changes["pipeline"], changes["microbatches"]
        layers = 2 if pipeline is None else max(2, pipeline.make_schedule(sizes[0]).num_stages)
        # Of several microbatches, zero 2 and 3 sum each over the ranks; zero 0 and 1 sum all microbatches first.
        # "ulysses" and "all_gather" multiply different queries and keys in a product.
        key = layers, microbatches, 2 if microbatches > 1 and changes["zero"] > 1 else 0, changes["context"]
        truth = truth_of(pool, named, family, *key, dtype)
        if dtype == torch.float32 and changes["context"] is None:
            ordinary = alone(family, layers, microbatches)
            torch.testing.assert_close(torch.stack(truth.losses), torch.stack(ordinary.losses), rtol=1e-4, atol=0)
            torch.testing.assert_close(torch.stack(truth.norms), torch.stack(ordinary.norms), rtol=1e-3, atol=0)
        for found in pool.run(on_mesh, sizes, named, family, changes, dtype, layers, ranks=math.prod(sizes)):
            for step in range(STEPS):
                assert same_bits(found.losses[step], truth.losses[step]), f"{changes}: the loss of step {step + 1}"
                assert same_bits(found.norms[step], truth.norms[step]), f"{changes}: the norm of step {step + 1}"
            for name, (slices, shard) in found.shards.items():
                whole = truth.shards[name][1]
                expected = whole[tuple(slice(*each) for each in slices)]
                assert same_bits(shard, expected), f"{changes}: {name} after {STEPS} steps"
