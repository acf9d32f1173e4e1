"""The paths of a kernel test: plain torch, the kernels interpreted on the CPU, the kernels on a GPU.

Triton decides at a kernel's decoration whether to interpret the kernel. So the kernels are imported here, once,
under TRITON_INTERPRET; the `interpreted` fixture then makes the ops of a single test launch the kernels, and all other
tests take the torch path. Where there is a GPU the kernels are compiled for it, and the interpreted path is left out.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from weft.kernels.dispatch import backend

KERNELS = (
    "weft.kernels.attention.launch",
    "weft.kernels.cross_entropy.launch",
    "weft.kernels.linear_cross_entropy.launch",
    "weft.kernels.random.launch",
    "weft.kernels.dropout.launch",
    "weft.kernels.matmul.launch",
    "weft.kernels.grouped_matmul.launch",
    "weft.kernels.experts.launch",
    "weft.kernels.rms_norm.launch",
    "weft.kernels.layer_norm.launch",
    "weft.kernels.swiglu.launch",
    "weft.kernels.rope.launch",
    "weft.kernels.embedding.launch",
    "weft.kernels.routing.launch",
    "tests.kernels.attention_kernels",
    "tests.kernels.double_float_kernels",
    "tests.kernels.philox_kernels",
)
HAS_GPU = torch.cuda.is_available()
HERE = Path(__file__).parent


def _import_interpreted() -> None:
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "triton was imported before tests/kernels/conftest.py, so that its kernels would not be interpreted: "
            "import it in "
            "the tests that need it, not at the top of their modules"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    for name in KERNELS:
        importlib.import_module(name)
    from tests.kernels.interpreter import correct, quicken  # Triton is imported now

    correct()
    quicken()


if not HAS_GPU:
    _import_interpreted()
os.environ.pop("TRITON_INTERPRET", None)
backend.INTERPRETED = False  # also where the variable was set for the whole run


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the interpreted path out where there is a GPU."""
    left_out = {item for item in items if HAS_GPU and HERE in item.path.parents and _is_interpreted(item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _is_interpreted(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return "interpreted" in getattr(item, "fixturenames", ()) or parameters.get("device") == "interpreted"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops on CPU tensors interpret their Triton kernels."""
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # for Triton's own modules that are imported at the first launch


@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a test's tensors, which decides the path of the op."""
    if request.param == "cuda":
        if not HAS_GPU:
            pytest.fail("asked for a GPU, but torch sees none")
        return "cuda"
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return "cpu"
