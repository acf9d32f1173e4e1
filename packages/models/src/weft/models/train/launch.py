"""Start the processes of a run, or join the processes of a launcher, and train in each.

`weft train` calls `launch` after all checks. torch is imported only in the training processes.
The processes of a launcher are known by its environment variables: torchrun's (RANK, WORLD_SIZE, ...), or their
equivalents of srun and mpirun, which `adopt_launcher` translates. In every function `environ` is the environment, as
`os.environ`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..processes import ProcessFailed, end_with_parent, is_launched, listen_on_loopback, run_together
from ..terminal import PROGRAM, begin_printing, printable

if TYPE_CHECKING:
    from .config import MeshConfig
    from .run import Run

PORT = 29500  # torch's default port
# Set for their children by torchrun, srun, Open MPI, and MPICH or Intel MPI.
OF_A_LAUNCHER = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")

SIGNALED = 128  # added to a signal's number: the exit status of a process ended by the signal, as in a shell
STOPPED = 3  # exit status of a process that has printed why the run stopped
CPU_PROCESSES = 4  # processes on a machine without GPUs
ECHO_SECONDS = 1.0  # wait before printing an error caused by another rank's failure: that rank prints the cause first
STOP_SECONDS = 30.0  # for the processes to save a checkpoint after the run was told to end


def launched_processes() -> int | None:
    """The number of processes started by a launcher (torchrun, srun, mpirun); None without a launcher.

    Raises ValueError if WORLD_SIZE is not a number.
    """
    return world_size(os.environ)


def processes_for(mesh: MeshConfig, *, gpus: int) -> int:
    """The number of processes to start for a mesh, without a launcher.

    gpus: GPUs of this machine.
    A process per GPU, or 4 without GPUs, if the product of the given sizes divides this number; `mesh_sizes` then
    chooses the missing sizes, or uses fewer processes if no size is missing. Otherwise the product itself.
    """
    requested, machine = mesh.pp * (mesh.dp or 1) * mesh.cp * (mesh.tp or 1), gpus or CPU_PROCESSES
    return requested if machine % requested else machine


def launch(run: Run, *, gpus: int) -> int:
    """Train on pp x dp x cp x tp processes of this machine, or as one of a launcher's processes.

    Returns the exit status: 0; 1 after an error, also of a process killed by a signal; 130 or 143 if a process of the
    run received SIGINT or SIGTERM, and the run was saved. A launcher's process exits with these statuses instead.
    In this process SIGTERM raises SystemExit(143) and Ctrl-C KeyboardInterrupt, after the step in progress is saved; a
    second signal ends the run at once.
    When a process fails, its error is printed with its rank and the other processes are ended.
    Every process ends with this process, and this process with the launcher.
    """
    if run.config.profile is not None:
        # Read when torch is imported; 6 is above every log level of torch's profiler.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if launched_processes() is not None:
        return _join_world(run, gpus)
    processes = run.processes
    listen_on_loopback()
    if not gpus:
        # With exact a process on any mesh has as many threads: products may depend on the number.
        threads = 1 if run.config.plan.exact else max(1, (os.cpu_count() or 1) // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    signal.signal(signal.SIGTERM, _exit)
    try:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            run_together(
                *(_work, run, processes, str(Path(folder) / "store"), gpus),
                processes=processes,
                folder=Path(folder),
                # Imported once, in the fork server. Optimizers import torch's compiler.
                preload=["weft.models.train.loop", "torch._dynamo"],
                patience=STOP_SECONDS,
            )
    except ProcessFailed as failure:
        if failure.status - SIGNALED in (signal.SIGINT, signal.SIGTERM):
            return failure.status
        if failure.status != STOPPED:
            print(f"\n{printable(str(failure))}", file=sys.stderr)
        return 1
    return 0


def _exit(signum: int, frame: object) -> None:
    """Signal handler: exit by `sys.exit`, which ends the training processes and removes temporary folders."""
    sys.exit(SIGNALED + signum)


def _work(rank: int, run: Run, processes: int, store: str, gpus: int) -> None:
    """The body of a process started by `launch`."""
    begin_printing()
    _train(run, rank, gpus, rank=rank, world_size=processes, init_method=f"file://{store}")


def _join_world(run: Run, gpus: int) -> int:
    """Train as one of a launcher's processes."""
    if has_launcher(os.environ):
        end_with_parent()
    from .agreement import meet

    try:
        world = meet(run.config.timeout)
    except RuntimeError as error:
        print(f"\n{PROGRAM} train: {printable(str(error))}", file=sys.stderr, flush=True)
        return STOPPED
    _train(run, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), gpus, **world)
    return 0


