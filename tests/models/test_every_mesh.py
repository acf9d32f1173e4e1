"""Training on every mesh of up to 8 processes equals training on a process, for every family and every valid plan.

A table over pp, dp, cp and tp, sequence and context parallelism, the ZeRO levels and the pipeline schedules; for models
with experts also over ep, with tp folded in and without.
Compared are the loss, every gradient, and the weights after three AdamW steps whose gradients are clipped. A new
family adds a config; a new way to lay out or to recompute adds a value to its list.

The kinds of recomputation, and for models with experts the schedules and the ways of tokens to experts, alternate from
case to case: for any mesh and plan, each kind is used with a family.
In every RECORDED-th case, a rank also records the step on shapes, and must issue the recorded collectives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
    ExpertPlan,
    GPTConfig,
    LlamaConfig,
    MixtralConfig,
    PipelinePlan,
    QwenConfig,
    QwenMoeConfig,
    RouterLosses,
    initialize,
    parallelize,
    record,
)
from weft.models.config import MixtureConfig, ModelConfig
from weft.models.families import make_model
from weft.models.parallel.parallelize import pipeline_of
from weft.models.schedules.schedule import NAMES
from weft.models.step.find_gradients import clip_gradients, find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.reshard import GradientSync, layout_of

from tests.models.cases import ALLOWED, deviation
from tests.models.stepping import observed_microbatches

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_heads": 8, "max_seq_len": 16, "intermediate_size": 24
}  # fmt: skip
GATED: dict[str, Any] = {**SIZES, "head_dim": 4, "num_kv_heads": 4}
EXPERTS = 8
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
FAMILIES: dict[str, ModelConfig] = {
    "llama": LlamaConfig(**GATED, **DROPOUT),
    "qwen2": QwenConfig(**GATED, **DROPOUT, version=2, sliding_window=5, sliding_layers=(1,), tie_embeddings=True),
    "qwen3": QwenConfig(**GATED, **DROPOUT),
    "gpt": GPTConfig(**SIZES, **DROPOUT),
    "mixtral": MixtralConfig(**GATED, **DROPOUT, num_experts=EXPERTS),
    "qwen3_moe": QwenMoeConfig(
        **GATED, **DROPOUT, num_experts=EXPERTS, experts_per_token=3, moe_intermediate_size=12, mlp_only_layers=(0,)
    ),
}
BALANCE, Z = 0.3, 0.05  # coefficients of the routers' losses
WAYS = ("gather", "exchange")
CONTEXTS = ("all_gather", "ulysses")
RECOMPUTES = ("none", "selective", "full")
ROWS, LENGTH = 5, 11  # no axis of a mesh divides both, or either unless its size is 1 or 5
MICROBATCHES = 4  # of three rows each, where there are stages
KEY = derive_key(3, "dropout", 0)
RECORDED = 16  # every 16th case is recorded and observed, which takes several times as long as the step
AT_ONCE = 16  # plans of a family and mesh in a call of the worker processes
STEPS = 3
LR, EPS = 1e-2, 1e-3
CLIP = 0.1  # below the norms, which are above 1: all gradients are clipped
# AdamW divides each gradient by its size, so an update errs by at most LR / EPS times the error of a gradient, which
# is at most CLIP.
DRIFT = STEPS * LR / EPS * ALLOWED * CLIP
Sizes = tuple[int, int, int, int]  # of pp, dp, cp and tp
Case = tuple[str, int]  # a family, and the number of a plan for the mesh


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of a single process: loss and gradients of the first step, norms and weights of all steps."""

    loss: float
    gradients: dict[str, Tensor]
    norms: list[float]
    weights: dict[str, Tensor]


def meshes() -> list[Sizes]:
    """Meshes of 2 to 8 processes whose tp divides the heads."""
    heads = SIZES["num_heads"]
    each = product(range(1, 9), repeat=4)
    return [(pp, dp, cp, tp) for pp, dp, cp, tp in each if 1 < pp * dp * cp * tp <= 8 and heads % tp == 0]


