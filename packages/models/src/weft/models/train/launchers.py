"""What launchers tell the processes that they start, in the words of torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

PORT = 29500  # torch's own
# What torchrun, srun, Open MPI, or MPICH and Intel MPI set, each for the processes that are its children.
OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def adopt_launcher() -> None:
    """Where srun or mpirun has started this process, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    What is set already stays: torchrun sets all, and a script may name the machine or the port.
    Raises ValueError where mpirun has started processes on several machines and nobody says where rank 0 is.
    """
    for name, value in world_of(os.environ).items():
        os.environ.setdefault(name, value)


def world_size(said: Mapping[str, str]) -> int | None:
    """The number of processes of a world; None where none has been started. Raises ValueError where it is no number."""
    return _number(said, "WORLD_SIZE") if "RANK" in said and "WORLD_SIZE" in said else None


def check_world(said: Mapping[str, str]) -> None:
    """Raises ValueError where the variables of a launcher, or those that were set by hand, do not say where the ranks meet."""
    ranks = world_size(said)
    if ranks is None:
        return
    rank = _number(said, "RANK")
    if not 0 <= rank < ranks:
        raise ValueError(f"RANK is {rank}, and WORLD_SIZE {ranks}; ranks are 0 to WORLD_SIZE - 1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not said.get(name):
            raise ValueError(
                f"RANK and WORLD_SIZE are set, and {name} is not; set it to where rank 0 is, for all of them"
            )
    if not 0 < _number(said, "MASTER_PORT") < 2**16:
        raise ValueError(f"MASTER_PORT is {said['MASTER_PORT']}; a port is 1 to {2**16 - 1}")


def _number(said: Mapping[str, str], name: str) -> int:
    try:
        return int(said[name])
    except ValueError:
        raise ValueError(f"{name} is {said[name]!r}, which is no number") from None


def has_launcher(said: Mapping[str, str]) -> bool:
    """Whether a launcher stays beside this process until it ends. Who sets RANK by hand, as over ssh, may go away before."""
    return any(name in said for name in OF_A_LAUNCHER)


def world_of(said: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun, from those of srun, of Open MPI, or of MPICH and Intel MPI; none where neither has spoken.

    A process that is started alone is no world: it starts its own.
    """
    if "RANK" in said:
        return {}
    # In a batch script too there is a SLURM_PROCID; the number of a step's tasks is srun's alone.
    if int(said.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return {
            **_ranks(said, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
            "MASTER_ADDR": first_host(said["SLURM_STEP_NODELIST"]),
            # One for each job of a machine, below those that Linux gives to clients.
            "MASTER_PORT": str(15000 + int(said["SLURM_JOB_ID"]) % 15000),
        }
    for rank, size, local_rank, local_size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if int(said.get(size, "1")) <= 1:
            continue
        if "MASTER_ADDR" not in said and said.get(local_size) != said[size]:
            raise ValueError(
                f"mpirun has started {said[size]} processes, {said.get(local_size, 'an unknown number')} of them on this "
                f"machine, and does not say on which rank 0 is; set MASTER_ADDR to its name, for all of them"
            )
        return {**_ranks(said, rank, size, local_rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    return {}


def first_host(hosts: str) -> str:
    """The first of Slurm's list of hosts: "gpu[07-09,12],cpu1" begins with gpu07."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?([^,]*)", hosts)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {hosts!r}, which names no host")
    prefix, number, _ = found.groups()
    return prefix + (number or "")


def _ranks(said: Mapping[str, str], rank: str, size: str, local_rank: str) -> dict[str, str]:
    return {"RANK": said[rank], "WORLD_SIZE": said[size], "LOCAL_RANK": said.get(local_rank, said[rank])}
