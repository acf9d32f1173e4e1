"""The processes of a run, and what each of them does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import begin_printing
from ..terminal import PROGRAM, printable
from .launchers import has_launcher, world_size
from .processes import ProcessFailed, end_with_parent, run_together

if TYPE_CHECKING:
    from .config import MeshConfig, Run

SIGNALED = 128  # with a signal's number, the exit status of a process that it ended, as a shell gives it
STOPPED = 3  # exit status of a process that has said why it stops
CPU_PROCESSES = 4
LOOPBACK = "lo"
ECHO_SECONDS = 1.0
STOP_SECONDS = 30.0  # for the processes to save, once the run is told to end


def gpu_count() -> int:
    """GPUs that this process may use, asked of the driver: torch takes seconds to import, and this a millisecond."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def launched_processes() -> int | None:
    """The size of the world where a launcher such as torchrun has started this process; None otherwise.

    Raises ValueError where WORLD_SIZE is no number.
    """
    return world_size(os.environ)


def processes_for(mesh: MeshConfig, *, gpus: int) -> int:
    """The number of processes that a mesh is made for where no launcher has started any.

    gpus: of this machine, which has a process for each of them, and 4 without. The sizes of a mesh that are not given fill these
    processes; where the given sizes do not divide their number, the mesh is made for the product of the given sizes.
    """
    given, machine = mesh.pp * (mesh.dp or 1) * mesh.cp * (mesh.tp or 1), gpus or CPU_PROCESSES
    return given if machine % given else machine


def launch(run: Run, *, gpus: int) -> int:
    """Runs `run` on dp x cp x tp processes of this machine, or as one of those that a launcher has started.

    Returns the exit status: 0, or 1 where the run stopped. SIGTERM ends it with 143, when the step under way is saved, and Ctrl-C
    by KeyboardInterrupt; a second one at once. When one process fails the others are ended, and its error is printed first,
    with its rank. All end with this one, and this one with the launcher that started it.
    """
    if run.config.profile is not None:
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # above all that torch's profiler logs; read as torch is imported
    if launched_processes() is not None:
        return _join_world(run, gpus)
    processes = run.processes
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        # By default gloo and NCCL's bootstrap listen on an interface that other machines may reach.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, LOOPBACK)
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    signal.signal(signal.SIGTERM, _exit)
    try:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            run_together(
                *(_work, run, processes, str(Path(folder) / "store"), gpus),
                processes=processes,
                folder=Path(folder),
                # Imported once, not once a process: torch, and its compiler, which optimizers load as they are made.
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
    """Ends this process as by `sys.exit`, so that it ends the others and leaves no folder."""
    sys.exit(SIGNALED + signum)


def _work(rank: int, run: Run, processes: int, store: str, gpus: int) -> None:
    begin_printing()
    _train(run, rank, gpus, rank=rank, world_size=processes, init_method=f"file://{store}")


def _join_world(run: Run, gpus: int) -> int:
    if has_launcher(os.environ):
        end_with_parent()
    from .meeting import meet

    _train(run, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), gpus, **meet(run.config.timeout))
    return 0


def _train(run: Run, local_rank: int, gpus: int, **world: Any) -> None:
    import torch
    import torch.distributed as dist

    from .loop import train
    from .rollcall import Unanswered
    from .trainer import TrainingError

    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=run.config.timeout), **world)
    try:
        stop = train(run, device)
    except TrainingError as error:
        if dist.get_rank() == 0:
            print(f"\n{PROGRAM} train: {printable(str(error))}", file=sys.stderr, flush=True)
        dist.barrier()  # said before any process ends
        sys.exit(STOPPED)
    except Unanswered as error:
        if error.is_told:
            print(f"\n{PROGRAM} train: {printable(str(error))}", file=sys.stderr, flush=True)
        else:
            time.sleep(ECHO_SECONDS)
        sys.stdout.flush()
        os._exit(STOPPED)  # without a word to the others, which would wait for an answer
    except RuntimeError as error:
        if "onnection" in str(error):  # an echo of another rank's end, which is to be heard first
            time.sleep(ECHO_SECONDS)
        raise
    finally:
        dist.destroy_process_group()
    if stop:
        sys.exit(SIGNALED + stop)
