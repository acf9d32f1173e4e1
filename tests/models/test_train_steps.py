"""A training step gives the device work and waits for none of it; the numbers are read together, later."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from weft import kernels
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import Communication, Llama, LlamaConfig, initialize, parallelize, record
from weft.models.data.batches import Batches
from weft.models.data.text import find_corpus
from weft.models.step.communication import Phase
from weft.models.step.find_gradients import clip_gradients, find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.train.config import DataConfig, MeshConfig, OptimizerConfig, PlanConfig, TrainConfig
from weft.models.train.optimizer import make_optimizer
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer, TrainingError
from weft.reshard import GradientSync
from weft.reshard.world.collective_bytes import Collective
from weft.reshard.world.recording import recording

from tests.kernels.reads import no_reads
from tests.support.pool import Pool

MODEL = LlamaConfig(
    vocab_size=257, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=8, num_kv_heads=4, dropout=0.1
)
CONFIG = TrainConfig(
    model=MODEL, steps=8, check=False, data=DataConfig(batch_size=4, sequence_length=8), mesh=MeshConfig(dp=2, tp=2)
)
ONE_LAYER = replace(MODEL, num_layers=1)


SAMPLE = [  # covers every option of OTHERS
    pytest.param(((2, 1, 2), {"sequence": True, "recompute": "full", "zero": 1}), id="sequence-recomputed-zero1"),
    pytest.param(((1, 2, 2), {"context": "ulysses", "recompute": "selective"}), id="ulysses-recomputed"),
    pytest.param(((1, 2, 2), {"context": "all_gather", "sequence": True, "zero": 3}), id="context-sequence-zero3"),
]
OTHERS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "tensor": ((2, 1, 2), {}),
    "sequence": ((2, 1, 2), {"sequence": True}),
    "context-sequence": ((1, 2, 2), {"sequence": True, "context": "all_gather"}),
    "ulysses": ((1, 2, 2), {"context": "ulysses"}),
    "recomputed": ((2, 1, 2), {"sequence": True, "recompute": "full"}),
    "context-recomputed": ((1, 2, 2), {"context": "all_gather", "recompute": "selective"}),
    "zero1": ((2, 1, 2), {"zero": 1}),
}
WAYS = [*SAMPLE, *(pytest.param(way, id=name, marks=pytest.mark.exhaustive) for name, way in OTHERS.items())]


def trainer(text: str, sizes: tuple[int, int, int] = (2, 1, 2), plan: dict[str, Any] | None = None) -> Trainer:
    corpus = find_corpus(Path(text))
    dp, cp, tp = sizes
    config = replace(CONFIG, plan=PlanConfig(**(plan or {})))
    run = Run(recipe="small", config=config, corpus=corpus, dp=dp, cp=cp, tp=tp, folder=Path(text).parent)
    made = Trainer(run, torch.device("cpu"))
    made.report.print_line = lambda line: None  # type: ignore[method-assign]
    return made


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A rank's losses: held-out before any step, and of each step."""

    held_out: float
    losses: list[float]


def steps_without_reading(text: str, sizes: tuple[int, int, int], plan: dict[str, Any]) -> Ran:
    """Steps 2 and 3 run without the value checks that a CPU makes because it waits for nothing."""
    made = trainer(text, sizes, plan)
    held_out = made.held_out_loss()
    made.first_step()
    assert made.prediction == (Communication.of(made.issued_collectives) if dist.get_rank() == 0 else None)
    with no_reads():
        for step in range(1, 3):
            made.step(step)
    return Ran(held_out=held_out, losses=[metrics.loss for metrics in made.read_metrics()])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a step waits for no device " * 30)
    return str(path)


@pytest.fixture(scope="module", params=WAYS)
def each_way(request: pytest.FixtureRequest, pool: Pool, text: str) -> list[Ran]:
    """Results of each rank."""
    sizes, plan = request.param
    return pool.run(steps_without_reading, text, sizes, plan, ranks=math.prod(sizes))


@pytest.mark.exhaustive
def test_a_step_reads_nothing_on_the_host(each_way: list[Ran]) -> None:
    losses = [rank.losses for rank in each_way]
    assert losses == [losses[0]] * len(losses)
    assert len(losses[0]) == 3


@pytest.mark.exhaustive
def test_the_held_out_loss_is_that_of_the_whole_text_on_one_process(each_way: list[Ran], text: str) -> None:
    """With 5 sequences in batches of 4 one data-parallel rank has no row of the last batch. Without dropout."""
    batches = Batches(find_corpus(Path(text)), sequence_length=8, batch_size=4, seed=CONFIG.seed)
    held_out = batches.held_out(slice(None))
    tokens, target = held_out.tokens, held_out.targets
    assert tokens.shape == (5, 8)
    model = Llama(MODEL).eval()
    initialize(model, seed=CONFIG.seed)
    truth = torch.nn.functional.cross_entropy(model(tokens).double().flatten(0, 1), target.flatten()).item()
    assert [rank.held_out for rank in each_way] == pytest.approx([truth] * len(each_way), rel=1e-6)