def _train(run: Run, local_rank: int, gpus: int, **world: Any) -> None:
    """Initialize the process group and train; exit with STOPPED after printing an error.

    world: the rendezvous arguments of `init_process_group`.
    """
    import torch
    import torch.distributed as dist

    from .agreement import Unanswered
    from .loop import train
    from .trainer import TrainingError

    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    elif run.config.plan.exact and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as `launch`: torchrun sets the variable for several processes, and not for one
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=run.config.timeout), **world)
    try:
        stop = train(run, device)
    except TrainingError as error:
        if dist.get_rank() == 0:
            print(f"\n{PROGRAM} train: {printable(str(error))}", file=sys.stderr, flush=True)
        dist.barrier()  # no process ends before rank 0 has printed the error
        sys.exit(STOPPED)
    except Unanswered as error:
        if error.is_printed_here:
            print(f"\n{PROGRAM} train: {printable(str(error))}", file=sys.stderr, flush=True)
        else:
            time.sleep(ECHO_SECONDS)
        sys.stdout.flush()
        os._exit(STOPPED)  # without cleanup, which would wait for silent ranks
    except RuntimeError as error:
        # a connection lost because another rank ended; wait for the error of that rank to be printed first
        if "onnection" in str(error):
            time.sleep(ECHO_SECONDS)
        raise
    finally:
        dist.destroy_process_group()
    if stop:
        sys.exit(SIGNALED + stop)


def adopt_launcher() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for a process started by srun or mpirun.

    `weft train` calls this first, before the configuration is read.
    Values of torchrun, which sets all five, are kept, and so are an address and a port, which a script may name.
    Raises ValueError if mpirun has started processes on several machines and MASTER_ADDR is not set, and for a
    launcher's variable that is missing or no number.
    """
    for name, value in world_of(os.environ).items():
        if name not in ("MASTER_ADDR", "MASTER_PORT") or name not in os.environ:
            os.environ[name] = value


def world_size(environ: Mapping[str, str]) -> int | None:
    """The number of launched processes; None unless RANK and WORLD_SIZE are set.

    Raises ValueError if WORLD_SIZE is not a number.
    """
    return _number(environ, "WORLD_SIZE") if is_launched(environ) else None


def check_world(environ: Mapping[str, str]) -> None:
    """Raise ValueError unless RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, if set, are complete and valid.

    Also for a LOCAL_RANK or LOCAL_WORLD_SIZE that is no number. `weft train` calls this before `launch`.
    """
    ranks = world_size(environ)
    if ranks is None:
        return
    rank = _number(environ, "RANK")
    if not 0 <= rank < ranks:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {ranks}; ranks are 0 to WORLD_SIZE - 1")
    for name, least in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if (value := _number(environ, name, str(least))) < least:
            raise ValueError(f"{name} is {value}; it must be {least} or more")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            raise ValueError(
                f"RANK and WORLD_SIZE are set, but {name} is not; set it in every process to where rank 0 listens"
            )
    if not 0 < _number(environ, "MASTER_PORT") < 2**16:
        raise ValueError(f"MASTER_PORT is {environ['MASTER_PORT']}; a port is 1 to {2**16 - 1}")


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """The variable as an int. Raises ValueError for anything else; default: of a variable that is not set."""
    text = _text(environ, name) if default is None else environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is not a number") from None


def _text(environ: Mapping[str, str], name: str) -> str:
    """The variable. Raises ValueError where a launcher has set other variables, but not this one."""
    if name not in environ:
        raise ValueError(
            f"the launcher's variable {name} is not set; start the command by torchrun, or set RANK, WORLD_SIZE, "
            f"LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    return environ[name]


def has_launcher(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process and stays until the process ends.

    Without a launcher, RANK was set by hand, for example over ssh, and the parent process may exit earlier.
    """
    return any(name in environ for name in OF_A_LAUNCHER)


def world_of(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, translated from the variables of srun, Open MPI, or MPICH and Intel MPI.

    Empty if RANK and WORLD_SIZE are set already, without a launcher, and for a world of a single process, which
    `launch` handles by itself. Raises ValueError as `adopt_launcher`.
    """
    if is_launched(environ):
        return {}
    # SLURM_PROCID is set in a batch script too; the number of tasks of a step is set by srun only.
    if _number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return {
            **_ranks(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
            "MASTER_ADDR": first_host(_text(environ, "SLURM_STEP_NODELIST")),
            # A port per job, below Linux's range of client ports.
            "MASTER_PORT": str(15000 + _number(environ, "SLURM_JOB_ID") % 15000),
        }
    for rank, size, local_rank, local_size in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if _number(environ, size, "1") <= 1:
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
    """The first host of Slurm's list: gpu07 for "gpu[07-09,12],cpu1". Raises ValueError for a list without a host."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?([^,]*)", hosts)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {hosts!r}, which names no host")
    prefix, number, _ = found.groups()
    return prefix + (number or "")


def _ranks(environ: Mapping[str, str], rank: str, size: str, local_rank: str) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK, read from the variables of these names. A missing local rank is the rank."""
    world = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank if local_rank in environ else rank}
    return {name: str(_number(environ, own)) for name, own in world.items()}
