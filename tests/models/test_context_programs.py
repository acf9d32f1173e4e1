"""Random steps under context parallelism, of any documents, plans and models, beside one process in float64."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from weft.mesh import ProcessMesh
from weft.models import lay_out_batch, parallelize
from weft.reshard import GradientSync, to_global

from tests.models.cases import whole
from tests.models.test_packed_context import DROPS, make, packed, stepped
from tests.support.pool import Pool
from tests.support.sample import Portion

SEEDS = range(24)
MESHES = {
    "cp2": {"cp": 2},
    "cp3": {"cp": 3},
    "cp4": {"cp": 4},
    "dp2-cp2": {"dp": 2, "cp": 2},
    "cp2-tp2": {"cp": 2, "tp": 2},
}


class Program(NamedTuple):
    """A step drawn by a seed: a model, a plan, and a batch of `packed`."""

    family: str
    change: dict[str, Any]
    plan: dict[str, Any]
    is_packed: bool
    length: int
    rows: int
    seed: int

    @classmethod
    def of(cls, seed: int, mesh: str) -> Program:
        draw = Random(f"{seed} {mesh}")
        # The test's own sinks have no plan that shards them by heads.
        family = draw.choice(["llama", "qwen", "gpt", "llama" if "tp" in mesh else "capped"])
        change: dict[str, Any] = {}
        if draw.random() < 0.4:
            change = {"dropout": 0.2} if family == "gpt" else DROPS if family in ("llama", "capped") else {}
        if family in ("llama", "capped") and draw.random() < 0.3:
            change = {**change, "num_kv_heads": draw.choice([1, 2, 8])}
        # Ulysses needs heads for all ranks along cp and tp; GPT has four, the others at least four for keys. The test's
        # own sinks are whole on each rank.
        whole_heads = mesh != "cp3" and family != "capped" and change.get("num_kv_heads", 4) >= 4
        plan: dict[str, Any] = {"context": "ulysses" if whole_heads and draw.random() < 0.3 else "all_gather"}
        plan["recompute"] = draw.choice(["none", "full", "selective"])
        plan["zero"] = draw.choice([0, 1, 2, 3])
        if "tp" in mesh:
            plan["sequence"] = draw.random() < 0.5
        length = draw.choice([1, 2, 5, 24, 61, 64, 97])
        return cls(family, change, plan, draw.random() < 0.8, length, draw.choice([1, 2, 3]), seed)

    def batch(self) -> dict[str, Tensor]:
        given, _ = packed(self.length, self.rows, self.seed)
        return given if self.is_packed else {name: given[name] for name in ("tokens", "targets")}

    def alone(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The loss, the logits without dropout, and the gradients on one process."""
        model, given = make(self.family, self.change).to(dtype), self.batch()
        loss = stepped(model, **given)
        return {"loss": loss, "logits": self.logits(model, given)} | gradients(model)

    def on_ranks(self, mesh: str) -> dict[str, Tensor]:
        """As `alone` in float32, on a mesh."""
        grid, model = ProcessMesh.grid(**MESHES[mesh]), make(self.family, self.change)
        plan = replace(model.parallel_plan(), **self.plan)
        parallelize(model, grid, plan)
        sync = GradientSync(model)
        laid = lay_out_batch(grid, plan, **self.batch())
        given = {name: getattr(laid, name) for name in ("tokens", "targets", "positions", "documents")}
        loss = stepped(model, **given)
        sync.wait()
        found = gradients(model)
        return {"loss": whole(loss), "logits": laid.as_read(to_global(self.logits(model, given)))} | found

    @staticmethod
    def logits(model: Any, given: dict[str, Any]) -> Tensor:
        model.eval()
        with torch.no_grad():
            found: Tensor = model(**{name: each for name, each in given.items() if name != "targets"})
        return found


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: whole(each.grad) for name, each in model.named_parameters()}


def off(mesh: str, seeds: list[int]) -> list[str]:
    """The programs whose numbers err more than twice as much as one process's in float32, or which raise."""
    wrong = []
    for seed in seeds:
        program = Program.of(seed, mesh)
        truth, own = program.alone(torch.float64), program.alone(torch.float32)
        found = program.on_ranks(mesh)
        for name, exact in truth.items():
            error, usual = ((each[name].double() - exact).abs().max() for each in (found, own))
            largest = max(float(exact.abs().max()), 1e-3)
            if not error <= 2 * usual + 16 * torch.finfo(torch.float32).eps * largest:
                wrong.append(f"{program}: {name} errs by {error:.2e}, alone by {usual:.2e}, of {largest:.2e}")
    return wrong


@pytest.mark.parametrize("mesh", MESHES)
def test_random_steps(mesh: str, portion: Portion, pool: Pool) -> None:
    seeds = [*portion.of(SEEDS, every=24)]
    ranks = ProcessMesh.grid(**MESHES[mesh]).size
    for wrong in pool.run(off, mesh, seeds, ranks=ranks, timeout=400):
        assert wrong == []
