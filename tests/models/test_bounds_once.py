"""A packed batch's documents become bounds once in a forward pass, for the attention of all blocks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from weft import kernels
from weft.kernels.attention import options
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.models import lay_out_batch, parallelize
from weft.reshard import distribute, layout_of, to_global

from tests.models.cases import SMALL, make
from tests.support.collectives import Collectives
from tests.support.pool import Pool

TOKENS = torch.arange(24).view(4, 6)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5], [7, 7, 7, 3, 3, 3]])
POSITIONS = torch.arange(6).expand(4, 6)


def refuse(documents: Tensor) -> Tensor:
    raise AssertionError("a layer makes bounds of its own")


def test_no_block_makes_bounds_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(SMALL)
    expected = model(TOKENS, documents=DOCUMENTS)
    alone = model(TOKENS[:1, 2:], positions=torch.arange(2, 6)[None])
    monkeypatch.setattr(options, "document_bounds", refuse)
    options._cached_fused_calls.cache_clear()
    found = model(TOKENS, documents=DOCUMENTS)
    found.sum().backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(found[:1, 2:], alone)


def on_a_mesh() -> dict[str, Any]:
    alone, model = make(SMALL), make(SMALL)
    mesh = ProcessMesh.grid(dp=2, tp=2)
    plan = model.parallel_plan()
    parallelize(model, mesh, plan)
    batch = lay_out_batch(mesh, plan, TOKENS, documents=DOCUMENTS, positions=POSITIONS)
    options._cached_fused_calls.cache_clear()
    with patch.object(options, "document_bounds", refuse):
        logits = model(batch.tokens, positions=batch.positions, documents=batch.documents)
    torch.testing.assert_close(to_global(logits.detach()), alone(TOKENS, documents=DOCUMENTS, positions=POSITIONS))
    found = {}
    for text in ("dp: S(0)", "dp: S(0), tp: S(0)", ""):
        with Collectives() as seen:
            bounds = kernels.document_bounds(distribute(DOCUMENTS, Layout(mesh, text)))
        assert seen.kinds == [] and layout_of(bounds) == Layout(mesh, text) and not bounds.requires_grad
        found[text] = to_global(bounds)
    corner = Layout(ProcessMesh([0], ["tp"]))  # ranks 1 to 3 have no part
    found["corner"] = kernels.document_bounds(distribute(DOCUMENTS, corner)).shape
    with pytest.raises(LayoutError, match="document_bounds"):
        kernels.document_bounds(distribute(DOCUMENTS, Layout(mesh, "dp: S(1)")))
    return found


def test_bounds_are_laid_out_as_the_documents(pool: Pool) -> None:
    expected = kernels.document_bounds(DOCUMENTS)
    assert expected[3].tolist() == [[0, 3]] * 3 + [[3, 6]] * 3
    for found in pool.run(on_a_mesh):
        assert found.pop("corner") == expected.shape
        assert all(torch.equal(each, expected) for each in found.values()), found
