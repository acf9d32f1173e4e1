"""The loss and every gradient of one process, for every family on every mesh of up to 8 processes, under every plan that fits it.

One table: a family is one config more, a way to lay out or to recompute one value more. The ways to recompute take turns: with a
mesh and the rest of a plan each of them is seen in one family or another. Some steps are recorded on shapes too, by one of their
ranks, and issue what was recorded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
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
from weft.models import GPTConfig, LlamaConfig, QwenConfig, initialize, lay_out_batch, parallelize, record
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.parallel.pipeline.run import Microbatch
from weft.models.train.step import find_gradients
from weft.reshard import GradientSync, layout_of

from tests.models.stepping import observed_step

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_heads": 8, "max_seq_len": 16, "intermediate_size": 24
}  # fmt: skip
GATED: dict[str, Any] = {**SIZES, "head_dim": 4, "num_kv_heads": 4}
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
FAMILIES: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**GATED, **DROPOUT),
    "qwen2": QwenConfig(**GATED, **DROPOUT, version=2, sliding_window=5, sliding_layers=(1,), tie_embeddings=True),
    "qwen3": QwenConfig(**GATED, **DROPOUT),
    "gpt": GPTConfig(**SIZES, **DROPOUT),
}
CONTEXTS = ("all_gather", "ulysses")
RECOMPUTES = ("none", "selective", "full")
ROWS, LENGTH = 5, 11  # neither is divided by any mesh but one of 1 or 5
KEY = derive_key(3, "dropout", 0)
RECORDED = 4  # one plan in so many: what is recorded takes longer than what runs
ROUNDING = (
    1e-7  # of the model's largest gradient: some are 0 but for that, as of a bias of all keys, which no softmax sees
)
Sizes = tuple[int, int, int]  # of dp, cp and tp


def meshes() -> list[Sizes]:
    """Those of 2 to 8 processes whose tp divides the heads."""
    heads = SIZES["num_heads"]
    each = product(range(1, 9), repeat=3)
    return [(dp, cp, tp) for dp, cp, tp in each if 1 < dp * cp * tp <= 8 and heads % tp == 0]


def mesh_of(sizes: Sizes) -> ProcessMesh:
    """Its axes of one process are named too, but beside tp on more than three processes: of three axes DTensor goes through all
    placements, thousands, for each sum of two gradients."""
    named = sizes[2] == 1 or math.prod(sizes) <= 3
    axes = zip(("dp", "cp", "tp"), sizes, strict=True)
    return ProcessMesh.grid(**{axis: size for axis, size in axes if named or size > 1})


def plans(sizes: Sizes, turn: int) -> Iterator[dict[str, Any]]:
    """What makes sense on such a mesh, as changes of a model's own plan. turn: of the family."""
    _, cp, tp = sizes
    heads = GATED["num_kv_heads"]
    kinds = [kind for kind in CONTEXTS if kind == "all_gather" or heads % (cp * tp) == 0] if cp > 1 else [None]
    for number, (sequence, context) in enumerate(product((False, True) if tp > 1 else (False,), kinds)):
        recompute = RECOMPUTES[(sum(sizes) + number + turn) % len(RECOMPUTES)]
        yield {"sequence": sequence, "context": context, "recompute": recompute}


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 31, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make(config: ModelConfig) -> Any:
    """A model whose biases and norms are random too."""
    model = make_model(config)
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def alone(config: ModelConfig) -> tuple[float, dict[str, Tensor]]:
    model = make(config)
    tokens, targets = batch()
    microbatch = Microbatch(args=(tokens,), kwargs={"dropout_key": KEY}, targets=targets)
    found = find_gradients(model, cross_entropy, [microbatch], GradientSync(model))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found.loss.item(), {name: grad for name, grad in gradients.items() if grad is not None}


