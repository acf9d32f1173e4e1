"""The loss and every gradient of one process, for every family on every mesh of up to 8 processes, under every plan that fits it.

One table: a family is one config more, a way to lay out or to recompute one value more. In the quick tests the ways to recompute take
turns; the exhaustive ones have each of them. Some steps are recorded on shapes too, by one of their ranks, and issue what was recorded.
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

from tests.models.cases import ALLOWED, deviation
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


def plans(sizes: Sizes, turn: int, in_turn: bool | None = None) -> Iterator[dict[str, Any]]:
    """What makes sense on such a mesh, as changes of a model's own plan.

    turn: of the family. in_turn: True for the one way to recompute whose turn it is, with each of the rest; False for the others.
    """
    _, cp, tp = sizes
    heads = GATED["num_kv_heads"]
    kinds = [kind for kind in CONTEXTS if kind == "all_gather" or heads % (cp * tp) == 0] if cp > 1 else [None]
    for number, (sequence, context) in enumerate(product((False, True) if tp > 1 else (False,), kinds)):
        its = RECOMPUTES[(sum(sizes) + number + turn) % len(RECOMPUTES)]
        for recompute in RECOMPUTES:
            if in_turn is None or (recompute == its) == in_turn:
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


def each_family(
    sizes: Sizes, truths: dict[str, tuple[float, dict[str, Tensor]]], in_turn: bool | None
) -> tuple[list[str], list[tuple[float, float]]]:
    """What is wrong, by family and plan; and how far the loss, and a gradient at most, are off in each."""
    wrong, off = [], []
    for family, truth in truths.items():
        turn = list(FAMILIES).index(family)
        every = list(plans(sizes, turn, in_turn))
        recorded = (turn + sum(sizes)) % len(every)  # one, as what is recorded takes longer than what runs
        for number, changes in enumerate(every):
            recorder = turn % math.prod(sizes) if number == recorded else None
            said, *by = one_plan(FAMILIES[family], sizes, changes, recorder, *truth)
            wrong += [f"{family}, {changes}: {each}" for each in said]
            off.append((by[0], by[1]))
    return wrong, off


def one_plan(
    config: ModelConfig,
    sizes: Sizes,
    changes: dict[str, Any],
    recorder: int | None,
    loss: float,
    gradients: dict[str, Tensor],
) -> tuple[list[str], float, float]:
    mesh = mesh_of(sizes)
    model, rank, wrong = make(config), dist.get_rank(), list[str]()
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
        wrong.append(f"issued\n{issued}\nrecorded\n{recorded}")
    of_loss = abs(found.loss.item() - loss) / loss
    if not of_loss <= 1e-6:
        wrong.append(f"the loss is {found.loss.item()}, and {loss} on one process")
    largest = {name: each.abs().max().item() for name, each in gradients.items()}
    of_gradients = 0.0
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor), name
        expected = gradients[name][layout_of(grad).local_slices(grad.shape, rank)]
        off = deviation(grad.to_local(), expected, largest[name], max(largest.values()))
        of_gradients = max(of_gradients, off)
        if not off <= ALLOWED:
            wrong.append(f"the gradient of {name} is off by {off} on rank {rank}")
    return wrong, of_loss, of_gradients


QUICK = {(1, 2, 1): ("llama",), (1, 1, 2): ("gpt",)}


def table() -> Iterator[Any]:
    """A mesh and families: all on one mesh in one call, which makes its groups once."""
    for sizes in meshes():
        name = "dp{}-cp{}-tp{}".format(*sizes)
        quick = QUICK.get(sizes, ())
        if quick:
            yield pytest.param(sizes, quick, True, id=f"{name}-{'-'.join(quick)}")
            yield pytest.param(sizes, quick, False, id=f"{name}-{'-'.join(quick)}-rest", marks=pytest.mark.exhaustive)
        left = tuple(family for family in FAMILIES if family not in quick)
        yield pytest.param(sizes, left, None, id=f"{name}-{'-'.join(left)}", marks=pytest.mark.exhaustive)


@functools.cache
def alone_once(family: str) -> tuple[float, dict[str, Tensor]]:
    return alone(FAMILIES[family])


@pytest.mark.table
@pytest.mark.parametrize(("sizes", "families", "in_turn"), list(table()))
def test_paddlenlp_9412_loss_and_gradients_of_one_process_with_recomputation_too(
    sizes: Sizes,
    families: tuple[str, ...],
    in_turn: bool | None,
    pool: Any,
    combinations: Callable[[int], None],
    greatest: Callable[[float, float], None],
) -> None:
    combinations(sum(len(list(plans(sizes, list(FAMILIES).index(family), in_turn))) for family in families))
    truths = {family: alone_once(family) for family in families}
    found = pool.run(each_family, sizes, truths, in_turn, ranks=math.prod(sizes))
    greatest(*(max(off) for off in zip(*(each for _, of_rank in found for each in of_rank), strict=True)))
    assert not any(wrong for wrong, _ in found), "\n".join(said for wrong, _ in found for said in wrong)


def test_the_table_has_every_kind_of_mesh_and_plan() -> None:
    """A new axis or option has to be added to it."""
    assert {(dp > 1, cp > 1, tp > 1) for dp, cp, tp in meshes()} == set(product((False, True), repeat=3)) - {
        (False,) * 3
    }
    every = [changes for sizes in meshes() for changes in plans(sizes, 0)]
    for option in ("sequence", "context", "recompute"):
        assert option in {field.name for field in fields(type(make_model(FAMILIES["llama"]).parallel_plan()))}
        assert len({changes[option] for changes in every}) > 1


def test_what_the_quick_tests_leave_of_a_mesh_is_in_the_exhaustive_ones() -> None:
    for sizes, families in QUICK.items():
        for turn in (list(FAMILIES).index(family) for family in families):
            quick, rest = (list(plans(sizes, turn, in_turn)) for in_turn in (True, False))
            assert len(rest) == 2 * len(quick)
            assert sorted(map(str, quick + rest)) == sorted(map(str, plans(sizes, turn)))
