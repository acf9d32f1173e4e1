"""Environment variables of launchers: torchrun's (RANK, WORLD_SIZE, ...), and their equivalents of srun and mpirun.

In every function `environ` is the environment, as `os.environ`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

PORT = 29500  # torch's default port
# Set for their children by torchrun, srun, Open MPI, and MPICH or Intel MPI.
OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def adopt_launcher() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for a process started by srun or mpirun.

    Existing values are kept: torchrun sets all five, and a script may name the address or the port.
    Raises ValueError if mpirun has started processes on several machines and MASTER_ADDR is not set.
    """
    for name, value in world_of(os.environ).items():
        os.environ.setdefault(name, value)


def world_size(environ: Mapping[str, str]) -> int | None:
    """The number of launched processes; None unless RANK and WORLD_SIZE are set.

    Raises ValueError if WORLD_SIZE is not a number.
    """
    return _number(environ, "WORLD_SIZE") if "RANK" in environ and "WORLD_SIZE" in environ else None


def check_world(environ: Mapping[str, str]) -> None:
    """Raise ValueError unless RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, if set, are complete and valid."""
    ranks = world_size(environ)
    if ranks is None:
        return
    rank = _number(environ, "RANK")
    if not 0 <= rank < ranks:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {ranks}; ranks are 0 to WORLD_SIZE - 1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"RANK and WORLD_SIZE are set, but {name} is not; set it in every process to where rank 0 listens"
            )
    if not 0 < _number(environ, "MASTER_PORT") < 2**16:
        raise ValueError(f"MASTER_PORT is {environ['MASTER_PORT']}; a port is 1 to {2**16 - 1}")


def _number(environ: Mapping[str, str], name: str) -> int:
    """The variable as an int. Raises ValueError for anything else."""
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} is {environ[name]!r}, which is not a number") from None


def has_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process and stays until the process ends.

    Without a launcher, RANK was set by hand, for example over ssh, and the parent process may exit earlier.
    """
    return any(name in environ for name in OF_A_LAUNCHER)


def world_of(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, translated from the variables of srun, Open MPI, or MPICH and Intel MPI.

    Empty if RANK is set already, without a launcher, and for a world of a single process, which `launch` handles by
    itself.
    """
    if "RANK" in environ:
        return {}
    # SLURM_PROCID is set in a batch script too; the number of tasks of a step is set by srun only.
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return {
            **_ranks(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
            "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
            # A port per job, below Linux's range of client ports.
            "MASTER_PORT": str(15000 + int(environ["SLURM_JOB_ID"]) % 15000),
        }
    for rank, size, local_rank, local_size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if int(environ.get(size, "1")) <= 1:
            continue
        if "MASTER_ADDR" not in environ and environ.get(local_size) != environ[size]:
            raise ValueError(
                f"mpirun has started {environ[size]} processes, {environ.get(local_size, 'an unknown number')} of them "
                f"on this machine, and does not say where rank 0 is; set MASTER_ADDR to that machine's name in every "
                f"process"
            )
        return {**_ranks(environ, rank, size, local_rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    return {}


def first_host(hosts: str) -> str:
    """The first host of Slurm's list: gpu07 for "gpu[07-09,12],cpu1"."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?([^,]*)", hosts)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {hosts!r}, which names no host")
    prefix, number, _ = found.groups()
    return prefix + (number or "")


def _ranks(environ: Mapping[str, str], rank: str, size: str, local_rank: str) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK, read from the variables of these names. A missing local rank is the rank."""
    return {"RANK": environ[rank], "WORLD_SIZE": environ[size], "LOCAL_RANK": environ.get(local_rank, environ[rank])}
