"""Types as a user's type checker sees them: `./run types` checks these programs, which also run as tests."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import assert_type

import pytest
import torch
import torch.distributed as dist
import weft.kernels
import weft.mesh
import weft.models
import weft.reshard
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from weft.kernels import (
    KeyValueCache,
    add,
    add_layer_norm,
    add_rms_norm,
    all_gather_matmul,
    attention,
    combine,
    cross_entropy,
    dispatch,
    document_bounds,
    dropout,
    embedding,
    experts,
    geglu,
    gelu,
    grouped_matmul,
    layer_norm,
    linear,
    linear_cross_entropy,
    matmul,
    matmul_reduce_scatter,
    normal,
    on_local_tensors,
    qkv_linear,
    rms_norm,
    rms_norm_rope,
    rope,
    rope_tables,
    route,
    router_statistics,
    sequence_load,
    sigmoid_gate,
    swiglu,
    swiglu_linear,
    uniform,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)


def test_all_ops_are_here() -> None:
    calls = (node for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Call))
    asserted = [call.args[0] for call in calls if isinstance(call.func, ast.Name) and call.func.id == "assert_type"]
    names = {ast.unparse(each.func) for each in asserted if isinstance(each, ast.Call)}
    assert set(weft.kernels.__all__) - {"on_local_tensors"} - names == set()  # of that see below


def test_ops_return_tensors() -> None:
    x, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    for output in (
        assert_type(matmul(x, x.mT), Tensor),
        assert_type(matmul(x, x.mT, activation="silu", alpha=0.5), Tensor),
        assert_type(all_gather_matmul(x, x.mT), Tensor),
        assert_type(matmul_reduce_scatter(x, x.mT), Tensor),
        assert_type(grouped_matmul(x, torch.ones(2, 4, 3), ends), Tensor),
        assert_type(swiglu_linear(x, x, x), Tensor),
        assert_type(experts(x, target[:, None], x[:, :1], *[torch.ones(2, 4, 4)] * 3, first=0, rows=2), Tensor),
        add(*assert_type(qkv_linear(x, x, x, x), tuple[Tensor, Tensor, Tensor])[:2]),
        assert_type(sigmoid_gate(x, x[:, :1]), Tensor),
        assert_type(geglu(x, x, approximate="tanh"), Tensor),
        assert_type(rms_norm(x), Tensor),
        assert_type(rms_norm_rope(x, x[0, :2], x[:, :1], x[:, :1]), Tensor),
        assert_type(add(*assert_type(add_rms_norm(x, x, x[0]), tuple[Tensor, Tensor])), Tensor),
        assert_type(add(*assert_type(add_layer_norm(x, x, x[0], x[1]), tuple[Tensor, Tensor])), Tensor),
        *assert_type(rope_tables(target, x[0]), tuple[Tensor, Tensor]),
        *(routed := assert_type(route(x, 2, score="sigmoid"), tuple[Tensor, Tensor])),
        *(sorted_rows := assert_type(dispatch(x, routed[0], num_experts=4), tuple[Tensor, Tensor])),
        assert_type(combine(sorted_rows[0], *routed), Tensor),
        assert_type(router_statistics(x, routed[0]), Tensor),
        assert_type(sequence_load(routed[0][None], 4), Tensor),
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
        assert_type(document_bounds(target), Tensor),
        assert_type(
            attention(x[None], x[None], x[None], head_dim=2, cache=assert_type(KeyValueCache(2), KeyValueCache)), Tensor
        ),
        assert_type(rope(x, x[:, :2], x[:, :2]), Tensor),
        assert_type(uniform((2,), 0), Tensor),
        assert_type(normal((2,), 0), Tensor),
        assert_type(cross_entropy(x, target), Tensor),
        assert_type(cross_entropy(x, target, reduction="none", softcap=30.0, return_lse=False), Tensor),
        assert_type(linear_cross_entropy(x, x, target, chunk_tokens=1), Tensor),
    ):
        assert isinstance(output, Tensor)


def test_the_losses_of_a_group_return_tensors() -> None:
    x, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        for loss in (
            assert_type(
                vocab_parallel_cross_entropy(x, target, group=group, vocab_start=0, vocab_size=4, z_loss=0.1), Tensor
            ),
            assert_type(
                vocab_parallel_linear_cross_entropy(x, x, target, group=group, vocab_start=0, vocab_size=2), Tensor
            ),
        ):
            assert loss.shape == ()
        for outputs in (
            assert_type(
                vocab_parallel_cross_entropy(x, target, group=group, vocab_start=0, vocab_size=4, return_lse=True),
                tuple[Tensor, Tensor],
            ),
            assert_type(
                vocab_parallel_linear_cross_entropy(
                    x, x, target, group=group, vocab_start=0, vocab_size=2, return_lse=True
                ),
                tuple[Tensor, Tensor],
            ),
        ):
            assert [each.shape for each in outputs] == [(), (2,)]
    finally:
        dist.destroy_process_group()


def test_a_function_of_a_user_keeps_its_type() -> None:
    @on_local_tensors(in_layouts={"x": {}}, out_layouts={})
    def doubled(x: Tensor, times: int = 2) -> Tensor:
        return x * times

    assert assert_type(doubled(torch.ones(2), times=3), Tensor).tolist() == [3.0, 3.0]


def test_losses_return_the_lse_where_that_is_asked_for() -> None:
    x, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    loss, lse = assert_type(cross_entropy(x, target, return_lse=True), tuple[Tensor, Tensor])
    assert (loss.shape, lse.shape) == ((), (2,))
    loss, lse = assert_type(linear_cross_entropy(x, x, target, z_loss=0.1, return_lse=True), tuple[Tensor, Tensor])
    assert (loss.shape, lse.shape) == ((), (2,))


def test_losses_return_more_where_that_is_asked_for() -> None:
    x, target = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    loss, accuracy = assert_type(cross_entropy(x, target, return_token_accuracy=True), Tensor | tuple[Tensor, ...])
    assert loss.shape == accuracy.shape == ()
    loss, lse, z_loss = linear_cross_entropy(x, x, target, z_loss=0.1, return_lse=True, return_z_loss=True)
    assert (loss.shape, lse.shape, z_loss.shape) == ((), (2,), ())
    assert_type(cross_entropy(x, target, return_lse=bool(target.ndim)), Tensor | tuple[Tensor, ...])


def test_versions_are_text_and_a_typing_error_is_one() -> None:
    assert assert_type(weft.mesh.__version__, str) == assert_type(weft.reshard.__version__, str)
    assert assert_type(weft.kernels.__version__, str) == assert_type(weft.models.__version__, str)
    with pytest.raises(AttributeError):
        weft.mesh.ProcesMesh  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        weft.models.Lama  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(TypeError):
        cross_entropy(torch.ones(1, 2), torch.zeros(1), z_los=0.1)  # type: ignore[call-overload]
