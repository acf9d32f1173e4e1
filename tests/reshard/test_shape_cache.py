"""Ops on tensors without data have results of the same forms, run or looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.reshard.world.shape_cache import call_on_shapes


class Cached(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_on_shapes(func, args, kwargs or {})


def x(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


CASES: dict[str, Callable[[], Any]] = {
    "broadcast": lambda: x(3, 1, 5) * x(4, 1),
    "transposed": lambda: x(3, 5).t() + 1,
    "promotion": lambda: x(3, dtype=torch.bfloat16) + x(3),
    "product": lambda: x(2, 3) @ x(3, 7),
    "empty": lambda: x(0, 7).sum(0),
    "several results": lambda: torch.max(x(4, 6), dim=1),
    "a list of results": lambda: torch._foreach_add([x(2), x(3, 4)], 1.0),
    "views": lambda: torch.split(x(6, 2).unsqueeze(0).expand(2, 6, 2), 2, dim=1),
    "in place": lambda: x(3).add_(x(1)),
    "in place, of a view": lambda: x(4, 4)[1:].mul_(2),
    "changed sizes": lambda: x(3).unsqueeze_(0) * x(3, 3),
    "options": lambda: (x(4, 6).sum(1), x(4, 6).sum(1, keepdim=True), x(4, 6).sum(0), x(4, 6) * 1, x(4, 6) * True),
    "dtypes": lambda: (x(3).to(torch.float64), x(3).to(torch.int32), x(3).sum(dtype=torch.float64)),
    "copy": lambda: x(3, 4).t().contiguous(),
    "a tensor of its own": lambda: x(3).new_zeros(2, 2),
    "made from nothing": lambda: (torch.zeros(3, device="meta"), torch.arange(5, device="meta")),
}


@pytest.mark.parametrize("case", CASES)
def test_results_have_the_forms_of_results_that_ran(case: str) -> None:
    def forms(result: Any) -> list[Any]:
        tensors = [result] if isinstance(result, Tensor) else list(result)
        return [(type(result).__name__, each.shape, each.stride(), each.dtype, each.device) for each in tensors]

    expected = forms(CASES[case]())
    with Cached():
        found = [forms(CASES[case]()) for _ in range(3)]
    assert found == [expected] * 3


def test_an_op_in_place_returns_its_operand_and_results_are_new_memory() -> None:
    with Cached():
        for _ in range(2):
            operand = x(3)
            assert operand.add_(1) is operand and operand._version == 1
            result = operand + 1
            assert result.untyped_storage()._cdata != operand.untyped_storage()._cdata
            view = torch.ops.aten._unsafe_view(operand, [3, 1])
            assert view.untyped_storage()._cdata == operand.untyped_storage()._cdata


def test_tensors_with_data_are_computed() -> None:
    with Cached():
        assert [(torch.ones(2) * n).tolist() for n in (1, 2, 3)] == [[1, 1], [2, 2], [3, 3]]
        assert (torch.ones(2) * torch.tensor(3.0)).tolist() == [3, 3]


def test_an_error_is_raised_each_time() -> None:
    for _ in range(2):
        with Cached(), pytest.raises(RuntimeError):
            x(2, 3) @ x(2, 3)


def test_results_that_an_op_leaves_out_are_none_each_time() -> None:
    statistics = x(2, 1), x(2, 1)
    with Cached():
        for _ in range(2):
            found = torch.ops.aten.native_layer_norm_backward(
                x(2, 3), x(2, 3), [3], *statistics, x(3), x(3), [True, False, False]
            )
            assert found[0].shape == (2, 3)
            assert found[1:] == (None, None)