def mesh_of(sizes: Sizes) -> ProcessMesh:
    """The mesh of these sizes; axes of size 1 are named, too, except pp.

    With tp and more than three processes in a stage, axes of size 1 are left out: on three axes DTensor tries
    thousands of placement combinations for each sum of two gradients.
    """
    named = sizes[3] == 1 or math.prod(sizes[1:]) <= 3
    axes = zip(("pp", "dp", "cp", "tp"), sizes, strict=True)
    return ProcessMesh.grid(**{axis: size for axis, size in axes if size > 1 or (named and axis != "pp")})


def plans(sizes: Sizes, turn: int) -> list[dict[str, Any]]:
    """The plans for a mesh, as changes to the model's own plan. turn: the family's index."""
    pp, dp, cp, tp = sizes
    heads, has_experts = GATED["num_kv_heads"], isinstance([*FAMILIES.values()][turn], MixtureConfig)
    pipelines = [PipelinePlan(schedule=name, microbatches=MICROBATCHES) for name in NAMES] if pp > 1 else [None]
    kinds = [kind for kind in CONTEXTS if kind == "all_gather" or heads % (cp * tp) == 0] if cp > 1 else [None]
    options = product(
        (False, True) if tp > 1 else (False,),
        kinds,
        range(4) if dp * cp > 1 else (0,),
        pipelines[:1] if has_experts else pipelines,
        expert_plans(sizes) if has_experts else [None],
    )
    found = []
    for number, (sequence, context, zero, pipeline, experts) in enumerate(options):
        recompute = RECOMPUTES[(sum((dp, cp, tp)) + number + turn) % len(RECOMPUTES)]
        if has_experts:
            pipeline = pipelines[(number + zero + turn) % len(pipelines)]
        if experts is not None:
            experts = replace(experts, tokens=WAYS[(number // len(RECOMPUTES) + zero) % len(WAYS)])
        each = {"sequence": sequence, "context": context, "zero": zero, "pipeline": pipeline, "recompute": recompute}
        found.append(each | {"experts": experts})
    plain = [each for each in found if each["zero"] == 0 and each["pipeline"] is None]
    return found + [each | {"recompute": kind} for each in plain for kind in RECOMPUTES if kind != each["recompute"]]


def expert_plans(sizes: Sizes) -> list[ExpertPlan | None]:
    """Without experts' mesh, and with each size of "ep" that divides experts and mesh, with tp folded in or not."""
    _, dp, cp, tp = sizes
    degrees = [size for size in range(2, EXPERTS + 1) if EXPERTS % size == 0]
    own: list[ExpertPlan | None] = [ExpertPlan(size=size) for size in degrees if dp * cp % size == 0]
    over_tp = [ExpertPlan(size=size, over_tp=True) for size in degrees if tp > 1 and dp * cp * tp % size == 0]
    return [None, *own, *over_tp]


def rows_of(microbatches: int) -> int:
    return ROWS if microbatches == 1 else 3 * microbatches


def batch(rows: int = ROWS, step: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 31, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
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


def criterion_of(model: Any, microbatches: int) -> Any:
    of_logits = partial(cross_entropy, denominator=float(rows_of(microbatches) * LENGTH))
    if not isinstance(model.config, MixtureConfig):
        return of_logits
    return RouterLosses(of_logits, balance=BALANCE, z=Z, microbatches=microbatches)


def inputs_of(model: Any, key: int) -> dict[str, Any]:
    return {"dropout_key": key} | ({"router": True} if isinstance(model.config, MixtureConfig) else {})


class Training:
    """Training steps of a model on a mesh or on a process."""

    def __init__(self, model: Any, microbatches: int) -> None:
        self.model, self._count = model, microbatches
        self._rows = rows_of(microbatches)
        self.criterion = criterion_of(model, microbatches)
        self.sync = GradientSync(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)

    def microbatches(self, step: int) -> list[Any]:
        key = derive_key(3, "dropout", step)
        return divide_batch(self.model, *batch(self._rows, step), self._count, inputs_of(self.model, key))

    def gradients(self, step: int) -> Any:
        return find_gradients(self.model, self.criterion, self.microbatches(step), self.sync)

    def update(self) -> float:
        """Clip the gradients, update the weights, and return the gradients' norm."""
        norm = clip_gradients(self.model, CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm.item()

    def go_on(self, first: float) -> list[float]:
        """The steps after the first; the norms of all."""
        norms = [first]
        for step in range(1, STEPS):
            self.gradients(step)
            norms.append(self.update())
        return norms


@functools.cache
def alone(family: str, layers: int, microbatches: int) -> Trained:
    model = make(replace(FAMILIES[family], num_layers=layers))
    training = Training(model, microbatches)
    loss = training.gradients(0).loss.item()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    norms = training.go_on(training.update())
    assert min(norms) > 2 * CLIP, "the clipping bites"
    return Trained(loss, gradients, norms, {name: each.detach() for name, each in model.named_parameters()})


def needs(sizes: Sizes, changes: dict[str, Any]) -> tuple[int, int]:
    """The least numbers of layers (at least 2, and a layer for each stage) and of microbatches."""
    pipeline = changes["pipeline"]
    if pipeline is None:
        return SIZES["num_layers"], 1
    return max(SIZES["num_layers"], pipeline.make_schedule(sizes[0]).num_stages), pipeline.microbatches


def each_case(
    sizes: Sizes, cases: Sequence[Case], truths: dict[tuple[str, int, int], Trained]
) -> list[tuple[list[str], set[str], tuple[float, float]]]:
    """For each case: the failures, the parameters on this rank, and the errors of loss and worst gradient."""
    found = []
    for family, number in cases:
        changes = plans(sizes, list(FAMILIES).index(family))[number]
        recorder = number // RECORDED % math.prod(sizes) if number % RECORDED == 0 else None
        layers, microbatches = needs(sizes, changes)
        model = make(replace(FAMILIES[family], num_layers=layers))
        said, *by = one_plan(model, sizes, changes, recorder, microbatches, truths[family, layers, microbatches])
        wrong = [f"{family}, {changes}: {each}" for each in said]
        found.append((wrong, {name for name, _ in model.named_parameters()}, (by[0], by[1])))
    return found


def one_plan(
    model: Any, sizes: Sizes, changes: dict[str, Any], recorder: int | None, microbatches: int, truth: Trained
) -> tuple[list[str], float, float]:
    mesh, rank, wrong = mesh_of(sizes), dist.get_rank(), list[str]()
    plan = replace(model.parallel_plan(), **changes)
    shape = rows_of(microbatches), LENGTH
    if rank == recorder:
        more: dict[str, Any] = {}
        if isinstance(model.config, MixtureConfig):
            more = {"criterion": criterion_of(model, microbatches), "microbatches": microbatches}
        recorded = record(
            model, mesh, plan, batch=shape, rank=rank, inputs=inputs_of(model, KEY), clip_norm=1e9, **more
        )
    training = Training(parallelize(model, mesh, plan), microbatches)

    if recorder is None:
        found = training.gradients(0)
    else:
        parts = training.microbatches(0)
        found, issued = observed_microbatches(model, training.criterion, parts, training.sync, clip_norm=1e9)
        if rank == recorder and not recorded.predicts(issued):
            wrong.append(f"issued\n{issued}\nrecorded\n{recorded}")
    of_loss = abs(found.loss.item() - truth.loss) / truth.loss
    if not of_loss <= 1e-6:
        wrong.append(f"the loss is {found.loss.item()}, and {truth.loss} on one process")
    pipeline = pipeline_of(model)
    if pipeline is not None:
        planned = pipeline.schedule.actions[(mesh.coordinate(rank) or {})["pp"]]
        if tuple(pipeline.ran) != planned:
            wrong.append(f"it ran {pipeline.ran}, planned were {planned}")
    largest = {name: each.abs().max().item() for name, each in truth.gradients.items()}
    of_gradients = 0.0
    for name, parameter in model.named_parameters():
        off = deviation(*beside(parameter.grad, truth.gradients[name]), largest[name], max(largest.values()))
        of_gradients = max(of_gradients, off)
        if not off <= ALLOWED:
            wrong.append(f"the gradient of {name} is off by {off} on rank {rank}")

    norms = training.go_on(training.update())
    if norms != pytest.approx(truth.norms, rel=1e-4):
        wrong.append(f"the norms are {norms}, and {truth.norms} on one process")
    for name, parameter in model.named_parameters():
        mine, expected = beside(parameter.detach(), truth.weights[name])
        worst = (mine - expected).abs().max().item() if expected.numel() else 0.0
        if not worst <= 1e-5 * truth.weights[name].abs().max().item() + DRIFT:
            wrong.append(f"{name} is off by {worst} after {STEPS} steps on rank {rank}")
    return wrong, of_loss, of_gradients


def beside(found: Any, truth: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's shard of a tensor and of the truth; both whole where a stage has a single process."""
    if isinstance(found, DTensor):
        truth = truth[layout_of(found).local_slices(found.shape, dist.get_rank())]
        found = found.to_local()
    assert found.shape == truth.shape
    return found, truth


# Their sisters with stages and with every level are in test_pipeline.py and test_zero.py.
QUICK: dict[Sizes, list[Case]] = {
    (1, 1, 2, 1): [("llama", 0), ("llama", 7)],
    (1, 1, 1, 2): [("gpt", 0), ("gpt", 1)],
    (1, 2, 1, 1): [("qwen3_moe", 7), ("mixtral", 5)],  # both over ep
}


def table() -> Iterator[Any]:
    """Entries of a mesh with several cases: a call of the worker processes makes the mesh's groups for all cases."""
    for sizes in meshes():
        name = "pp{}-dp{}-cp{}-tp{}".format(*sizes)
        quick = QUICK.get(sizes, [])
        if quick:
            yield pytest.param(sizes, quick, id=f"{name}-quick")
        for turn, family in enumerate(FAMILIES):
            left = [case for number in range(len(plans(sizes, turn))) if (case := (family, number)) not in quick]
            for first in range(0, len(left), AT_ONCE):
                some = left[first : first + AT_ONCE]
                yield pytest.param(sizes, some, id=f"{name}-{family}-from{first}", marks=pytest.mark.exhaustive)


@pytest.mark.table
@pytest.mark.parametrize(("sizes", "cases"), list(table()))
def test_paddlenlp_9412_loss_and_gradients_of_one_process_with_recomputation_and_weights_after_steps(
    sizes: Sizes,
    cases: list[Case],
    pool: Any,
    combinations: Callable[[int], None],
    greatest: Callable[[float, float], None],
) -> None:
    combinations(len(cases))
    needed = [(f, *needs(sizes, plans(sizes, list(FAMILIES).index(f))[number])) for f, number in cases]
    truths = {each: alone(*each) for each in set(needed)}
    found = pool.run(each_case, sizes, cases, truths, ranks=math.prod(sizes))
    by_case = [each for of_rank in found for each in of_rank]
    losses, gradients = zip(*(off for _, _, off in by_case), strict=True)
    greatest(max(losses), max(gradients))
    assert not any(wrong for wrong, _, _ in by_case), "\n".join(said for wrong, _, _ in by_case for said in wrong)
    for number, each in enumerate(needed):
        assert set().union(*(of_rank[number][1] for of_rank in found)) == truths[each].weights.keys()


def test_the_table_has_every_kind_of_mesh_and_plan() -> None:
    """Fails when a mesh axis or a plan option is added and the table lacks it."""
    kinds = {tuple(size > 1 for size in sizes) for sizes in meshes()}
    assert kinds == set(product((False, True), repeat=4)) - {
        (False,) * 4,
        (True,) * 4,
    }  # a single process has no mesh; four axes need 16 processes
    every = [changes for sizes in meshes() for turn in range(len(FAMILIES)) for changes in plans(sizes, turn)]
    for option in ("sequence", "context", "recompute", "zero", "pipeline", "experts"):
        assert option in {field.name for field in fields(type(make_model(FAMILIES["llama"]).parallel_plan()))}
        assert len({changes[option] for changes in every}) > 1
    experts = [changes["experts"] for changes in every if changes["experts"] is not None]
    assert {(each.size, each.over_tp, each.tokens) for each in experts} == set(product((2, 4, 8), (False, True), WAYS))
    assert {changes["zero"] for changes in every} == set(range(4))
    assert {changes["pipeline"].schedule for changes in every if changes["pipeline"] is not None} == set(NAMES)
