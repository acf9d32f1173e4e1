"""The variables that srun and mpirun set for a process, translated to torchrun's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from weft.models.cli import main
from weft.models.cli.arguments import is_printing_rank
from weft.models.data.text import Corpus
from weft.models.train import agreement, launch, loop
from weft.models.train.agreement import meet
from weft.models.train.config import PlanConfig
from weft.models.train.launch import (
    OF_A_LAUNCHER,
    adopt_launcher,
    first_host,
    has_launcher,
    launched_processes,
    world_of,
)
from weft.models.train.recipes import recipe
from weft.models.train.run import Run

from tests.architecture.rules import ROOT
from tests.support import preloaded
from tests.support.limits import PATIENCE
from tests.support.pool import Pool

SRUN = {
    "SLURM_JOB_ID": "31007",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_srun() -> None:
    assert world_of(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "16007",
    }


@patch.dict(os.environ, {"RANK": "8", "MASTER_ADDR": "node9"}, clear=True)
def test_a_variable_of_the_shell_is_no_rank() -> None:
    """As RANK of a script that trains adapters of this rank."""
    assert launched_processes() is None and is_printing_rank()
    os.environ.update(SRUN)
    adopt_launcher()
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["5", "8", "1"]
    assert [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")] == ["node9", "16007"]


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        pytest.param(SRUN | {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many', which", id="srun-size"),
        pytest.param(SRUN | {"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST is not set", id="srun-hosts"),
        pytest.param(SRUN | {"SLURM_PROCID": None}, "SLURM_PROCID is not set", id="srun-rank"),
        pytest.param(SRUN | {"SLURM_JOB_ID": None}, "SLURM_JOB_ID is not set", id="srun-no-job"),
        pytest.param(SRUN | {"SLURM_JOB_ID": "job"}, "SLURM_JOB_ID is 'job', which is not a number", id="srun-job"),
        pytest.param(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is '', which", id="mpi-size"),
        pytest.param(MPICH | {"PMI_RANK": None}, "PMI_RANK is not set", id="mpi-rank"),
        pytest.param(MPICH | {"MPI_LOCALRANKID": "x"}, "MPI_LOCALRANKID is 'x', which", id="mpi-local-rank"),
    ],
)
def test_a_launcher_that_says_half_is_an_error_with_the_variable(said: dict[str, str | None], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        world_of({name: value for name, value in said.items() if value is not None})


@pytest.mark.parametrize(
    ("said", "rank", "size"),
    [
        pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "3", "4", id="open-mpi"),
        pytest.param(MPICH, "1", "2", id="mpich"),
    ],
)
def test_mpirun_on_one_machine(said: dict[str, str], rank: str, size: str) -> None:
    world = world_of(said)
    assert world == {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_mpirun_on_several_machines_must_name_the_first() -> None:
    said = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ValueError, match=r"has started 4 processes, 2 of them on this machine, .* set MASTER_ADDR"):
        world_of(said)
    assert world_of({**said, "MASTER_ADDR": "node1"})["RANK"] == "3"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({}, id="nothing"),
        pytest.param({**SRUN, "RANK": "0", "WORLD_SIZE": "2"}, id="torchrun-under-srun"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, id="a-shell-of-srun"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, id="a-batch-script"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, id="mpirun-of-one"),
    ],
)
def test_a_process_that_is_started_alone_is_no_world(said: dict[str, str]) -> None:
    assert world_of(said) == {}


@pytest.mark.parametrize(
    ("said", "stays"),
    [
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, True, id="torchrun"),
        pytest.param(SRUN, True, id="srun"),
        pytest.param(OPEN_MPI, True, id="open-mpi"),
        pytest.param(MPICH, True, id="mpich"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, False, id="by-hand"),
    ],
)
def test_who_stays_beside_the_processes_it_has_started(said: dict[str, str], stays: bool) -> None:
    assert has_launcher(said) == stays


@pytest.mark.parametrize("variables", [{"TORCHELASTIC_RUN_ID": "none"}, {}], ids=["torchrun", "by-hand"])
def test_a_rank_watches_its_launcher_before_anything_else(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    for name in OF_A_LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "end_with_parent", lambda: did.append("watches"))
    monkeypatch.setattr(agreement, "meet", lambda timeout: did.append("meets") or {})
    monkeypatch.setattr(launch, "_train", lambda *arguments, **world: did.append("trains"))
    config = recipe("llama-tiny")
    run = Run(recipe="llama-tiny", config=config, corpus=Corpus("none", (), 0), dp=1, tp=1, folder=Path("run"))
    assert launch.launch(run, gpus=0) == 0
    assert did == [*(["watches"] if variables else []), "meets", "trains"]


@pytest.mark.parametrize(
    ("exact", "variable", "threads"),
    [
        pytest.param("dp=2", None, 1, id="exact"),
        pytest.param("dp=2", "2", 2, id="exact-of-two-threads"),
        pytest.param(None, None, 2, id="ordinary"),
    ],
)
def test_a_launched_process_of_an_exact_run_has_one_thread_as_on_every_mesh(
    exact: str | None, variable: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments, **world: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(loop, "train", lambda run, device: found.append(torch.get_num_threads()))
    config = replace(recipe("llama-tiny"), plan=PlanConfig(exact=exact))
    run = Run(recipe="llama-tiny", config=config, corpus=Corpus("none", (), 0), dp=1, tp=1, folder=Path("run"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        launch._train(run, 0, 0)
    finally:
        torch.set_num_threads(before)
    assert found == [threads]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu3,gpu[5-6]", "gpu3"),
        ("a-b-[001,003]", "a-b-001"),
        ("n[2]", "n2"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def free_port() -> int:
    """A free port, from the range that job numbers map to."""
    for port in range(15000 + os.getpid() % 1000, 30000):
        with socket.socket() as asking:
            if asking.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("15000 ports are taken")


def said_to_two(launcher: str) -> list[dict[str, str]]:
    """The launcher's variables for each of two processes on this machine."""
    port = free_port()
    if launcher == "srun":
        of_all = {
            "SLURM_JOB_ID": str(port - 15000),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "localhost",
        }
        return [{**of_all, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    of_all = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_PORT": str(port)}
    return [{**of_all, "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank} for rank in ("0", "1")]


def joined(said: list[dict[str, str]]) -> tuple[int, str, float]:
    """This process's rank and local rank by the launcher's variables, and the sum of both ranks' numbers."""
    own = said[dist.get_rank()]
    dist.destroy_process_group()  # of the pool
    before = dict(os.environ)
    try:
        os.environ.update(own)
        adopt_launcher()
        world, local_rank = meet(PATIENCE), os.environ["LOCAL_RANK"]
    finally:
        os.environ.clear()
        os.environ.update(before)
    dist.init_process_group("gloo", **world)
    total = torch.tensor(10.0 ** dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), local_rank, total.item()


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_processes_join_by_what_their_launcher_says(launcher: str, pool: Pool) -> None:
    assert pool.run(joined, said_to_two(launcher), ranks=2) == [(0, "0", 11.0), (1, "1", 11.0)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_run_of_two_commands_that_a_launcher_has_started(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("woven by two. " * 400)
    command = [sys.executable, "-m", "weft.models.cli", "train", "--steps", "2", "--log-every", "1", "--output", "run"]
    options = ["--mesh.dp", "2", "--mesh.tp", "1", "--data.path", "text.txt", "--data.sequence-length", "32"]
    processes = [
        subprocess.Popen(
            [*command, *options, "--model.num-layers", "1", "--optimizer.warmup-steps", "1"],
            cwd=tmp_path,
            env={**os.environ, **said},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for said in said_to_two(launcher)
    ]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 processes, mesh dp=2 x tp=1" in outputs[0] and "on 2 processes" in outputs[0]
    assert outputs[1] == ""  # rank 0 speaks for both
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics] == [1, 2]


WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999; a port is 1 to 65535", id="port"),
        pytest.param({"MASTER_PORT": "0"}, "MASTER_PORT is 0; a port is 1 to 65535", id="no-port"),
        pytest.param({"MASTER_PORT": "-5"}, "MASTER_PORT is -5; a port is 1 to 65535", id="below-0"),
        pytest.param({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', which is not a number", id="port-in-words"),
        pytest.param(
            {"MASTER_PORT": None},
            "RANK and WORLD_SIZE are set, but MASTER_PORT is not; set it in every process to",
            id="no-port-at-all",
        ),
        pytest.param(
            {"MASTER_ADDR": None},
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not; set it in every process to",
            id="no-address",
        ),
        pytest.param(
            {"MASTER_ADDR": ""},
            "RANK and WORLD_SIZE are set, but MASTER_ADDR is not; set it in every process to",
            id="empty-address",
        ),
        pytest.param({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is not a number", id="size"),
        pytest.param(
            {"RANK": "zero"}, "RANK is 'zero', which is not a number", id="rank", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            {"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2; ranks are 0 to WORLD_SIZE - 1", id="rank-of-another"
        ),
        pytest.param({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first', which is not a number", id="local-rank"),
        pytest.param({"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1; it must be 0 or more", id="local-rank-below-0"),
        pytest.param({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE is 'two', which is not", id="local-size"),
        pytest.param({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0; it must be 1 or more", id="local-size-0"),
    ],
)  # fmt: skip
def test_a_world_that_cannot_meet_is_one_line(
    changed: dict[str, str | None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.models.cli.arguments.SILENT_SECONDS", 0.0)
    Path("text.txt").write_text("woven by two. " * 400)
    for name, value in {**WORLD, **changed}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data.path", "text.txt"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft train: {said}")


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens, in the kernel's notation."""
    sockets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def heard_on(folder: str, rank: int) -> None:
    """Write the addresses on which a process of `weft train` listens, with its gloo group."""
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    dist.barrier()
    # The machine's name may resolve to the loopback anyway, so the settings are compared, too.
    assert [os.environ.get(name) for name in INTERFACES] == ["lo", "lo"]
    Path(f"{folder}/{rank}").write_text("\n".join(listening(os.getpid())))
    dist.barrier()
    dist.destroy_process_group()


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_processes_of_its_own_meet_on_the_loopback(tmp_path: Path) -> None:
    """Processes listen on the loopback alone, whatever the host's name resolves to.

    Runs in a process of its own: the processes of `launch` inherit the environment of the first call.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (*WORLD, *INTERFACES)}
    script = f"from tests.models.test_launchers import launch_listening; launch_listening({str(tmp_path)!r})"
    done = preloaded.run([sys.executable, "-c", script], env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    heard = [set((tmp_path / str(rank)).read_text().split()) for rank in range(2)]
    assert heard[0] and heard[0] | heard[1] <= LOOPBACK


def launch_listening(folder: str) -> None:
    launch._work = run_listening
    run = Run(
        recipe="llama-tiny",
        config=recipe("llama-tiny"),
        corpus=Corpus("a text", (), 10),
        dp=2,
        tp=1,
        folder=Path(folder),
    )
    assert launch.launch(run, gpus=0) == 0


def run_listening(rank: int, run: Run, *others: object) -> None:
    heard_on(str(run.folder), rank)
