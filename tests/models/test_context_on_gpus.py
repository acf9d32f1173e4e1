"""Context parallelism with a rank on each GPU, over NCCL; and the same program on processes of a CPU, over gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import forward_backward, parallelize

from tests.models.cases import gradients_off, whole
from tests.models.test_context import CONFIG, DROPS, KEY, KINDS, batch, make

LENGTH = 19  # divided by no number of ranks


def trained(device: str, given: dict[str, Any], kind: str | None = None) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, on one process or, with a kind of context parallelism, over all ranks."""
    model = make(replace(CONFIG, **DROPS)).to(device)
    if kind is not None:
        plan = replace(model.parallel_plan(), context=kind)
        parallelize(model, ProcessMesh.grid(cp=dist.get_world_size()), plan)
    inputs = {name: each.to(device) for name, each in given.items()}
    loss = forward_backward(model, cross_entropy, dropout_key=KEY, **inputs)
    return loss.item(), {name: whole(each.grad).cpu() for name, each in model.named_parameters()}


def on_rank(rank: int, ranks: int, device: str, store: str) -> None:
    """Both kinds compared with one process; each rank has its own GPU where `device` is "cuda"."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        for packed in (False, True):
            given = batch(LENGTH, packed)
            loss, gradients = trained(device, given)
            for kind in KINDS:
                found, those = trained(device, given, kind)
                assert found == pytest.approx(loss, rel=1e-6)
                assert not gradients_off(those, gradients), f"{kind}, packed={packed}"
    finally:
        dist.destroy_process_group()


GPUS = torch.cuda.device_count()


@pytest.mark.gpu
@pytest.mark.skipif(GPUS not in (2, 4), reason=f"takes two or four GPUs, one for each rank; there are {GPUS}")
def test_on_every_gpu(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_rank, (GPUS, "cuda", str(tmp_path / "store")), nprocs=GPUS)


@pytest.mark.exhaustive  # the sample uses the pool's worker processes
def test_the_programs_of_gpus_run_on_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_rank, (2, "cpu", str(tmp_path / "store")), nprocs=2)
