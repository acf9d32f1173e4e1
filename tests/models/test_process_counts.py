"""The number of processes that a run starts: the given mesh's, else the machine's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from weft.models.cli import main
from weft.models.cli import train as train_command
from weft.models.cli.settings import sizes_for_processes
from weft.models.train.config import MeshConfig, TrainConfig
from weft.models.train.recipes import recipe
from weft.models.train.run import Run


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def on(mesh: MeshConfig) -> TrainConfig:
    return TrainConfig(model=recipe("llama-tiny").model, mesh=mesh)


@pytest.mark.parametrize(
    ("mesh", "gpus", "sizes"),
    [
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, 0, (2, 2, 2), id="eight-on-a-cpu"),
        pytest.param({"pp": 3, "dp": 2, "tp": 2}, 0, (2, 1, 2), id="stages-on-a-cpu"),
        pytest.param({"dp": 3}, 0, (3, 1, 1), id="dp-alone"),
        pytest.param({"dp": 5, "cp": 2}, 0, (5, 2, 1), id="dp-beside-cp"),
        pytest.param({"dp": 16}, 0, (16, 1, 1), id="dp-above-the-machine"),
        pytest.param({"dp": 3, "tp": 1}, 0, (3, 1, 1), id="whole-and-odd"),
        pytest.param({"dp": 1, "tp": 1}, 0, (1, 1, 1), id="one"),
        pytest.param({"dp": 2}, 0, (2, 1, 2), id="dp-that-divides-is-filled"),
        pytest.param({"dp": 3}, 8, (3, 1, 1), id="three-of-eight-gpus"),
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, 8, (2, 2, 2), id="all-gpus"),
        pytest.param({"dp": 2}, 8, (2, 1, 4), id="gpus-that-are-filled"),
    ],
)
def test_a_mesh_that_is_given_is_started(
    mesh: dict[str, int], gpus: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: gpus)
    assert sizes_for_processes(on(MeshConfig(**mesh))) == sizes


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "cp": 2, "tp": 2}, {"dp": 8, "tp": 1}, {"dp": 16}], ids=str)
def test_no_machine_starts_more_processes_than_it_has_gpus(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 2)
    with pytest.raises(ValueError, match="does not fit 2 processes"):
        sizes_for_processes(on(MeshConfig(**mesh)))


@pytest.mark.parametrize(
    ("given", "world"), [("--mesh.dp 3", 4), ("--mesh.dp 2 --mesh.cp 2 --mesh.tp 2", 4), ("--mesh.dp 1 --mesh.tp 1", 2)]
)
def test_a_launchers_processes_are_all_used(
    given: str, world: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit) as ended:
        main(["train", *given.split()])
    assert ended.value.code == 2
    assert f"does not fit {world} processes; " in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--mesh.dp 2 --mesh.cp 2 --mesh.tp 2", "--mesh.dp 3", "--mesh.pp 2 --mesh.dp 4"])
def test_the_command_starts_as_many(
    given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.models.cli.settings.gpu_count", lambda: 0)
    Path("text.txt").write_text("warp and weft. " * 200)
    started: list[Run] = []
    monkeypatch.setattr(train_command, "launch", lambda run, gpus: started.append(run) or 0)
    with pytest.raises(SystemExit):
        main(["train", "--data.path", "text.txt", *given.split()])
    count = math.prod(map(int, given.split()[1::2]))
    assert [run.processes for run in started] == [count]
    assert f"{count} processes, mesh " in capsys.readouterr().out