def each_family(sizes: Sizes, truths: dict[str, tuple[float, dict[str, Tensor]]]) -> list[str]:
    """What is wrong, by family and plan."""
    wrong = []
    for family, truth in truths.items():
        turn = list(FAMILIES).index(family)
        for number, changes in enumerate(plans(sizes, turn)):
            recorder = (number // RECORDED) % math.prod(sizes) if number % RECORDED == 0 else None
            said = one_plan(FAMILIES[family], sizes, changes, recorder, *truth)
            wrong += [f"{family}, {changes}: {each}" for each in said]
    return wrong


def one_plan(
    config: ModelConfig,
    sizes: Sizes,
    changes: dict[str, Any],
    recorder: int | None,
    loss: float,
    gradients: dict[str, Tensor],
) -> Iterator[str]:
    mesh = mesh_of(sizes)
    model, rank = make(config), dist.get_rank()
    plan = replace(model.parallel_plan(), **changes)
    inputs = {"dropout_key": KEY}
    if rank == recorder:
        recorded = record(model, mesh, plan, batch=(ROWS, LENGTH), rank=rank, inputs=inputs, clip_norm=1e9)
    parallelize(model, mesh, plan)
    laid = lay_out_batch(mesh, plan, *batch())

    assert laid.targets is not None, "they were given"
    criterion = partial(cross_entropy, denominator=float(ROWS * LENGTH))
    given = {"positions": laid.positions, **inputs}
    found, issued = observed_step(model, criterion, laid.tokens, laid.targets, inputs=given, clip_norm=1e9)
    if rank == recorder and recorded != issued:
        yield f"issued\n{issued}\nrecorded\n{recorded}"
    if abs(found.loss.item() - loss) > 1e-6 * loss:
        yield f"the loss is {found.loss.item()}, and {loss} on one process"
    floor = ROUNDING * max(each.abs().max().item() for each in gradients.values())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor), name
        expected = gradients[name][layout_of(grad).local_slices(grad.shape, rank)]
        worst = (grad.to_local() - expected).abs().max().item() if expected.numel() else 0.0
        if not worst <= 1e-5 * gradients[name].abs().max().item() + floor:
            yield f"the gradient of {name} is off by {worst} on rank {rank}"


QUICK = {(1, 2, 1): ("llama",), (1, 1, 2): ("gpt",)}


def table() -> Iterator[Any]:
    """A mesh and families: all on one mesh in one call, which makes its groups once."""
    for sizes in meshes():
        name = "dp{}-cp{}-tp{}".format(*sizes)
        quick = QUICK.get(sizes, ())
        if quick:
            yield pytest.param(sizes, quick, id=f"{name}-{'-'.join(quick)}")
        left = tuple(family for family in FAMILIES if family not in quick)
        yield pytest.param(sizes, left, id=f"{name}-{'-'.join(left)}", marks=pytest.mark.exhaustive)


@functools.cache
def alone_once(family: str) -> tuple[float, dict[str, Tensor]]:
    return alone(FAMILIES[family])


@pytest.mark.table
@pytest.mark.parametrize(("sizes", "families"), list(table()))
def test_paddlenlp_9412_loss_and_gradients_of_one_process_with_recomputation_too(
    sizes: Sizes, families: tuple[str, ...], pool: Any, combinations: Callable[[int], None]
) -> None:
    combinations(sum(len(list(plans(sizes, list(FAMILIES).index(family)))) for family in families))
    truths = {family: alone_once(family) for family in families}
    found = pool.run(each_family, sizes, truths, ranks=math.prod(sizes))
    assert not any(found), "\n".join(said for wrong in found for said in wrong)


def test_the_table_has_every_kind_of_mesh_and_plan() -> None:
    """A new axis or option has to be added to it."""
    assert {(dp > 1, cp > 1, tp > 1) for dp, cp, tp in meshes()} == set(product((False, True), repeat=3)) - {
        (False,) * 3
    }
    every = [changes for sizes in meshes() for turn in range(len(FAMILIES)) for changes in plans(sizes, turn)]
    for option in ("sequence", "context", "recompute"):
        assert option in {field.name for field in fields(type(make_model(FAMILIES["llama"]).parallel_plan()))}
        assert len({changes[option] for changes in every}) > 1
