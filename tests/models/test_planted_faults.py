"""Planted faults are called "not rounding" and located; runs on different meshes are never accused."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import pytest
import torch
from weft.models import GPTConfig, LlamaConfig, MixtralConfig, QwenConfig
from weft.models.compare.bound import UNIT
from weft.models.compare.judge import Judge
from weft.models.compare.record_file import Header, StepDigests
from weft.models.compare.report import describe
from weft.models.train.digests import header_of
from weft.models.train.trainer import Trainer

from tests.models.planted import FAULTS
from tests.models.test_train_pipeline import made_run
from tests.support.pool import Pool
from tests.support.sample import Portion

SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
LLAMA = LlamaConfig(**SIZES, intermediate_size=24)
FAMILIES: dict[str, Any] = {
    "llama": LLAMA,
    "llama-dropout": replace(LLAMA, dropout=0.1, tie_embeddings=True),
    "gpt": GPTConfig(**SIZES, intermediate_size=32, max_seq_len=16),
    "qwen": QwenConfig(**SIZES, intermediate_size=24),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=24, num_experts=4, experts_per_token=2),
}
Run = tuple[Header, list[StepDigests]]


def digested(
    text: str, mesh: dict[str, int], plan: dict[str, Any], options: dict[str, Any], fault: str = "", steps: int = 3
) -> Run:
    """The digests of a run's first steps, on rank 0. fault: planted before the first."""
    run = made_run(text, mesh, plan, digests=1, **options)
    trainer = Trainer(run, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            FAULTS[fault].plant(trainer, patch)
        for step in range(steps):
            trainer.step(step)
    assert trainer.recorder is not None
    return header_of(run, trainer.model), trainer.recorder.take()


def judged(a: Run, b: Run) -> Judge:
    judge, previous = Judge((a[0], b[0])), (None, None)
    for first, second in zip(a[1], b[1], strict=True):
        if judge.add(first, second, previous):
            break
        previous = first, second  # type: ignore[assignment]
    return judge


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("planted") / "text.txt"
    path.write_text("a stage gives what the next one takes " * 30)
    return str(path)


@pytest.fixture(scope="module")
def alone(text: str, pool: Pool) -> Any:
    """The run of a family on one process, made once."""
    found: dict[Any, Run] = {}

    def run(family: str, dtype: str = "float32") -> Run:
        if (family, dtype) not in found:
            options = {"model": FAMILIES[family], "dtype": dtype}
            found[family, dtype] = pool.run(digested, text, {"dp": 1, "tp": 1}, {}, options, ranks=1)[0]
        return found[family, dtype]

    return run


# Faults above the rounding of bfloat16, some of each phase. Small ones, as another eps of a norm, are below.
ABOVE_BFLOAT16 = (
    "slices-of-a-weight-swapped",
    "reduction-of-attention-missed",
    "attention-off-by-one",
    "loss-divided-by-local-tokens",
    "gradient-halved-on-one-rank",
    "gradients-of-the-step-before-kept",
    "learning-rate-doubled-on-one-rank",
)

# What the bound of a phase starts from, in the report. Of all further phases, of the loss and of the norm: all before.
STARTS = {"gradients": "all before the gradients differs", "update": "the parameter's gradients differ"}


@pytest.mark.exhaustive
@pytest.mark.every_value
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FAULTS), *((name, "bfloat16") for name in ABOVE_BFLOAT16)]
)
def test_a_planted_fault_is_found_where_it_is(name: str, dtype: str, text: str, alone: Any, pool: Pool) -> None:
    fault = FAULTS[name]
    mesh = {"dp": 1, "tp": 1, **fault.mesh}
    options = {"model": FAMILIES[fault.family], "dtype": dtype}
    faulty = pool.run(digested, text, mesh, fault.plan, options, name, ranks=2)[0]
    judge = judged(alone(fault.family, dtype), faulty)
    found = judge.finding
    assert found is not None, describe(judge, ("a", "b"))
    assert (found.step, found.phase) == (fault.step, fault.phase) and fnmatch(found.name, fault.name), found
    assert found.difference > found.allowed
    first, size, *_ = describe(judge, ("a", "b")).splitlines()
    assert first.startswith(f"not rounding: step {fault.step}, {fault.phase}: ")
    phase = "norm" if found.name == "norm of the gradients" else fault.phase
    assert size.endswith(f", since {STARTS.get(phase, 'all before differs')} by at most {found.before:.1e}")


