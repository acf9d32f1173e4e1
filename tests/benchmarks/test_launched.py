"""The cost of a kernel is read from Triton's compiled kernel for a call's sizes; without one, the rest still works."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import launched


def _gradient(x_ptr, V, BLOCK_V):
    pass


def _losses(x_ptr, N, BLOCK_N):
    pass


def compiled(function: Any, block: int, registers: int, spilled: int = 0) -> Any:
    source = SimpleNamespace(fn=function, constants={(2,): block, (1,): 50257})
    return SimpleNamespace(
        src=source, n_regs=registers, n_spills=spilled, metadata=SimpleNamespace(num_warps=8, shared=64)
    )


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    import triton  # not above: see tests/kernels/conftest.py

    made = [triton.JITFunction(each) for each in (_gradient, _losses)]
    for function in made:
        function.device_caches = defaultdict(list, {0: [{"another V": compiled(function, 16, 255, 9)}, {}]})
    monkeypatch.setattr(launched, "functions", lambda: iter(made))
    return made


def test_of_a_call_is_told_what_that_call_launches(functions: list[Any]) -> None:
    before = [function.device_caches for function in functions]
    gradient, _ = functions

    def way() -> None:
        gradient.device_caches[0] = {"key": compiled(gradient, 4096, 64, 2), "more": compiled(gradient, 8192, 32)}, {}

    assert launched.cost(way) == {
        "registers": 64,
        "spill_bytes": 8,
        "shared_bytes": 64,
        "configuration": "_gradient: BLOCK_V 4096, 8 warps; _gradient: BLOCK_V 8192, 8 warps",
    }
    assert [function.device_caches for function in functions] == before


def test_a_call_without_kernels_has_no_cost(functions: list[Any]) -> None:
    assert launched.cost(lambda: None) == {"configuration": "no kernel of Weft's"}


def test_a_triton_that_keeps_them_elsewhere_is_told(functions: list[Any]) -> None:
    del functions[0].device_caches
    told = launched.cost(lambda: None)["configuration"]
    assert str(told).startswith("not read from this triton: AttributeError:")


def test_an_error_of_a_call_leaves_the_kernels_unchanged(functions: list[Any]) -> None:
    before = [function.device_caches for function in functions]

    def way() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        launched.cost(way)
    assert [function.device_caches for function in functions] == before


def test_triton_has_what_is_read_from_it() -> None:
    import triton

    function = triton.JITFunction(_gradient)
    assert isinstance(function.device_caches, defaultdict) and callable(function.create_binder)
    assert (function.arg_names, function.__name__) == (["x_ptr", "V", "BLOCK_V"], "_gradient")
