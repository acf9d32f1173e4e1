"""What a user's type checker is told: `./run types` checks these programs, which run as tests too."""

from __future__ import annotations

from typing import assert_type

import pytest
import torch
import weft.kernels
import weft.mesh
import weft.models
import weft.reshard
from torch import Tensor
from weft.kernels import (
    add,
    attention,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear,
    linear_cross_entropy,
    normal,
    rms_norm,
    rope,
    swiglu,
    uniform,
)


def test_ops_return_tensors() -> None:
    x, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    for output in (
        assert_type(linear(x, x), Tensor),
        assert_type(rms_norm(x, x[0]), Tensor),
        assert_type(rms_norm(x, x[0, :2], head_dim=2), Tensor),
        assert_type(layer_norm(x, x[0], x[1]), Tensor),
        assert_type(gelu(x, approximate="tanh"), Tensor),
        assert_type(add(x, x), Tensor),
        assert_type(swiglu(x, x), Tensor),
        assert_type(embedding(target, x), Tensor),
        assert_type(dropout(x, 0.5, 0), Tensor),
        assert_type(attention(x[None], x[None], x[None], head_dim=2), Tensor),
        assert_type(rope(x, x[:, :2], x[:, :2]), Tensor),
        assert_type(uniform((2,), 0), Tensor),
        assert_type(normal((2,), 0), Tensor),
        assert_type(cross_entropy(x, target), Tensor),
        assert_type(cross_entropy(x, target, reduction="none", softcap=30.0, return_lse=False), Tensor),
        assert_type(linear_cross_entropy(x, x, target, chunk_tokens=1), Tensor),
    ):
        assert isinstance(output, Tensor)


def test_losses_return_the_lse_where_that_is_asked_for() -> None:
    x, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    loss, lse = assert_type(cross_entropy(x, target, return_lse=True), tuple[Tensor, Tensor])
    assert (loss.shape, lse.shape) == ((), (2,))
    loss, lse = assert_type(linear_cross_entropy(x, x, target, z_loss=0.1, return_lse=True), tuple[Tensor, Tensor])
    assert (loss.shape, lse.shape) == ((), (2,))


def test_versions_are_text_and_a_typing_error_is_one() -> None:
    assert assert_type(weft.mesh.__version__, str) == assert_type(weft.reshard.__version__, str)
    assert assert_type(weft.kernels.__version__, str) == assert_type(weft.models.__version__, str)
    with pytest.raises(AttributeError):
        weft.mesh.ProcesMesh  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        weft.models.Lama  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError):
        cross_entropy(torch.ones(1, 2), torch.zeros(1), z_los=0.1)  # type: ignore[call-overload]
