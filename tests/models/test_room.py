"""A run too large for the machine is refused before processes start; a run that fits is not refused."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from weft.mesh import ProcessMesh
from weft.models import predict_memory
from weft.models.cli import main
from weft.models.data.text import Corpus
from weft.models.train import memory_check
from weft.models.train.config import OPTIMIZERS, MeshConfig, OptimizerConfig, state_tensors
from weft.models.train.explanation import Outline
from weft.models.train.memory_check import (
    MachineMemory,
    MemoryNeed,
    check_room,
    cpu_memory,
    gpu_memory,
    memory_need,
)
from weft.models.train.optimizer import count_states, make_optimizer
from weft.models.train.recipes import recipe
from weft.models.train.run import Run

GIB = 2**30


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run_of(name: str, axes: dict[str, int], *, zero: int = 0, optimizer: str = "adamw", check: bool = False) -> Run:
    config = recipe(name)
    config = replace(
        config,
        check=check,
        mesh=MeshConfig(**axes),
        plan=replace(
            config.plan,
            zero=zero,
            **({"microbatches": 2, "schedule": "1f1b", "split": "layers"} if "pp" in axes else {}),
        ),
        optimizer=replace(config.optimizer, name=optimizer),
    )  # fmt: skip
    return Run(
        recipe=name, config=config, corpus=Corpus("a text", (), 10), folder=Path("x"), **{"dp": 1, "tp": 1, **axes}
    )


@pytest.mark.parametrize(("optimizer", "zero"), [*(("adamw", zero) for zero in range(4)), ("muon", 1)])
@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 3, "tp": 2}, {"pp": 2, "dp": 2}, {"cp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "llama-tiny-tied"])
def test_no_run_holds_less(name: str, axes: dict[str, int], optimizer: str, zero: int) -> None:
    """`predict_memory` lays out each parameter on each rank; the estimate is at most 10% below, and never above."""
    run = run_of(name, axes, zero=zero, optimizer=optimizer)
    outline = Outline.of(run.config, run.axes)
    mesh, states = ProcessMesh.grid(**run.axes), count_states(outline.make_model(), run.config.optimizer)
    of_ranks = [
        predict_memory(outline.make_model(), mesh, outline.plan, rank=rank, states=states) for rank in range(mesh.size)
    ]
    kept = 0 if zero == 3 else 1  # gathered parameters: zero=3 frees them after each call
    held = [each.parameters + kept * each.gathered + each.gradients + each.states for each in of_ranks]
    assert sum(held) >= memory_need(run, on_gpus=False).nbytes > 0.9 * sum(held)
    assert max(held) >= memory_need(run, on_gpus=True).nbytes > 0.6 * max(held), "stages are not of one size"


def kept_states(config: OptimizerConfig, *, in_block: bool) -> int:
    """The optimizer's state values per element of a matrix, after a step on a model of four weights."""
    block, head = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    for each in (block, head):
        each.weight.grad = torch.ones_like(each.weight)
    optimizer = make_optimizer(nn.ModuleDict({"blocks": nn.ModuleList([block]), "head": head}), config)
    optimizer.step()
    weight = block.weight if in_block else head.weight
    states = optimizer.state[weight].values()
    return sum(isinstance(each, torch.Tensor) and each.shape == weight.shape for each in states)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_each_optimizer_is_known(name: str, beta1: float) -> None:
    config = OptimizerConfig(name=name, beta1=beta1)
    for in_block in (False, True):
        assert state_tensors(config, in_block=in_block) == kept_states(config, in_block=in_block)


def test_the_comparison_with_one_process_needs_a_whole_model() -> None:
    alone = MemoryNeed(parameters=100, processes=1, parts=8, holders=1, zero=0, states=2, compares=False)
    assert alone.nbytes == 16 * 100 / 8
    assert replace(alone, compares=True).nbytes == 4 * 100 / 8 + 4 * 100
    assert replace(alone, parts=1, compares=True).nbytes == 16 * 100, "which is less than an update needs"


