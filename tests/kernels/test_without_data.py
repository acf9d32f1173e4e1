"""Ops on tensors without data: shapes and dtypes, of outputs and of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import kernels

from tests.kernels.cases import ints, normal
from tests.kernels.test_incoming_gradients import OPS

KEY = torch.tensor(3, dtype=torch.uint64)
LOGITS = (normal(6, 5, 8),)
HEADS = tuple(normal(6, 5, 8, seed=seed) for seed in range(3))
DOCUMENTS = ints(2, 6, 5).sort(-1).values


def reading_on(_: None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two calls: without gradients, as a cache has none."""
    cache = kernels.KeyValueCache(12)
    with torch.no_grad():
        kernels.attention(query, key, value, head_dim=4, cache=cache)
        read = kernels.attention(query, key, value, head_dim=4, cache=cache)
    return query * read


def drawn(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda _, x: x * draw(x.shape, 7, dtype=x.dtype, device=x.device)


# The op, given ids or a dropout key, and its operands. The first of several outputs has gradients.
MORE: dict[str, tuple[Callable[..., Any], Tensor | None, tuple[Tensor, ...]]] = {
    "attention-window": (lambda _, *heads: kernels.attention(*heads, head_dim=4, window=2), None, HEADS),
    "attention-dropout": (
        lambda key, *heads: kernels.attention(*heads, head_dim=4, dropout=0.5, dropout_key=key),
        KEY,
        HEADS,
    ),
    "attention-sinks": (
        lambda _, *tensors: kernels.attention(*tensors[:3], head_dim=4, sinks=tensors[3]),
        None,
        (*HEADS, normal(2)),
    ),
    "attention-all": (
        lambda documents, *heads: kernels.attention(
            *heads, head_dim=4, documents=documents, window=2, order=((3, 5), (0, 3)), softcap=5.0
        ),
        DOCUMENTS.roll(2, 1),
        HEADS,
    ),
    "KeyValueCache": (reading_on, None, HEADS),
    "normal": (drawn(kernels.normal), None, LOGITS),
    "uniform": (drawn(kernels.uniform), None, LOGITS),
    "sequence_load": (
        lambda ids, x: kernels.router_statistics(x, ids, load=kernels.sequence_load(ids, 8)),
        ints(8, 6, 5, 2),
        LOGITS,
    ),
    "rope_tables": (
        lambda positions, x: kernels.rope(x, *kernels.rope_tables(positions, torch.ones(2, device=x.device))),
        ints(9, 5),
        LOGITS,
    ),
    "embedding-padding": (
        lambda tokens, weight: kernels.embedding(tokens, weight, padding_idx=3),
        ints(11, 6, 5),
        (normal(11, 8),),
    ),
    "rope": (lambda _, x, cos, sin: kernels.rope(x, cos, sin), None, (normal(6, 5, 8), normal(5, 2), normal(5, 2))),
    "rms_norm_rope": (
        lambda _, x, weight, cos, sin: kernels.rms_norm_rope(x, weight, cos, sin),
        None,
        (normal(6, 5, 8), normal(4), normal(5, 2), normal(5, 2)),
    ),
    "dropout": (lambda key, x: kernels.dropout(x, 0.5, key), KEY, LOGITS),
    "dropout-in-order": (
        lambda key, x: kernels.dropout(x, 0.5, key, order=((3, 5), (0, 3))),
        KEY,
        LOGITS,
    ),
    "dropout-residual": (
        lambda key, x, residual: kernels.dropout(x, 0.5, key, residual=residual),
        KEY,
        (normal(6, 5, 8), normal(6, 5, 8, seed=1)),
    ),
    "dropout-int": (lambda _, x: kernels.dropout(x, 0.5, 3), None, LOGITS),
    "cross_entropy-mean": (lambda ids, x: kernels.cross_entropy(x, ids, z_loss=0.1), ints(8, 6, 5), LOGITS),
    "cross_entropy-all": (
        lambda ids, x, weight: kernels.cross_entropy(
            x, ids, weight=weight.detach(), label_smoothing=0.1, z_loss=0.1, softcap=2.0, return_lse=True
        )[0],
        ints(8, 6, 5),
        (normal(6, 5, 8), normal(8)),
    ),
    "cross_entropy-class_dim": (
        lambda ids, x: kernels.cross_entropy(x, ids, class_dim=1, reduction="none"),
        ints(5, 6, 8),
        LOGITS,
    ),
    "cross_entropy-more-outputs": (
        lambda ids, x: kernels.cross_entropy(
            x, ids, z_loss=0.1, return_lse=True, return_z_loss=True, return_token_accuracy=True
        ),
        ints(8, 6, 5),
        LOGITS,
    ),
    "linear_cross_entropy-more-outputs": (
        lambda ids, x, weight: kernels.linear_cross_entropy(
            x,
            weight,
            ids,
            reduction="none",
            z_loss=0.1,
            return_lse=True,
            return_z_loss=True,
            return_token_accuracy=True,
        ),
        ints(8, 6, 5),
        (normal(6, 5, 8), normal(8, 8)),
    ),
    "linear_cross_entropy-mean": (
        lambda ids, x, weight, bias: kernels.linear_cross_entropy(x, weight, ids, linear_bias=bias, chunk_tokens=7),
        ints(8, 6, 5),
        (normal(6, 5, 8), normal(8, 8), normal(8)),
    ),
}
CASES = {**OPS, **MORE}
OF_GROUPS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "vocab_parallel_cross_entropy": (kernels.vocab_parallel_cross_entropy, (normal(6, 4),)),
    "vocab_parallel_linear_cross_entropy": (
        lambda x, weight, target, **given: kernels.vocab_parallel_linear_cross_entropy(x, weight, target, **given),
        (normal(6, 5), normal(4, 5)),
    ),
    "vocab_parallel_linear_cross_entropy-sequence": (
        lambda x, weight, target, **given: kernels.vocab_parallel_linear_cross_entropy(
            x, weight, target, sequence_parallel=True, **given
        ),
        (normal(3, 5), normal(4, 5)),
    ),
}
OF_USERS = {"on_local_tensors"}  # see test_on_local_tensors.py
INTEGERS = {"document_bounds"}  # see attention/test_ranges.py


