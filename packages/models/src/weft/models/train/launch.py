"""The processes of a run: started together, ended together."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import PROGRAM

if TYPE_CHECKING:
    from .config import Run

STOPPED = 3  # exit status of a process that has said why it stops
INTERRUPTED = 130  # as a shell gives it for SIGINT
CPU_PROCESSES = 4
ECHO_SECONDS = 1.0
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


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
    """The size of the world where a launcher such as torchrun has started this process; None otherwise."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def launch(run: Run, *, gpus: int) -> int:
    """Runs `run` on dp x tp processes of this machine, or as one of those that a launcher has started.

    Returns the exit status: 0, or 1 where the run stopped. When one process fails the others are ended, and its error
    is printed first, with its rank.
    """
    if launched_processes() is not None:
        return _join_world(run, gpus)
    processes = run.dp * run.tp
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["weft.models.train.loop"])  # torch is imported once, not once a process
    ensure_running()  # while this process imports torch, too
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        return _start_and_watch(run, processes, Path(folder) / "store", gpus)


def _start_and_watch(run: Run, processes: int, store: Path, gpus: int) -> int:
    from torch.multiprocessing.spawn import (
        ProcessExitedException,
        ProcessRaisedException,
        start_processes,
    )

    # It would warn of every process it ends, before the error that is the reason.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    started: Any = start_processes(  # type: ignore[no-untyped-call]
        _work, (run, processes, str(store), gpus), nprocs=processes, join=False, start_method="forkserver"
    )
    try:
        while not started.join(grace_period=2):
            pass
    except ProcessRaisedException as error:
        print(f"\nrank {error.error_index} failed:{error.msg.partition('error:')[2]}", file=sys.stderr)
        return 1
    except ProcessExitedException as error:
        if error.exit_code != STOPPED:
            how = f"killed by {error.signal_name}" if error.signal_name else f"exited with status {error.exit_code}"
            print(f"\nrank {error.error_index} {how}; the other processes were ended", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; checkpoints that were saved are whole", file=sys.stderr)
        return INTERRUPTED
    finally:
        for process in started.processes:
            process.terminate()
    return 0


def _work(rank: int, run: Run, processes: int, store: str, gpus: int) -> None:
    # Ends it at once: the parent speaks for all, and torch sends this signal to orphans.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _train(run, rank, gpus, rank=rank, world_size=processes, init_method=f"file://{store}")


def _join_world(run: Run, gpus: int) -> int:
    _train(run, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), gpus)
    return 0


def _train(run: Run, local_rank: int, gpus: int, **world: Any) -> None:
    import torch
    import torch.distributed as dist

    from .loop import TrainingError, train

    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=COLLECTIVE_TIMEOUT, **world)
    try:
        train(run, device)
    except TrainingError as error:
        if dist.get_rank() == 0:
            print(f"\n{PROGRAM} train: {error}", file=sys.stderr, flush=True)
        dist.barrier()  # said before any process ends
        sys.exit(STOPPED)
    except RuntimeError as error:
        if "onnection" in str(error):  # an echo of another rank's end, which is to be heard first
            time.sleep(ECHO_SECONDS)
        raise
    finally:
        dist.destroy_process_group()
