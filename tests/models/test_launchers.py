"""What srun and mpirun say of a process, in the words of torchrun."""

from __future__ import annotations

import pytest
from weft.models.train.launchers import first_host, world_of

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
        pytest.param({**SRUN, "RANK": "0"}, id="torchrun-under-srun"),
        pytest.param({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, id="a-shell-of-srun"),
        pytest.param({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, id="a-batch-script"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, id="mpirun-of-one"),
    ],
)
def test_a_process_that_is_started_alone_is_no_world(said: dict[str, str]) -> None:
    assert world_of(said) == {}


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
