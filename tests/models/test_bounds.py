"""Config numbers that would break a run's training are refused; a clip_norm of 0 clips nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from weft import kernels
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPT,
    DynamicRopeScaling,
    ExpertPlan,
    GPTConfig,
    LinearRopeScaling,
    Llama,
    Llama3RopeScaling,
    LlamaConfig,
    MixtralConfig,
    ParallelPlan,
    PipelinePlan,
    QwenConfig,
    QwenMoeConfig,
    RouterLosses,
    YarnRopeScaling,
    clip_gradients,
    forward_backward,
    initialize,
    parallelize,
)
from weft.models.config import ExpertOptions
from weft.models.step.forward_backward import divide_batch
from weft.models.train.config import (
    OPTIMIZERS,
    DataConfig,
    MeshConfig,
    MuonConfig,
    OptimizerConfig,
    PlanConfig,
    TrainConfig,
)
from weft.models.train.optimizer import make_optimizer
from weft.models.train.task_config import LoRAConfig

from tests.support.pool import Pool

SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
LLAMA = LlamaConfig(**SMALL, intermediate_size=24)
TOKENS = torch.arange(22).reshape(2, 11) % 61


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    forward_backward(model, cross_entropy, TOKENS[:, :-1], TOKENS[:, 1:])
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("limit", [0, 0.0, -0.0, math.inf])
@pytest.mark.parametrize(
    "model", [pytest.param(LLAMA, id="llama"), pytest.param(GPTConfig(**SMALL, max_seq_len=16), id="gpt")]
)
def test_a_limit_of_0_leaves_the_gradients_and_gives_their_norm(model: Any, limit: float) -> None:
    made = (Llama if isinstance(model, LlamaConfig) else GPT)(model)
    initialize(made, 0)
    before = gradients(made)
    norm = clip_gradients(made, OptimizerConfig(clip_norm=limit).clip_norm)
    assert norm.item() == pytest.approx(math.sqrt(sum(each.double().square().sum().item() for each in before.values())))
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, before[name]), name
        assert parameter.grad.abs().max() > 0, name


def norms(limit: float) -> tuple[float, float]:
    """Before and after clipping, on a mesh."""
    model = Llama(LLAMA)
    initialize(model, 0)
    parallelize(model, ProcessMesh.grid(dp=1, tp=2))
    forward_backward(model, cross_entropy, TOKENS[:, :-1], TOKENS[:, 1:])
    return clip_gradients(model, limit).item(), clip_gradients(model, math.inf).item()


@pytest.mark.parametrize(
    ("limit", "share"), [pytest.param(0.0, 1.0, id="none"), pytest.param(1e-3, None, id="clipped")]
)
def test_a_limit_on_a_mesh(limit: float, share: float | None, pool: Pool) -> None:
    for before, after in pool.run(norms, limit, ranks=2):
        assert after == pytest.approx(before * share if share else limit, rel=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_accepted_edge_trains(name: str) -> None:
    """The least that each bound lets through still moves every weight."""
    model = Llama(LLAMA)
    initialize(model, 0)
    before = {key: each.detach().clone() for key, each in model.named_parameters()}
    config = OptimizerConfig(name=name, lr=0.5, beta1=0.0, beta2=0.0, clip_norm=0, weight_decay=0)
    gradients(model)
    clip_gradients(model, config.clip_norm)
    make_optimizer(model, config).step()
    assert all(not torch.equal(each, before[key]) for key, each in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        pytest.param(OptimizerConfig, {"lr": 0}, "optimizer.lr is 0; it must be above 0", id="rate-0"),
        pytest.param(OptimizerConfig, {"lr": -1e-3}, "optimizer.lr is -0.001; it must be above 0", id="rate-below-0"),
        pytest.param(OptimizerConfig, {"lr": math.nan}, "optimizer.lr is nan; it must be above 0", id="rate-nan"),
        pytest.param(OptimizerConfig, {"lr": math.inf}, "optimizer.lr is inf; it must be above 0", id="rate-inf"),
        pytest.param(
            OptimizerConfig, {"beta1": 1.0}, "optimizer.beta1 is 1.0; it must be 0 or more, and below 1", id="beta1"
        ),
        pytest.param(
            OptimizerConfig, {"beta2": 1}, "optimizer.beta2 is 1; it must be 0 or more, and below 1", id="beta2"
        ),
        pytest.param(
            OptimizerConfig, {"beta2": -0.1}, "optimizer.beta2 is -0.1; it must be 0 or more", id="beta2-below-0"
        ),
        pytest.param(
            OptimizerConfig, {"clip_norm": -1}, "optimizer.clip_norm is -1; it must be 0 or more", id="clip-below-0"
        ),
        pytest.param(OptimizerConfig, {"clip_norm": math.nan}, "optimizer.clip_norm is nan; it must", id="clip-nan"),
        pytest.param(
            OptimizerConfig, {"weight_decay": math.inf}, "optimizer.weight_decay is inf; it must", id="decay-inf"
        ),
        pytest.param(
            OptimizerConfig, {"final_share": math.nan}, "optimizer.final_share is nan; it must", id="share-nan"
        ),
        pytest.param(OptimizerConfig, {"warmup_steps": -1}, "optimizer.warmup_steps is -1; it must", id="warmup"),
        pytest.param(DataConfig, {"batch_size": 0}, "data.batch_size is 0; it must be 1 or more", id="batch"),
        pytest.param(
            DataConfig, {"sequence_length": 0}, "data.sequence_length is 0; it must be 1 or more", id="sequence"
        ),
        pytest.param(
            TrainConfig, {"model": LLAMA, "timeout": 0}, "train.timeout is 0; it must be above 0", id="timeout"
        ),
        pytest.param(
            TrainConfig, {"model": LLAMA, "timeout": math.inf}, "train.timeout is inf; it must", id="timeout-inf"
        ),
        pytest.param(TrainConfig, {"model": LLAMA, "steps": 0}, "train.steps is 0; it must be 1 or more", id="steps"),
        pytest.param(
            PlanConfig, {"microbatches": -1}, "plan.microbatches is -1; it must be 1 or more", id="microbatches"
        ),
        pytest.param(PlanConfig, {"microbatches": 0}, "plan.microbatches is 0; it must be 1", id="no-microbatch"),
    ],
)  # fmt: skip
def test_an_option_that_would_stop_the_training_is_refused(kind: type, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as refused:
        kind(**options)
    assert said in str(refused.value)


NAN, INF = float("nan"), float("inf")
WRONG: dict[type, tuple[Any, ...]] = {
    int: ("2", True, 2.0, 1.5, NAN, INF, [2]), float: ("0.5", True, NAN, [0.5], 1j), bool: ("no", 1, 0.5, NAN, [], None)
}  # fmt: skip
OF_KINDS = [
    (OptimizerConfig, "optimizer", float, ("lr", "final_share", "weight_decay", "beta1", "beta2", "clip_norm")),
    (OptimizerConfig, "optimizer", int, ("warmup_steps", "decay_steps")),
    (MuonConfig, "optimizer.muon", float, ("momentum",)),
    (MuonConfig, "optimizer.muon", int, ("ns_steps",)),
    (MuonConfig, "optimizer.muon", bool, ("nesterov", "split_heads")),
    (DataConfig, "data", int, ("batch_size", "sequence_length")),
    (DataConfig, "data", bool, ("pack", "verify")),
    (MeshConfig, "mesh", int, ("pp", "dp", "cp", "tp", "ep")),
    (PlanConfig, "plan", int, ("microbatches", "zero")),
    (PlanConfig, "plan", bool, ("sequence", "experts_over_tp")),
    (LoRAConfig, "lora", float, ("alpha", "dropout")),
]


@pytest.mark.parametrize(
    ("config", "where", "kind", "names"), OF_KINDS, ids=[f"{where}-{kind.__name__}" for _, where, kind, _ in OF_KINDS]
)
def test_values_of_another_kind_are_refused(config: Any, where: str, kind: type, names: tuple[str, ...]) -> None:
    """Of configurations made in Python: on the command line and in a file, tyro makes the values."""
    for name in names:
        for value in WRONG[kind]:
            with pytest.raises(ValueError, match=rf"^{where}\.{name} is .*; it must be "):
                config(**{name: value})


GATED: dict[str, Any] = {**SMALL, "intermediate_size": 24}
YARN: dict[str, Any] = {"factor": 2.0, "original_max_seq_len": 16}
RIGHT: dict[type, dict[str, Any]] = {
    LlamaConfig: GATED,
    GPTConfig: SMALL,
    QwenConfig: {**GATED, "sliding_window": 4, "sliding_layers": (0,)},
    MixtralConfig: GATED,
    QwenMoeConfig: {
        **GATED, "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 8, "expert_groups": (2, 1)
    },
    ExpertOptions: {"intermediate_size": 8, "num_experts": 4, "experts_per_token": 2},
    LinearRopeScaling: {"factor": 2.0},
    DynamicRopeScaling: {"factor": 2.0},
    Llama3RopeScaling: {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    YarnRopeScaling: YARN,
    ParallelPlan: {},
    ExpertPlan: {},
    PipelinePlan: {},
}  # fmt: skip
FURTHER = {str: (1, True, 1.0), NoneType: (), tuple: (5, True, (True,), (1.5, 2), (NAN,), {1})}


def wrong_values(hint: Any) -> list[Any] | None:
    """Values that are of no kind of the annotation; None for a kind that is not checked."""
    kinds = [*(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,))]
    if Literal in map(get_origin, kinds):
        return ["no", True, 1.5, NAN, ["no"], *([] if NoneType in kinds else [None])]
    known = [get_origin(kind) or kind for kind in kinds]
    if not all(kind in WRONG or kind in FURTHER for kind in known):
        return None
    values = [each for kind in known for each in (WRONG | FURTHER)[kind]]
    return values if NoneType in known else [*values, None]


@pytest.mark.parametrize("config", RIGHT, ids=lambda config: config.__name__)
def test_values_of_another_kind_are_refused_by_models_and_plans(config: Any) -> None:
    config(**RIGHT[config])
    asked = 0
    for name, hint in get_type_hints(config).items():
        for value in wrong_values(hint) or ():
            asked += 1
            with pytest.raises(
                ValueError,
                match=rf"^{config.__name__}: .*\b(router_)?{name.removeprefix('router_')} is .*; (it must|give)",
            ):
                config(**{**RIGHT[config], name: value})
    assert asked


def test_lists_are_taken_as_tuples_and_numbers_of_every_kind_as_numbers() -> None:
    assert QwenConfig(**GATED, sliding_window=4, sliding_layers=[1]).block(1).window == 4  # type: ignore[arg-type]
    assert LlamaConfig(**GATED, dropout=0, rope_theta=10**4).rope_theta == 10**4


def test_a_config_with_an_annotation_for_type_checkers_alone_is_checked_where_it_can_be() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(LlamaConfig):
        further: Unknown = None  # type: ignore[name-defined]  # noqa: F821

    assert Own(**GATED).further is None
    with pytest.raises(ValueError, match="Own: tie_embeddings is 'no'; it must be True or False"):
        Own(**GATED, tie_embeddings="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"max_seq_len": 2**24 + 1}, id="context"),
        pytest.param({"max_seq_len": 2**20, "rope_scaling": LinearRopeScaling(factor=17.0)}, id="linear"),
        pytest.param({"rope_scaling": YarnRopeScaling(factor=2.0**15, original_max_seq_len=2**10)}, id="yarn"),
    ],
)
def test_a_context_whose_positions_float32_does_not_hold_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"LlamaConfig: the longest context is .* may be 16,777,216 at most"):
        LlamaConfig(**GATED, **wrong)
    assert LlamaConfig(**GATED, max_seq_len=2**24).rotary.longest == 2**24
    last, one = torch.tensor([2**24 - 2, 2**24 - 1, 2**24, 2**24 + 1]), torch.ones(1)
    narrow, wide = (kernels.rope_tables(last, each)[0].unique().numel() for each in (one, one.double()))
    assert (narrow, wide) == (3, 4)  # float32 has the last two positions as one


@pytest.mark.parametrize("number", [True, 1.5, "2"])
def test_a_number_of_microbatches_of_another_kind_is_refused(number: Any) -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="microbatches is"):
        divide_batch(torch.nn.Linear(1, 1), tokens, tokens, number, {})
    with pytest.raises(ValueError, match="microbatches is"):
        RouterLosses(cross_entropy, microbatches=number)