@pytest.mark.parametrize(
    ("name", "axes", "gpus", "a_parameter", "fitting"),
    [
        pytest.param("llama3-8b", {"dp": 2, "tp": 2}, 0, 32, "the recipe gpt2-large", id="cpu"),
        pytest.param("llama3.2-1b", {"dp": 4}, 0, 64, "--plan.zero 3, or the recipe smollm2-360m", id="zero"),
        pytest.param("llama3.2-1b", {"dp": 1, "tp": 4}, 4, None, None, id="gpus-that-suffice"),
        pytest.param(
            "llama3-70b",
            {"dp": 1, "tp": 8},
            8,
            2,
            "42 such GPUs by --mesh.dp 42 --mesh.tp 1 --plan.zero 3 --no-check, or the recipe qwen3-8b",
            id="more-gpus",
        ),
    ],
)  # fmt: skip
def test_a_run_without_enough_memory_is_refused_with_a_plan_that_fits(
    name: str, axes: dict[str, int], gpus: int, a_parameter: int | None, fitting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a_parameter: bytes for each parameter, on a GPU or on the machine."""
    memory = MachineMemory(32 * GIB, 32 * GIB)
    monkeypatch.setattr(memory_check, "cpu_memory", lambda: memory)
    monkeypatch.setattr(memory_check, "gpu_memory", lambda: memory)
    run = run_of(name, axes)
    if a_parameter is None:
        assert check_room(run, gpus=gpus) == []
        return
    with pytest.raises(ValueError) as refused:
        check_room(run, gpus=gpus)
    mesh = " x ".join(f"{axis}={size}" for axis, size in run.axes.items())
    where = "a GPU" if gpus else "this machine"
    needs = a_parameter * run.config.model.num_parameters / GIB
    assert str(refused.value) == (
        f"{name} on {mesh} needs at least {needs:.1f} GiB on {where}, without activations, and there are 32.0 GiB; "
        f"would fit: {fitting}"
    )


@pytest.mark.parametrize(
    ("total", "available", "said"),
    [
        pytest.param(0.9, 0.9, "refused", id="above-the-total"),
        pytest.param(1.0, 0.5, "near", id="what-others-use-may-be-given-back"),
        pytest.param(1.0, 1.0, "near", id="to-the-byte"),
        pytest.param(2.0, 2.0, "", id="room"),
    ],
)
@pytest.mark.parametrize("gpus", [0, 1])
def test_near_the_limit_is_a_line(
    total: float, available: float, said: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("llama-tiny", {"dp": 1})
    needed = 16 * run.config.model.num_parameters
    memory = MachineMemory(math.ceil(needed * total), math.ceil(needed * available))
    monkeypatch.setattr(memory_check, "cpu_memory", lambda: memory)
    monkeypatch.setattr(memory_check, "gpu_memory", lambda: memory)
    if said == "refused":
        with pytest.raises(ValueError, match=r"llama-tiny on dp=1 x tp=1 needs at least 0\.0 GiB"):
            check_room(run, gpus=gpus)
        return
    lines = check_room(run, gpus=gpus)
    assert [line.partition(":")[0] for line in lines] == (["memory may not suffice"] if said else [])
    assert all(line.endswith(", and a GPU has 0.0 GiB" if gpus else ", and 0.0 GiB are free") for line in lines)


def test_a_machine_that_does_not_say_its_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "cpu_memory", lambda: None)
    assert check_room(run_of("llama3.1-405b", {"dp": 1}), gpus=0) == []


def test_of_a_launcher_the_processes_of_this_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("llama-tiny", {"dp": 8})
    monkeypatch.setenv("RANK", "0")
    assert memory_need(run, on_gpus=False).processes == 8, "a shell's own variable"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert memory_need(run, on_gpus=False).processes == 1, "more are not known of"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory_need(run, on_gpus=False).processes == 4


MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 700 kB\nSwapTotal: 200 kB\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        pytest.param({"proc/meminfo": MEMINFO}, (1200, 700), id="machine"),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "307200\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            (500, 300),
            id="group-above",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:cpu:/x\n3:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "102400",
            },
            (300, 100),
            id="version-1",
        ),
        pytest.param(
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "3:memory:/a\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(2**63 - 4096),
            },
            (1200, 700),
            id="no-limit",
        ),
        pytest.param({"proc/meminfo": "MemTotal: 1000 kB\n"}, None, id="less-is-said"),
        pytest.param({}, None, id="nothing-is-said"),
    ],
)  # fmt: skip
def test_the_memory_of_a_machine(files: dict[str, str], found: tuple[int, int] | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_memory(tmp_path) == (None if found is None else MachineMemory(found[0] * 1024, found[1] * 1024))


def test_the_memory_of_this_machine() -> None:
    memory = cpu_memory()
    assert memory is not None and 0 < memory.usable <= memory.total


@pytest.mark.gpu
def test_the_memory_of_a_gpu() -> None:
    import torch

    memory = gpu_memory()
    assert memory is not None
    totals = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    assert memory.total == pytest.approx(min(totals), rel=0.02)


@pytest.mark.exhaustive
def test_the_command_refuses_before_torch_is_imported(tmp_path: Path) -> None:
    program = """
import sys
from weft.models.cli import main
try:
    main(["train", "llama3.1-405b"])
except SystemExit as end:
    assert end.code == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert (
        line.startswith("weft train: llama3.1-405b on dp=2 x tp=2 needs at least 12,095.") and "; would fit: " in line
    )
    assert not any(tmp_path.iterdir())


def test_a_configuration_is_printed_wherever_it_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "llama3.1-405b", "--print-config"])
    assert 'recipe = "llama3.1-405b"' in capsys.readouterr().out
