"""Compiled blocks on rows cut by documents: graphs around attention, and an eager step's values and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import forward_backward, parallelize
from weft.models.data.sources import find_data
from weft.models.parallel.packed.transfer import KeysOnTheirWay
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer
from weft.reshard import GradientSync

from tests.models.cases import whole
from tests.models.test_packed_context import DROPS, KEY, make, packed
from tests.models.test_train_packed import config, prepared
from tests.support.pool import Pool

CPU = torch.profiler.ProfilerActivity.CPU
__all__ = ["prepared"]  # a fixture
STEPS = 3
ROWS, LENGTH = 4, 61
CASES: dict[str, tuple[dict[str, int], str, dict[str, Any], dict[str, Any], int]] = {
    # mesh, family, changes of the model, changes of the plan, microbatches
    "cp2": ({"cp": 2}, "llama", {}, {}, 1),
    "cp4-windows-microbatches": ({"cp": 4}, "qwen", {}, {}, 2),
    "dp2-cp2-zero3-recompute": ({"dp": 2, "cp": 2}, "llama", {}, {"zero": 3, "recompute": "full"}, 2),
    "cp2-tp2-sequence-selective": ({"cp": 2, "tp": 2}, "llama", {}, {"sequence": True, "recompute": "selective"}, 1),
    "dp2-cp2-dropout": ({"dp": 2, "cp": 2}, "llama", DROPS, {}, 2),
    "cp2-deep": ({"cp": 2}, "llama", {"num_layers": 9}, {}, 1),  # Dynamo compiles a function 8 times at most
}


def steps(case: str, compiled: bool) -> Any:
    """For each step on other documents: the loss, the gradients, the collectives and the number of graphs."""
    sizes, family, change, plan_change, microbatches = CASES[case]
    torch.compiler.reset()
    counters.clear()
    grid, model = ProcessMesh.grid(**sizes), make(family, change)
    plan = replace(model.parallel_plan(), context="all_gather", **plan_change)
    parallelize(model, grid, plan)
    sync = GradientSync(model)
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    loss_of = partial(cross_entropy, denominator=float(ROWS * LENGTH))
    found = []
    for number in range(STEPS):
        model.zero_grad()
        given, _ = packed(LENGTH, ROWS, number)
        with torch.profiler.profile(activities=[CPU], record_shapes=True) as profile:  # no dispatch mode: compiles
            loss = forward_backward(
                model, loss_of, **given, dropout_key=KEY + number, microbatches=microbatches, sync=sync
            )
        issued = [(each.name, each.input_shapes) for each in profile.events() if each.name.startswith("c10d::")]
        gradients = {name: whole(each.grad) for name, each in model.named_parameters()}
        found.append((loss.item(), gradients, issued, counters["stats"]["unique_graphs"]))
    return found


@pytest.mark.exhaustive  # models are compiled
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_has_the_values_and_the_bytes_of_an_eager_one(case: str, pool: Pool) -> None:
    ranks = ProcessMesh.grid(**CASES[case][0]).size
    eager, compiled = (pool.run(steps, case, each, ranks=ranks) for each in (False, True))
    for wanted, found in zip(eager, compiled, strict=True):
        first = found[0][-1]
        for (loss, gradients, issued, none), (own_loss, own, own_issued, graphs) in zip(wanted, found, strict=True):
            assert none == 0 and graphs == first  # documents of later steps compile nothing
            assert (graphs > 0) == (CASES[case][3].get("recompute") != "selective")  # torch's modes refuse to compile
            assert any("alltoall" in name for name, _ in issued)
            assert own_loss == pytest.approx(loss, rel=1e-6)
            assert sorted(map(str, own_issued)) == sorted(map(str, issued))
            for name, gradient in gradients.items():
                allowed = 1e-6 * (1.0 if name.endswith("k_proj.bias") else gradient.abs().max().item())
                assert (own[name] - gradient).abs().max() <= allowed, name


def whole_graph() -> tuple[str, float]:
    """torch's error for one graph of a block on rows cut by documents; and the loss of rows without documents."""
    torch.compiler.reset()
    grid, model = ProcessMesh.grid(cp=2), make()
    parallelize(model, grid, replace(model.parallel_plan(), context="all_gather"))
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    given, _ = packed(32, 2)
    try:
        forward_backward(model, cross_entropy, **given)
    except torch._dynamo.exc.Unsupported as error:
        return str(error), forward_backward(model, cross_entropy, given["tokens"], given["targets"]).item()
    return "", 0.0


@pytest.mark.exhaustive
def test_one_graph_of_a_block_is_for_rows_without_documents(pool: Pool) -> None:
    given, _ = packed(32, 2)
    alone = cross_entropy(make()(given["tokens"]), given["targets"]).item()
    for told, loss in pool.run(whole_graph, ranks=2):
        assert "compile the block without fullgraph" in told
        assert loss == pytest.approx(alone, rel=1e-6)


@contextmanager
def exchanged() -> Iterator[list[int]]:
    """The bytes received by each exchange of keys or of their gradients. No dispatch mode: compiles."""
    nbytes: list[int] = []
    exchange = KeysOnTheirWay._exchanged

    def counted(self: Any, outgoing: Any, sent: Any, received: Any) -> Any:
        nbytes.append(sum(received) * outgoing.shape[1] * outgoing.element_size())
        return exchange(self, outgoing, sent, received)

    with patch.object(KeysOnTheirWay, "_exchanged", counted):
        yield nbytes


def trained(path: str, compiles: bool) -> tuple[list[float], list[tuple[int, int]], list[str], int]:
    """By `weft train`'s trainer: losses, bytes of each later step's exchanges as predicted and as issued; graphs."""
    torch.compiler.reset()
    counters.clear()
    settled = replace(config("llama", {"dp": 1, "cp": 2, "tp": 1}, {"context": "all_gather"}), compile=compiles)
    sizes = {"dp": 1, "cp": 2, "tp": 1}
    run = Run(recipe="small", config=settled, corpus=find_data(Path(path)), folder=Path("nowhere"), **sizes)
    made, lines = Trainer(run, torch.device("cpu")), list[str]()
    made.report.print_line = lines.append  # type: ignore[method-assign]
    made.first_step()
    exchanges = []
    for step in range(1, STEPS):
        documents = made._batches.batch(step, slice(None)).documents
        rank = torch.distributed.get_rank()
        predicted = made._outline.record_step(rank, "cpu", documents).communication.select(kind="all-to-all")
        with exchanged() as nbytes:
            made.step(step)
        exchanges.append((predicted.nbytes, sum(nbytes)))
    losses = [each.loss for each in made.read_metrics()]
    return losses, exchanges, [line for line in lines if "NOT" in line], counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_a_compiled_run_exchanges_the_predicted_bytes(prepared: str, pool: Pool) -> None:
    eager, compiled = (pool.run(trained, prepared, each, ranks=2) for each in (False, True))
    for (wanted, eagerly, none_wrong, none), (found, exchanges, wrong, graphs) in zip(eager, compiled, strict=True):
        assert wrong == none_wrong == []
        assert none == 0 < graphs
        assert found == pytest.approx(wanted, rel=2e-5)
        assert exchanges == eagerly
        assert any(predicted for predicted, _ in exchanges)
        assert all(predicted == issued for predicted, issued in exchanges)
