"""A worker keeps answers of sharding propagation, and no meshes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support import propagation
from tests.support.pool import Pool


def added(names: tuple[str, str], size: int) -> tuple[int, Tensor]:
    """The number of questions to torch in an addition, and the sum, which is on this call's mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    x = DTensor.from_local(torch.arange(3.0 * size).reshape(3, size), mesh, [Shard(0), Partial()])
    with patch.object(propagation, "ask", wraps=propagation.ask) as asked:
        total = x + x
    assert isinstance(total, DTensor)
    assert total.device_mesh is mesh
    assert total.placements == x.placements
    return asked.call_count, total.full_tensor()


@pytest.mark.exhaustive
def test_torch_is_asked_once_for_each_mesh_and_shape() -> None:
    x = 4 * torch.arange(6.0).reshape(3, 2).repeat(2, 1)
    with Pool() as pool:
        for times, names, size in ((1, ("a", "b"), 2), (0, ("a", "b"), 2), (1, ("a", "c"), 2), (1, ("a", "b"), 3)):
            for found, total in pool.run(added, names, size, ranks=4):
                assert found == times
                assert size == 3 or torch.equal(total, x)


def added_for_long(size: int) -> int:
    """The number of questions to torch, where every answer counts as slow."""
    with patch.object(propagation, "LONG", 0.0):
        return added(("a", "b"), size)[0]


@pytest.mark.exhaustive
def test_other_workers_read_what_took_long(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        assert sum(pool.run(added_for_long, 2, ranks=4)) > 0
    with Pool(tmp_path) as pool:
        assert pool.run(added_for_long, 2, ranks=4) == [0] * 4
        assert sum(pool.run(added_for_long, 3, ranks=4)) > 0


def twice_from_equal_values() -> list[int]:
    """The numbers of questions to torch in the optimizer steps of two models made alike."""
    counts = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        parameters, gradients = (
            [DTensor.from_local(torch.ones(2, size), mesh, [Shard(0)]) for size in (2, 2, 3)] for _ in range(2)
        )
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.requires_grad_().grad = gradient
        optimizer = torch.optim.AdamW(parameters, foreach=True)
        with patch.object(propagation, "ask", wraps=propagation.ask) as asked:
            optimizer.step()
        counts.append(asked.call_count)
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    return counts


def test_equal_values_are_one_question_whichever_objects_they_are() -> None:
    with Pool() as pool:
        for first, second in pool.run(twice_from_equal_values, ranks=2):
            assert first > 0
            assert second == 0


def laid_out_anew(times: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    found = []
    for _ in range(times):
        product = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]) * DTensor.from_local(
            torch.ones(2, 2), mesh, [Replicate()]
        )
        assert isinstance(product, DTensor)
        found.append(product.full_tensor())
    return found


def test_an_op_whose_arguments_are_laid_out_anew_does_so_every_time() -> None:
    with Pool() as pool:
        for _ in range(2):
            for found in pool.run(laid_out_anew, 2, ranks=2):
                assert torch.equal(torch.stack(found), torch.full((2, 2, 2), 2.0))