def broken_at_step_three(text: str) -> str:
    made = trainer(text, (2, 1, 1))
    made.first_step()
    made.step(1)
    with torch.no_grad():
        made.model.norm.weight.fill_(float("nan"))  # type: ignore[union-attr]
    made.step(2)
    made.step(3)
    with pytest.raises(TrainingError) as caught:
        made.read_metrics()
    return str(caught.value)


@pytest.mark.exhaustive
def test_the_first_step_that_is_not_finite_is_named_when_the_losses_are_read(pool: Pool, text: str) -> None:
    for message in pool.run(broken_at_step_three, text, ranks=2):
        assert "the loss is nan at step 3, on ranks 0, 1" in message


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_on_a_mesh_runs_on_tensors_without_data(zero: Literal[0, 2], microbatches: int) -> None:
    """The last of four ranks: forward, backward, the gradients' collectives, clipping and the optimizer, twice."""
    mesh, plan = ProcessMesh.grid(dp=2, tp=2), replace(Llama(ONE_LAYER).parallel_plan(), sequence=True, zero=zero)
    steps: list[Communication] = []
    with recording(mesh, 3) as recorded, FakeTensorMode():
        model = parallelize(Llama(ONE_LAYER), mesh, plan)
        initialize(model, seed=0)
        sync, optimizer = GradientSync(model), make_optimizer(model, OptimizerConfig())
        tokens = torch.zeros(4, 8, dtype=torch.long)
        batch = divide_batch(model, tokens, tokens, microbatches, {"dropout_key": 3})
        criterion = partial(cross_entropy, denominator=float(tokens.numel()))
        recorded.take_each()
        for _ in range(2):
            issued: dict[Phase, list[Collective]] = {}

            def after_phase(phase: Phase, issued: dict[Phase, list[Collective]] = issued) -> None:
                issued.setdefault(phase, []).extend(recorded.take_each())

            found = find_gradients(model, criterion, batch, sync, clip_norm=1.0, after_phase=after_phase)
            optimizer.step()
            optimizer.zero_grad()
            steps.append(Communication.of(issued))
        assert found.grad_norm is not None
        assert found.loss.shape == found.grad_norm.shape == ()
        with pytest.raises(DataDependentOutputException):
            found.loss.item()
        sync.close()
    inputs = {"dropout_key": 3}
    expected = record(
        Llama(ONE_LAYER), mesh, plan, batch=(4, 8), rank=3, inputs=inputs, microbatches=microbatches, clip_norm=1.0
    )
    assert steps == [expected] * 2
    assert expected.select(phase="gradients")


@pytest.mark.exhaustive
def test_caches_for_tensors_without_data_are_not_used_for_real_tensors() -> None:
    """Tables of angles, and guesses of a loss's gradient: on a mesh without data, and then with data."""
    mesh, tokens = ProcessMesh.grid(tp=2), torch.zeros(2, 8, dtype=torch.long)
    config = replace(ONE_LAYER, rope_theta=12345.0)  # whose tables no other test keeps
    with recording(mesh, 0), FakeTensorMode():
        model = parallelize(Llama(config), mesh)
        without = torch.zeros(2, 8, dtype=torch.long)
        part = divide_batch(model, without, without, 1, {"dropout_key": 3})[0]
        cross_entropy(model(*part.args, **part.kwargs), part.targets).backward()
    model = Llama(config)
    initialize(model, seed=0)
    cross_entropy(model(tokens, dropout_key=3), tokens).backward()
    assert model.lm_head.weight.grad.isfinite().all()


@pytest.mark.exhaustive
def test_a_step_runs_on_tensors_without_data() -> None:
    """Where there are no values, none can be read."""
    with FakeTensorMode():
        model = Llama(MODEL)
        initialize(model, seed=0)
        optimizer = make_optimizer(model, OptimizerConfig())
        tokens = torch.zeros(2, 8, dtype=torch.long)
        key = torch.zeros((), dtype=torch.uint64)
        loss = cross_entropy(model(tokens, dropout_key=key), tokens)
        loss.backward()
        norm = clip_gradients(model, 1.0)
        optimizer.step()
        loss = kernels.linear_cross_entropy(torch.zeros(8, 16), model.lm_head.weight, tokens[0])
        loss.backward()
    assert loss.shape == norm.shape == ()
