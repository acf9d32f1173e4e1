"""With `exact`, a step's collectives are recorded as they are issued, and move the ordinary plan's bytes."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, Replicate
from weft.models import GPTConfig, LlamaConfig, PipelinePlan, initialize, parallelize, record
from weft.models.cli import main
from weft.models.config import ModelConfig
from weft.models.families import make_model
from weft.models.step.communication import Communication
from weft.models.step.forward_backward import divide_batch
from weft.models.step.record import StepShape, run_on_shapes
from weft.reshard import GradientSync

from tests.models.stepping import observed_microbatches

LLAMA = LlamaConfig(
    vocab_size=33, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_seq_len=16,
)  # fmt: skip
GPT = GPTConfig(vocab_size=33, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=16)
# Its gradients are large enough for the shared memory of a machine's processes.
WIDE = replace(LLAMA, vocab_size=1023, hidden_size=64)
ROWS, LENGTH = 16, 12
NAMED = {"dp": 8, "tp": 2}


def mesh_of(sizes: dict[str, int], exact: dict[str, int]) -> ProcessMesh:
    return ProcessMesh.grid(**{axis: size for axis, size in sizes.items() if size > 1 or axis in exact})


def counted_mean(logits: Tensor, target: Tensor) -> Tensor:
    """A loss that counts its tokens itself, over the coordinates of the named mesh."""
    return cross_entropy(logits, target)


def recorded_and_issued(
    config: ModelConfig, sizes: dict[str, int], changes: list[dict[str, Any]], counts: bool
) -> list[tuple[Communication, Communication]]:
    """Of a step under each plan, where this rank's turn is to record it. counts: the loss counts its tokens."""
    mesh, found = mesh_of(sizes, NAMED), []
    pipeline = PipelinePlan(microbatches=2) if sizes.get("pp", 1) > 1 else None
    criterion = counted_mean if counts else partial(cross_entropy, denominator=float(ROWS * LENGTH))
    tokens = torch.randint(0, 33, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    for number, each in enumerate(changes):
        model = make_model(config)
        initialize(model, seed=3)
        plan = replace(model.parallel_plan(), exact=NAMED, pipeline=pipeline, **each)
        recorded = None
        if number % mesh.size == dist.get_rank():
            more = {"criterion": criterion} if counts else {}
            recorded = record(model, mesh, plan, batch=(ROWS, LENGTH), rank=dist.get_rank(), clip_norm=0.1, **more)
        parallelize(model, mesh, plan)
        parts = divide_batch(model, tokens[0], tokens[1], 1 if pipeline is None else 2, {})
        issued = observed_microbatches(model, criterion, parts, GradientSync(model), clip_norm=0.1)[1]
        if recorded is not None:
            found.append((recorded, issued))
    return found


def cases() -> Iterator[Any]:
    quick = [{"dp": 2}, {"tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
    every = [{"dp": 1}, {"dp": 4, "tp": 2}, {"dp": 8}, {"pp": 2, "dp": 4}, {"pp": 2, "tp": 2}]
    for sizes in [*quick, *every]:
        name = "-".join(f"{axis}{size}" for axis, size in sizes.items())
        marks = [] if sizes in quick else [pytest.mark.exhaustive]
        yield pytest.param({"dp": 1, "tp": 1, **sizes}, id=name, marks=marks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", list(cases()))
def test_exact_collectives_are_recorded_as_they_are_issued(pool: Any, sizes: dict[str, int]) -> None:
    ranks = math.prod(sizes.values())
    for number, config in enumerate((LLAMA, GPT, WIDE)):
        changes = [{"zero": zero, "sequence": bool((number + zero) % 2)} for zero in range(4)]
        counts = config is GPT and "pp" not in sizes
        seen = 0
        for found in pool.run(recorded_and_issued, config, sizes, changes, counts, ranks=ranks):
            for recorded, issued in found:
                assert recorded == issued, f"{type(config).__name__}, {sizes}\n{recorded}\nissued:\n{issued}"
                assert recorded.count or ranks == 1
                seen += 1
        assert seen == len(changes)


def all_reduce_bytes(elements: int, ranks: int, itemsize: int, *, padded: bool = False) -> int:
    """Bytes received in a ring's all-reduce. padded: of equal parts."""
    if padded:
        elements = math.ceil(elements / ranks) * ranks
    return math.ceil(2 * (ranks - 1) * elements / ranks) * itemsize


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [LLAMA, WIDE, GPT], ids=["llama", "wide", "gpt"])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 4}, {"dp": 8}, {"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}], ids=str)
def test_bytes_on_the_named_mesh_are_the_ordinary_plans_padding_and_norm(
    sizes: dict[str, int], zero: int, config: ModelConfig
) -> None:
    mesh, ranks, dp, tp = ProcessMesh.grid(**sizes), math.prod(sizes.values()), sizes["dp"], sizes.get("tp", 1)
    with torch.device("meta"):
        model = make_model(config)
    steps = []
    for exact in (None, sizes):
        plan = replace(model.parallel_plan(), exact=exact, zero=zero, sequence=tp > 1)
        steps.append(run_on_shapes(model, mesh, plan, StepShape(batch=(ROWS, LENGTH)), clip_norm=1.0))
    ordinary, exact_step = steps
    # The norm: the largest magnitude, one int64, and four int64 of sums, in place of one float32.
    expected = all_reduce_bytes(1, ranks, 8) + all_reduce_bytes(4, ranks, 8) - all_reduce_bytes(1, ranks, 4)
    # More than two ranks add in the tree, each a part of the tensor: the loss is one number.
    reduced = [(1, dp)]
    # A tied table is summed twice: the gradient of each use.
    twice = math.ceil(config.vocab_size / tp) * config.hidden_size if config.tie_embeddings else 0
    if zero == 0:  # gradients are all-reduced, in a bucket for each group of ranks
        elements = {True: 0, False: 0}
        for name, layout in exact_step.layouts.items():
            assert layout is not None
            is_cut = tp == 1 or layout["tp"] != Replicate()
            elements[is_cut] += math.prod(layout.local_shape(exact_step.shapes[name], 0))
        elements[True] += twice
        expected += all_reduce_bytes(twice, dp, 4)
        reduced += [(elements[True], dp), (elements[False], dp * tp)]
    else:  # gradients are reduce-scattered
        expected += all_reduce_bytes(twice, dp, 4) // 2
    for count, members in reduced:
        if members > 2:
            expected += all_reduce_bytes(count, members, 4, padded=True) - all_reduce_bytes(count, members, 4)
    assert exact_step.communication.nbytes - ordinary.communication.nbytes == expected
    assert exact_step.communication.count - ordinary.communication.count == 1  # of the norm


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    return capsys.readouterr().out


@pytest.mark.exhaustive
def test_explain_and_check_predict_the_same_collectives(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is saved with a site for each collective, and run again; and the calls of all ranks match."""
    monkeypatch.chdir(tmp_path)
    options = ("--plan.exact", "dp=8,tp=2", "--mesh.dp", "4", "--mesh.tp", "2", "--model.num-layers", "1")
    shown = run(capsys, "explain", *options, "--save", "golden.json")
    lines = shown[shown.index("collectives a step") : shown.index("memory of rank 0")].splitlines()[1:]
    found: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[str] = Counter()
    for each in json.loads(Path("golden.json").read_text())["ranks"][0]["collectives"]:
        found[each["phase"], each["kind"]] += each["count"]
        nbytes[each["phase"]] += each["bytes"]
    told = {line.split()[0]: 0 for line in lines}
    for line in lines:
        told[line.split()[0]] += int(line.split()[-2].replace(",", ""))
    assert told == dict(nbytes)
    gradients = " ".join(line for line in lines if line.split()[0] == "gradients")
    counts = [int(count) for count in re.findall(r"(\d+) all-reduce", gradients)]
    assert sum(counts) == found["gradients", "all-reduce"] > 0
    run(capsys, "check", "golden.json")
    assert "no rank waits for another" in run(capsys, "check", "--hangs", *options)