def test_all_ops_are_here() -> None:
    ops = {name.partition("-")[0] for name in (*CASES, *OF_GROUPS)} - {"pack", "unpack"}
    assert ops == set(kernels.__all__) - OF_USERS - INTEGERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["fake", "meta"])
@pytest.mark.parametrize("name", CASES)
def test_an_op(name: str, way: str, dtype: torch.dtype) -> None:
    run, ids, tensors = CASES[name]
    operands = [each.to(dtype) for each in tensors]
    expected = found(run, ids, operands)
    without_data, inside = ways(way)
    operands = [without_data(each) for each in operands]
    if ids is not None and (ids.dtype != KEY.dtype or way == "fake"):  # a key lies on the CPU
        ids = without_data(ids)
    with inside:
        made = found(run, ids, operands)
    assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in expected]


def ways(way: str) -> tuple[Callable[[Tensor], Tensor], Any]:
    """A function that strips a tensor of its data, and the context in which ops run on such tensors."""
    if way == "meta":
        return partial(torch.Tensor.to, device="meta"), nullcontext()
    mode = FakeTensorMode()
    return mode.from_tensor, mode


def found(run: Callable[..., Any], ids: Tensor | None, operands: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in operands]
    output = run(ids, *leaves)
    outputs = output if isinstance(output, tuple) else (output,)
    gradients = torch.autograd.grad(outputs[0].sum(), leaves, allow_unused=True)
    return [*outputs, *(each for each in gradients if each is not None)]


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """This process is the first of two, and the second does not exist: gathered memory stays as it is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["fake", "meta"])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_an_op_of_a_group(one_of_two: None, name: str, way: str, dtype: torch.dtype) -> None:
    run, tensors = OF_GROUPS[name]
    without_data, inside = ways(way)
    operands = [without_data(each.to(dtype)) for each in tensors]
    target = without_data(ints(8, 6))
    for reduction, shape in (("mean", ()), ("none", (6,))):
        with inside:
            loss, *gradients = found(
                lambda ids, *leaves, reduction=reduction: run(
                    *leaves, ids, group=dist.group.WORLD, vocab_start=0, vocab_size=8, reduction=reduction
                ),
                target,
                operands,
            )
        assert (loss.shape, loss.dtype) == (shape, torch.float32)
        assert [(each.shape, each.dtype) for each in gradients] == [(each.shape, dtype) for each in operands]
