"""The paths that a kernel test runs on: plain torch, the kernels interpreted on the CPU, the kernels on a GPU.

Triton decides when a kernel is decorated whether it is interpreted, so the kernels are imported here, once, under
TRITON_INTERPRET; the `interpreted` fixture then sets it for a test at a time, and all others take the torch path.
Where there is a GPU the kernels are compiled for it, and the interpreted path is left out.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

KERNELS = (
    "weft.kernels.cross_entropy.launch",
    "weft.kernels.linear_cross_entropy.launch",
    "weft.kernels.random.launch",
    "weft.kernels.dropout.launch",
    "weft.kernels.matmul.launch",
    "weft.kernels.grouped_matmul.launch",
    "weft.kernels.rms_norm.launch",
    "weft.kernels.layer_norm.launch",
    "weft.kernels.swiglu.launch",
    "weft.kernels.rope.launch",
    "tests.kernels.double_float_kernels",
    "tests.kernels.philox_kernels",
)
HAS_GPU = torch.cuda.is_available()
HERE = Path(__file__).parent


def _import_interpreted() -> None:
    if "triton" in sys.modules:
        raise pytest.UsageError(
            "triton was imported before tests/kernels/conftest.py, so that its kernels would not be interpreted: import it in "
            "the tests that need it, not at the top of their modules"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    for name in KERNELS:
        importlib.import_module(name)
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    truncate = InterpreterBuilder.create_fp_trunc

    def round_to_nearest_even(self: Any, source: Any, to: Any) -> Any:
        """As GPUs and torch cast float32 to bfloat16; the interpreter would cut the low bits off."""
        if (source.dtype.scalar.name, to.scalar.name) != ("fp32", "bf16"):
            return truncate(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), to.scalar)

    multiply = InterpreterBuilder.create_dot

    def multiply_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Products of bfloat16 by their values, in float32; the interpreter would multiply their bits."""
        return multiply(self, *(widened(x) if x.dtype.scalar.name == "bf16" else x for x in (a, b)), *rest)

    def widened(x: Any) -> Any:
        values = torch.from_numpy(np.ascontiguousarray(x.data).view(np.int16)).view(torch.bfloat16).float().numpy()
        return TensorHandle(values, tl.float32)

    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        """A function that a kernel calls finds the language patched: to look through it again takes as long as the rest."""
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        patched = languages and not any(tl.core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if patched else patch(function)

    look_up, numpy_dtypes = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        """What holds a Triton dtype; it is asked for each value, and a tenth of the time goes by if all are listed anew."""
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = look_up(dtype.scalar)
        return numpy_dtypes[name]

    interpreter._get_np_dtype = numpy_dtype
    InterpreterBuilder.create_fp_trunc = round_to_nearest_even
    InterpreterBuilder.create_dot = multiply_bfloat16
    interpreter._patch_lang = patch_once


if not HAS_GPU:
    _import_interpreted()
os.environ.pop("TRITON_INTERPRET", None)


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
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a test puts its tensors; with it the path of the op is chosen."""
    if request.param == "cuda":
        if not HAS_GPU:
            pytest.fail("asked for a GPU, but torch sees none")
        return "cuda"
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return "cpu"
