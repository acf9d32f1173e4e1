"""Ops that wait for a device are noticed, and no others."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cases import normal
from tests.kernels.reads import NoReads, no_reads
from tests.kernels.test_without_data import CASES, found

SOME = torch.tensor([True, False, True])
COUNTS = torch.tensor([1, 0, 2])
WAITING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "as-an-index": lambda x: [4, 5, 6][COUNTS[0]],
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "any": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "tolist": lambda x: x.tolist(),
    "list-of-numbers": lambda x: [float(each) for each in x[0]],
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "cpu": lambda x: x.cpu(),
    "to-the-cpu": lambda x: torch.empty(3, device="meta").to("cpu"),
    "copied-to-the-cpu": lambda x: x.copy_(torch.empty(3, 4, device="meta")),
    "mask": lambda x: x[SOME],
    "mask-of-bytes": lambda x: torch.ops.aten.index(x, [SOME.byte()]),
    "mask-of-a-dim": lambda x: x[:, torch.ones(4, dtype=torch.bool)],
    "written-by-mask": lambda x: x.__setitem__(SOME, x[1:]),
    "put-by-mask": lambda x: x.index_put((SOME,), x[1:]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: x.nonzero(),
    "nonzero-as-tuple": lambda x: x.nonzero(as_tuple=True),
    "argwhere": lambda x: x.argwhere(),
    "where-of-one": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "unique-by-dim": lambda x: x.unique(dim=0),
    "unique-in-a-row": lambda x: x.unique_consecutive(),
    "bincount": lambda x: COUNTS.bincount(),
    "repeated-by-a-tensor": lambda x: x.repeat_interleave(COUNTS, 0),
    "repeats-alone": lambda x: torch.repeat_interleave(COUNTS),
    "one-hot": lambda x: torch.nn.functional.one_hot(COUNTS),
    "in-a-backward": lambda x: _Reading.apply(x.requires_grad_()).backward(),  # type: ignore[no-untyped-call]
}
FREE: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum() + 1,
    "rows": lambda x: x[COUNTS],
    "written-rows": lambda x: x.__setitem__(COUNTS, x.flip(0)),
    "slice": lambda x: x[1:, None],
    "where": lambda x: torch.where(x > 0, x, 0),
    "masked_fill": lambda x: x.masked_fill(SOME[:, None], 0),
    "repeated": lambda x: x.repeat_interleave(2, 1),
    "repeated-to-a-size": lambda x: x.repeat_interleave(COUNTS, 0, output_size=3),
    "cast": lambda x: x.to(torch.float64),
    "copied": lambda x: x.copy_(torch.zeros(3, 4)),
    "norm": lambda x: torch.nn.utils.clip_grad_norm_(torch.nn.Parameter(x), 1.0),
}


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.full((3, 4), gradients[0].item())


@pytest.mark.parametrize("name", WAITING)
def test_calls_that_wait_for_a_device_are_refused(name: str) -> None:
    x = normal(3, 4)
    with NoReads(), pytest.raises(AssertionError, match="makes the host wait"):
        WAITING[name](x)


@pytest.mark.parametrize("name", FREE)
def test_calls_that_do_not_wait_are_allowed(name: str) -> None:
    with NoReads():
        FREE[name](normal(3, 4))


def test_afterwards_and_in_other_threads_all_is_allowed() -> None:
    found: list[Any] = []
    with NoReads():
        other = threading.Thread(target=lambda: found.append(SOME.tolist()))
        other.start()
        other.join()
    assert found == [[True, False, True]] == [SOME.numpy().tolist()] == [SOME.cpu().tolist()]
    assert not {"cpu", "numpy", "tolist"} & vars(Tensor).keys()


# A CPU finds in Python where groups end. Of the kernels, which do that on the device, see matmul/test_grouped.py.
OF_A_CPU_ALONE = {"grouped_matmul"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_A_CPU_ALONE])
def test_no_op_waits_for_a_device(name: str) -> None:
    run, ids, operands = CASES[name]
    with no_reads():
        found(run, ids, list(operands))


ATTENTION = [name for name in CASES if name.startswith("attention")]


@pytest.mark.parametrize("name", ATTENTION)
def test_operands_of_attentions_kernels_are_made_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which keys each query sees, and which weights dropout drops, as they are made for a GPU."""
    compute = importlib.import_module("weft.kernels.attention.compute")
    monkeypatch.setattr(compute, "is_fused", lambda query, plain_scores: False)
    run, ids, operands = CASES[name]
    with no_reads():
        found(run, ids, list(operands))
