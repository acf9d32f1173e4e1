"""The optimizers by name, and the learning rate over the steps."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import Llama, forward_backward, initialize, parallelize
from weft.models.train.config import OptimizerConfig, OptimizerName
from weft.models.train.learning_rate import learning_rate
from weft.models.train.optimizer import make_optimizer
from weft.reshard import distribute, to_global

from tests.models.cases import SMALL, some_tokens
from tests.support.pool import Pool

NAMES = get_args(OptimizerName)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"schedule": "constant"}, [0.5, 1.0, *[1.0] * 8], id="constant"),
        pytest.param({"schedule": "linear"}, [0.5, 1, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125], id="linear"),
        pytest.param({"schedule": "wsd"}, [0.5, *[1.0] * 8, 0.55], id="wsd-a-fifth"),
        pytest.param({"schedule": "wsd", "decay_steps": 4}, [0.5, *[1.0] * 6, 0.775, 0.55, 0.325], id="wsd-four"),
        pytest.param({"schedule": "wsd", "decay_steps": 0}, [0.5, *[1.0] * 9], id="wsd-none"),
        pytest.param({"schedule": "linear", "final_share": 0.0, "warmup_steps": 0}, [1 - i / 10 for i in range(10)], id="to-zero"),
    ],
)  # fmt: skip
def test_the_rate_over_ten_steps(options: dict[str, object], expected: list[float]) -> None:
    config = OptimizerConfig(**{"lr": 1.0, "warmup_steps": 2, **options})  # type: ignore[arg-type]
    assert [learning_rate(config, step, 10) for step in range(10)] == pytest.approx(expected)


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=0, final_share=0.2)
    assert learning_rate(config, 50, 100) == pytest.approx(0.6)


def test_decay_steps_are_of_one_schedule() -> None:
    with pytest.raises(ValueError, match="decay_steps is 5, which is of the schedule wsd; the schedule is cosine"):
        OptimizerConfig(decay_steps=5)


def stepped(name: OptimizerName, mesh: ProcessMesh | None, zero: int = 0) -> list[Tensor]:
    """The weights after three updates."""
    model = Llama(SMALL)
    initialize(model, seed=0)
    tokens = some_tokens(SMALL, 4, 9)
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if mesh is not None:
        parallelize(model, mesh, replace(model.parallel_plan(), zero=zero))
        inputs, target = (distribute(each, Layout(mesh, {"dp": Shard(0)})) for each in (inputs, target))
    optimizer = make_optimizer(model, OptimizerConfig(name=name, lr=1e-2))
    for _ in range(3):
        forward_backward(model, cross_entropy, inputs, target)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() if mesh is None else to_global(parameter).detach() for parameter in model.parameters()]


def differences(names: list[OptimizerName], zero: int) -> list[float]:
    """By how much each differs at most from the updates of one process, beside how far those went."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    initial = Llama(SMALL)
    initialize(initial, seed=0)
    found = []
    for name in names:
        pairs = zip(stepped(name, mesh, zero), stepped(name, None), initial.parameters(), strict=True)
        found.append(max(float((ours - alone).norm() / (alone - start).norm()) for ours, alone, start in pairs))
    return found


@pytest.mark.parametrize(
    "names", [["sgd"], pytest.param([name for name in NAMES if name != "sgd"], marks=pytest.mark.exhaustive)], ids=["sgd", "others"]
)  # fmt: skip
@pytest.mark.parametrize("zero", [0, 3])
def test_an_optimizer_by_name_updates_shards_as_it_would_the_whole(
    names: list[OptimizerName], zero: int, pool: Pool
) -> None:
    for worst in pool.run(differences, names, zero, ranks=4):
        assert dict(zip(names, worst, strict=True)) == {name: pytest.approx(0, abs=2e-3) for name in names}
