"""The number of programs of a kernel that reads rows twice: equal on all multiprocessors, with their rows in the L2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.mark.parametrize(
    ("V", "itemsize", "fused", "on_each"),
    [
        pytest.param(131072, 2, True, 1, id="33-MiB-of-rows"),
        pytest.param(32000, 2, True, 1, id="short-rows-whose-registers-are-the-limit"),
        pytest.param(2048, 2, True, 4, id="of-four-warps"),
        pytest.param(16384, 4, True, 2, id="float32"),
        pytest.param(65536, 4, True, 1, id="float32-33-MiB"),
        pytest.param(1 << 20, 4, True, 2, id="none-fit"),
        pytest.param(131072, 2, False, 3, id="read-once"),
    ],
)
def test_as_many_on_each_multiprocessor(
    interpreted, monkeypatch, V: int, itemsize: int, fused: bool, on_each: int
) -> None:
    from weft.kernels.cross_entropy import launch

    h200 = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    x: Any = SimpleNamespace(is_cuda=True, device="cuda", shape=(1, 8192, V), itemsize=itemsize)
    assert launch._programs(x, launch.config(V, itemsize), fused) == 132 * on_each
