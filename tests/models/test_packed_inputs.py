"""Batches as loaders make them, under context parallelism by documents: buffers filled anew, parts of two batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import forward_backward, lay_out_batch, parallelize
from weft.reshard import reshard

from tests.models.test_packed_context import make, packed
from tests.support.pool import Pool


def laid_out() -> tuple[Any, Any, Any]:
    """A mesh, a plan and a model with context parallelism."""
    model, mesh = make(), ProcessMesh.grid(cp=2)
    plan = replace(model.parallel_plan(), context="all_gather")
    parallelize(model, mesh, plan)
    return mesh, plan, model


def loss_of(model: Any, mesh: Any, plan: Any, given: dict[str, Tensor]) -> float:
    batch = lay_out_batch(mesh, plan, **given)
    logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
    return float(reshard(cross_entropy(logits, batch.targets)).to_local())


def losses_of_one_buffer(way: str) -> list[tuple[float, float]]:
    """For two batches whose documents are in one memory, the loss on the mesh and the loss of one process."""
    mesh, plan, model = laid_out()
    alone = make()
    batches = [packed(16, 2, seed)[0] for seed in (0, 1)]
    memory = batches[0]["documents"].clone().numpy()
    documents = torch.from_numpy(memory)
    losses = []
    for batch in batches:
        if way == "numpy":
            memory[:] = batch["documents"].numpy()
        else:
            documents.data.copy_(batch["documents"])
        found = loss_of(model, mesh, plan, batch | {"documents": documents})
        logits = alone(batch["tokens"], positions=batch["positions"], documents=batch["documents"])
        losses.append((found, float(cross_entropy(logits, batch["targets"]))))
    return losses


@pytest.mark.parametrize("way", ["numpy", "data"])
def test_a_buffer_of_documents_may_be_filled_anew(way: str, pool: Pool) -> None:
    for losses in pool.run(losses_of_one_buffer, way, ranks=2):
        for found, expected in losses:
            assert abs(found - expected) <= 1e-6 * expected
        assert losses[0] != losses[1]


def in_inference_mode() -> tuple[float, float]:
    mesh, plan, model = laid_out()
    given = packed(16, 2)[0]
    expected = loss_of(model, mesh, plan, given)
    with torch.inference_mode():
        return loss_of(model, mesh, plan, {name: each.clone() for name, each in given.items()}), expected


def test_documents_of_inference_mode(pool: Pool) -> None:
    for found, expected in pool.run(in_inference_mode, ranks=2):
        assert found == expected


def of_two_batches() -> list[str]:
    mesh, plan, model = laid_out()
    first, second = (lay_out_batch(mesh, plan, **packed(16, 2, seed)[0]) for seed in (0, 1))
    plain = lay_out_batch(mesh, plan, **{name: each for name, each in packed(16, 2)[0].items() if name != "documents"})
    messages = []
    for tokens, other in ((first, second), (first, plain), (plain, second)):
        with pytest.raises(ValueError, match="two calls of lay_out_batch") as caught:
            model(tokens.tokens, positions=other.positions, documents=other.documents)
        messages.append(str(caught.value))
    return messages


def test_parts_of_two_batches_are_refused(pool: Pool) -> None:
    assert all(len(messages) == 3 for messages in pool.run(of_two_batches, ranks=2))


def of_two_batches_apart() -> list[str]:
    """Documents, and then targets, of another batch than tokens and positions."""
    mesh, plan, model = laid_out()
    first, second = (lay_out_batch(mesh, plan, **packed(16, 2, seed)[0]) for seed in (0, 1))
    plain = lay_out_batch(mesh, plan, **{name: each for name, each in packed(16, 2)[0].items() if name != "documents"})
    messages = []
    for tokens, other in ((first, second), (plain, second)):
        for given in ({}, {"positions": tokens.positions}):
            with pytest.raises(ValueError, match="documents come from two calls of lay_out_batch") as caught:
                model(tokens.tokens, documents=other.documents, **given)
            messages.append(str(caught.value))
        with pytest.raises(ValueError, match="targets come from two calls of lay_out_batch") as caught:
            forward_backward(model, cross_entropy, tokens.tokens, other.targets, documents=tokens.documents)
        messages.append(str(caught.value))
    return messages


def test_documents_and_targets_of_another_batch_are_refused(pool: Pool) -> None:
    assert all(len(messages) == 6 for messages in pool.run(of_two_batches_apart, ranks=2))


def of_no_tokens() -> None:
    mesh, plan, model = laid_out()
    for shape in ((0, 0), (2, 0), (0, 4)):
        none = torch.zeros(shape, dtype=torch.int64)
        for documents in (None, none):
            batch = lay_out_batch(mesh, plan, none, documents=documents)
            logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
            assert tuple(logits.shape) == (*shape, 31)
    with pytest.raises(ValueError, match=r"documents are torch\.float32"):
        lay_out_batch(mesh, plan, none, documents=none.float())


def test_batches_of_no_tokens(pool: Pool) -> None:
    pool.run(of_no_tokens, ranks=2)