# Meshes and plans beside one process. Those of four ranks, and all but a few pairs, are in the exhaustive tests.
LAID_OUT: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2-sequence": ({"tp": 2}, {"sequence": True}),
    "cp2": ({"cp": 2}, {}),
    "cp2-ulysses": ({"cp": 2}, {"context": "ulysses"}),
    "pp2": ({"pp": 2}, {"microbatches": 1}),
    "dp2-zero1": ({"dp": 2}, {"zero": 1}),
    "dp2-zero3": ({"dp": 2}, {"zero": 3}),
    "dp2-recompute": ({"dp": 2}, {"recompute": "full"}),
    "dp2-tp2": ({"dp": 2, "tp": 2}, {}),
    "dp2-tp2-zero2": ({"dp": 2, "tp": 2}, {"zero": 2, "sequence": True}),
    "dp4": ({"dp": 4}, {}),
    "tp4": ({"tp": 4}, {}),
    "cp2-tp2": ({"cp": 2, "tp": 2}, {"recompute": "selective"}),
    "pp2-dp2": ({"pp": 2, "dp": 2}, {"microbatches": 1, "zero": 2}),
}


@pytest.fixture(scope="module")
def laid_out(text: str, pool: Pool) -> Any:
    """The run of a family on a mesh, made once."""
    found: dict[Any, Run] = {}

    def run(family: str, dtype: str, name: str) -> Run:
        key = family, dtype, name
        if key not in found:
            mesh, plan = LAID_OUT[name]
            sizes = {"dp": 1, "tp": 1, **mesh}
            options = {"model": FAMILIES[family], "dtype": dtype}
            found[key] = pool.run(digested, text, sizes, plan, options, ranks=math.prod(sizes.values()))[0]
        return found[key]

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_meshes_are_never_accused(family: str, dtype: str, portion: Portion, alone: Any, laid_out: Any) -> None:
    """Of 15 meshes and plans each is compared with one process and with the next: 29 pairs a family and dtype."""
    names = list(LAID_OUT)
    pairs = [(name, None) for name in names] + list(pairwise(names))
    for name, other in portion.of(pairs, every=15):
        first = alone(family, dtype) if other is None else laid_out(family, dtype, other)
        judge = judged(first, laid_out(family, dtype, name))
        assert judge.finding is None, (name, other, describe(judge, (str(other), name)))
        assert judge.steps == 3 and judge.tensors > 60


@pytest.mark.parametrize("dtype", UNIT)
def test_a_roundoff_is_half_the_distance_of_1_to_the_next_number(dtype: str) -> None:
    assert UNIT[dtype] == torch.finfo(getattr(torch, dtype)).eps / 2


def test_one_run_twice_has_the_same_bits(alone: Any, text: str, pool: Pool) -> None:
    (again,) = pool.run(digested, text, {"dp": 1, "tp": 1}, {}, {"model": FAMILIES["llama"]}, ranks=1)
    judge = judged(alone("llama"), again)
    assert describe(judge, ("a", "b")) == f"the same bits in 3 steps, {judge.tensors} tensors each"


@pytest.mark.exhaustive
def test_tensors_of_a_step_are_digested_alike_on_every_mesh(alone: Any, laid_out: Any) -> None:
    """Where a mesh computes with the same bits, as the forward of data parallelism does, the hashes are equal."""
    a, b = (run[1][0].by_key() for run in (alone("llama"), laid_out("llama", "float32", "dp2")))
    outputs = [key for key in a if key.kind in ("before", "output", "backward")]
    assert len(outputs) > 60 and all((a[key].hashes == b[key].hashes).all() for key in outputs)
