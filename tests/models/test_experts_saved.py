"""Models whose experts are sharded over "ep": saved under one mesh and read under another, drawn, copied."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    ExpertPlan,
    RouterLosses,
    forward_backward,
    from_pretrained,
    generate,
    initialize,
    load_checkpoint,
    parallelize,
    predict_memory,
    save_checkpoint,
    save_pretrained,
)
from weft.models.cli import main
from weft.models.families import make_model
from weft.models.losses import local_value

from tests.models.cases import whole
from tests.models.test_experts_axis import FAMILIES
from tests.models.test_experts_parallel import batch, make

CONFIG = FAMILIES["qwen3-moe"]
MESHES: dict[str, tuple[dict[str, int], ExpertPlan | None]] = {
    "dp4-ep4": ({"dp": 4}, ExpertPlan(size=4, tokens="exchange")),
    "dp2-tp2-ep2": ({"dp": 2, "tp": 2}, ExpertPlan(size=2, tokens="gather")),
    "dp2-tp2-ep4": ({"dp": 2, "tp": 2}, ExpertPlan(size=4, over_tp=True)),
    "dp4": ({"dp": 4}, None),
}


def laid_out(model: Any, mesh: str, **changes: Any) -> Any:
    sizes, experts = MESHES[mesh]
    return parallelize(model, ProcessMesh.grid(**sizes), replace(model.parallel_plan(), experts=experts, **changes))


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    forward_backward(model, RouterLosses(cross_entropy), *batch(), router=True)
    optimizer.step()
    optimizer.zero_grad()


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    states = {
        f"{state} of {name}": whole(optimizer.state[parameter][state])
        for name, parameter in named.items()
        for state in ("exp_avg", "exp_avg_sq")
        if parameter.requires_grad
    }
    return {name: whole(each) for name, each in named.items()} | states


def save(before: str, folder: Path, zero: int) -> dict[str, Tensor]:
    model = laid_out(make(CONFIG), before, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    save_checkpoint(model, folder / "checkpoint", optimizer)
    save_pretrained(model, folder / "pretrained")
    return values(model, optimizer)


def load(after: str, folder: Path, zero: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = laid_out(make_model(CONFIG), after, zero=zero)
    initialize(model, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_checkpoint(model, folder / "checkpoint", optimizer)
    sizes, experts = MESHES[after]
    plan = replace(make_model(CONFIG).parallel_plan(), experts=experts, zero=zero)
    read = from_pretrained(folder / "pretrained", ProcessMesh.grid(**sizes), plan)
    return values(model, optimizer), {name: whole(each) for name, each in read.named_parameters()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("after", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_saved_under_one_ep_and_read_under_another(
    before: str, after: str, zero: int, tmp_path: Path, pool: Any
) -> None:
    saved = pool.run(save, before, tmp_path, zero, ranks=4)[0]
    for states, weights in pool.run(load, after, tmp_path, 3 - zero, ranks=4):
        assert states.keys() == saved.keys()
        assert all(torch.equal(each, saved[name]) for name, each in states.items())
        assert all(torch.equal(each, saved[name]) for name, each in weights.items())


def drawn(mesh: str) -> dict[str, Tensor]:
    model = laid_out(make_model(CONFIG), mesh)
    initialize(model, seed=1)
    return {name: whole(each) for name, each in model.named_parameters()}


def prompts() -> Tensor:
    return torch.randint(0, 31, (3, 5), generator=torch.Generator().manual_seed(7))


def generated(mesh: str, use_cache: bool) -> tuple[Tensor, Tensor]:
    model = laid_out(make(CONFIG), mesh)
    twin = copy.deepcopy(model)
    found = [generate(each, prompts(), max_new_tokens=6, use_cache=use_cache) for each in (model, twin)]
    return found[0], found[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["dp4-ep4", "dp2-tp2-ep2", "dp2-tp2-ep4"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generates_the_tokens_of_one_process_and_so_does_a_copy(mesh: str, use_cache: bool, pool: Any) -> None:
    expected = generate(make(CONFIG), prompts(), max_new_tokens=6)
    for found, of_copy in pool.run(generated, mesh, use_cache, ranks=4):
        assert torch.equal(found, expected)
        assert torch.equal(of_copy, expected)


@pytest.mark.exhaustive
def test_initial_values_do_not_depend_on_ep(pool: Any) -> None:
    model = make_model(CONFIG)
    initialize(model, seed=1)
    for found in pool.run(drawn, "dp2-tp2-ep2", ranks=4):
        assert all(torch.equal(each, model.get_parameter(name)) for name, each in found.items())


def held(mesh: str, zero: int) -> tuple[int, int]:
    model = laid_out(make(CONFIG), mesh, zero=zero)
    plan = replace(make_model(CONFIG).parallel_plan(), experts=MESHES[mesh][1], zero=zero)
    rank = torch.distributed.get_rank()
    memory = predict_memory(make(CONFIG), ProcessMesh.grid(**MESHES[mesh][0]), plan, rank=rank)
    return sum(local_value(each).nbytes for each in model.parameters()), memory.parameters


@pytest.mark.parametrize("zero", [0, 3])
def test_memory_is_predicted(zero: int, pool: Any) -> None:
    for found, predicted in pool.run(held, "dp2-tp2-ep2", zero, ranks=4):
        assert found == predicted


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_convert_says_where_weft_alone_reads_a_folder(
    rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(replace(CONFIG, router_bias_rate=rate))
    initialize(model, seed=1)
    save_checkpoint(model, tmp_path / "checkpoint-1")
    with pytest.raises(SystemExit, match="0"):
        main(["convert", str(tmp_path / "checkpoint-1"), str(tmp_path / "out")])
    assert ("Weft alone reads the folder" in capsys.readouterr().out) == (rate > 0)
