"""A resumed run on the same mesh has the bits of an uninterrupted run, for any data, dtype and optimizer."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.models.data.prepare import prepare
from weft.models.data.sources import find_data
from weft.models.data.tokenizer import byte_tokenizer
from weft.models.train.config import OPTIMIZERS, DataConfig, MeshConfig, PlanConfig
from weft.models.train.folder import checkpoints
from weft.models.train.loop import train
from weft.models.train.metrics_file import METRICS
from weft.models.train.run import Run

from tests.faults.attempts import CONFIG, weights
from tests.support.pool import Pool

STOPPED = 4  # the step whose checkpoint the run goes on from
EVERY_STEP = {"eval_every": 1, "log_every": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Differences from `CONFIG`. sizes: of the mesh. optimizer: by name. options: of the run."""

    sizes: dict[str, int] = field(default_factory=lambda: {"dp": 2, "tp": 1})
    plan: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CONTEXT = {"dp": 1, "cp": 2, "tp": 1}
CASES = {
    "everything": Case(
        sizes={"dp": 2, "cp": 2, "tp": 1},
        plan={"context": "all_gather", "zero": 3, "microbatches": 2},
        optimizer="nadam",
        packed=True,
        options={"dtype": "bfloat16", "reduce_dtype": "bfloat16", "eval_every": 3},
    ),
    "packed-mixture": Case(packed=True),
    "bfloat16": Case(options={"dtype": "bfloat16", "reduce_dtype": "bfloat16"}),
    "evaluated": Case(options=EVERY_STEP),
    "context": Case(sizes=CONTEXT, plan={"context": "all_gather"}),
    "context-ulysses-packed": Case(sizes=CONTEXT, plan={"context": "ulysses"}, packed=True),
    "wsd": Case(options={"optimizer": replace(CONFIG.optimizer, schedule="wsd")}),
    **{name: Case(optimizer=name, plan={"zero": 2}) for name in OPTIMIZERS if name != "adamw"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and two prepared folders with documents shorter and longer than a sequence."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("what was saved is whole. " * 40)
    for name, count in (("books", 3), ("code", 1)):
        lines = [json.dumps({"text": f"{number} of {name}" + " more" * (number % count)}) for number in range(200)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        prepare([folder / f"{name}.jsonl"], folder / name, tokenizer=byte_tokenizer())
    return folder


def run_from(resume: Path | None, case: Case, data: Path, folder: Path) -> int:
    mixture = (f"{data}/books=0.7", f"{data}/code=0.3") if case.packed else ()
    path = None if case.packed else data / "text.txt"
    config = replace(
        CONFIG,
        **{"optimizer": replace(CONFIG.optimizer, name=case.optimizer), **case.options},
        data=DataConfig(batch_size=4, sequence_length=8, path=path, mixture=mixture),
        plan=PlanConfig(**case.plan),
        mesh=MeshConfig(cp=case.sizes.get("cp", 1)),
    )
    corpus = find_data(path, mixture)
    run = Run(recipe="llama-tiny", config=config, corpus=corpus, folder=folder, resume=resume, **case.sizes)
    with contextlib.redirect_stdout(io.StringIO()):
        return train(run, torch.device("cpu"))


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """The reproducible metrics of each line."""
    read = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [tuple(each[name] for name in ("step", "loss", "grad_norm", "lr", "held_out_loss")) for each in read]


@pytest.mark.exhaustive  # the sample has the runs of test_kills.py
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(
    case: Case, data: Path, tmp_path: Path, pool: Pool
) -> None:
    truth, stopped, ranks = tmp_path / "truth", tmp_path / "stopped", torch.Size(case.sizes.values()).numel()
    assert set(pool.run(run_from, None, case, data, truth, ranks=ranks)) == {0}
    later = [f"checkpoint-{step}" for step in checkpoints(truth) if step > STOPPED]
    shutil.copytree(truth, stopped, ignore=shutil.ignore_patterns("checkpoint", *later))
    newest = stopped / f"checkpoint-{STOPPED}"
    assert set(pool.run(run_from, newest, case, data, stopped, ranks=ranks)) == {0}
    assert numbers(stopped) == numbers(truth) and len(numbers(truth)) == CONFIG.steps
    found, wanted = weights(stopped), weights(truth)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    last = f"checkpoint-{CONFIG.steps}"
    files = {path.name: path.read_bytes() for path in (truth / last).glob("part-*.safetensors")}
    assert files == {path.name: path.read_bytes() for path in (stopped / last).glob("part-*.safetensors")}
    assert files
