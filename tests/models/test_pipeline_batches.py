"""Batches laid out by the caller on a mesh with stages: all stages have the same rows, and one process's numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import Layout, ProcessMesh
from weft.models import PipelinePlan, forward_backward, lay_out_batch, parallelize
from weft.reshard import distribute

from tests.models.cases import gradients_off, whole
from tests.models.test_pipeline import make
from tests.support.pool import Pool

ROWS, T = 8, 12


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, targets, and each token's position and document: rows of several documents, cut in various places."""
    ids = torch.randint(0, 31, (ROWS, T + 1), generator=torch.Generator().manual_seed(5))
    documents = torch.zeros(ROWS, T, dtype=torch.int64)
    positions = torch.arange(T).repeat(ROWS, 1)
    for row in range(ROWS):
        for start in (3 + row % 4, 9):
            documents[row, start:] += 1
            positions[row, start:] = torch.arange(T - start)
    targets = ids[:, 1:].clone()
    targets[2, 4:] = targets[5] = -100
    return ids[:, :-1].contiguous(), targets, positions, documents


def expected(*, packed: bool) -> tuple[float, dict[str, Tensor]]:
    model, (tokens, targets, positions, documents) = make("llama"), batch()
    inputs = {"positions": positions, "documents": documents} if packed else {}
    loss = cross_entropy(model(tokens, **inputs), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def laid_out(axes: dict[str, int], packed: bool, own_rows: bool) -> tuple[float, list[str]]:
    """A step with a batch laid out on the whole mesh: the loss, and the gradients which differ from one process's."""
    mesh, model = ProcessMesh.grid(**axes), make("llama")
    plan = replace(
        model.parallel_plan(),
        context="all_gather" if "cp" in axes else None,
        pipeline=PipelinePlan(microbatches=2),
    )
    parallelize(model, mesh, plan)
    tensors: dict[str, Any] = dict(zip(("tokens", "targets", "positions", "documents"), batch(), strict=True))
    if not packed:
        del tensors["positions"], tensors["documents"]
    if own_rows:
        here = Layout(mesh, {"dp": "S(0)"} if "dp" in axes else {})
        own = here.local_slices((ROWS, T), torch.distributed.get_rank())[0]
        tensors = {name: each[own] for name, each in tensors.items()} | {"rows": ROWS}
    laid = lay_out_batch(mesh, plan, **tensors)
    inputs = {"positions": laid.positions, "documents": laid.documents} if packed else {}
    loss = forward_backward(model, cross_entropy, laid.tokens, laid.targets, **inputs)
    _, gradients = expected(packed=packed)
    return loss.item(), gradients_off({name: whole(p.grad) for name, p in model.named_parameters()}, gradients)


@pytest.mark.exhaustive
@pytest.mark.parametrize("own_rows", [False, True], ids=["all-rows", "own-rows"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "axes", [{"pp": 2}, {"pp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}], ids=str
)
def test_a_batch_laid_out_on_the_whole_mesh(axes: dict[str, int], packed: bool, own_rows: bool, pool: Pool) -> None:
    truth, _ = expected(packed=packed)
    ranks = math.prod(axes.values())
    for loss, off in pool.run(laid_out, axes, packed, own_rows, ranks=ranks, timeout=60):
        assert loss == pytest.approx(truth, rel=2e-6)
        assert not off


def cut_over_stages() -> str:
    mesh, model, (tokens, targets, *_) = ProcessMesh.grid(pp=2), make("llama"), batch()
    parallelize(model, mesh, replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=2)))
    layout = Layout(mesh, {"pp": "S(0)"})
    try:
        forward_backward(model, cross_entropy, distribute(tokens, layout), distribute(targets, layout))
    except ValueError as error:
        return str(error)
    return ""


def test_rows_cut_over_stages_are_refused(pool: Pool) -> None:
    for error in pool.run(cut_over_stages, ranks=2, timeout=60):
        assert "all stages of a pipeline read the same rows; replicate the batch over 'pp'" in error
