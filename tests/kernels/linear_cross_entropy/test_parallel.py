"""Vocab-parallel linear cross-entropy on processes: values, collectives, their timing, and mistakes told to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from weft.kernels.cross_entropy.sharded import gather
from weft.kernels.linear_cross_entropy.chunks import LogitFactors
from weft.mesh import Layout, ProcessMesh
from weft.mesh.layout import chunk
from weft.reshard import distribute, reshard

from tests.kernels.cross_entropy.cases import given, max_error
from tests.kernels.linear_cross_entropy.cases import Given, check, make, oracle
from tests.support.collectives import Collectives
from tests.support.pool import Pool

RANKS, TOKENS = 4, (7, 2)
OPTIONS: list[Any] = [
    pytest.param({"ignore_index": 3}, id="a-class-ignored"),
    pytest.param(
        {"weight": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 7.0, "logit_scale": 1.3}, id="all"
    ),
]
VOCABULARIES: list[Any] = [  # with the ranks' shares
    pytest.param(5, [2, 2, 1, 0], id="5-over-4"),
    pytest.param(31, [1, 0, 29, 1], id="any-sizes"),
]


def tokens_of(V: int, reduction: str, options: dict[str, Any]) -> Given:
    """A case in which some tokens are ignored, by whatever class `ignore_index` names."""
    case = make(TOKENS, V, "cpu", torch.bfloat16, reduction, bias=True)
    case.target[case.target == -100] = options.get("ignore_index", -100)
    return case


def by_group(V: int, sizes: list[int], reduction: str, sequence: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    case = tokens_of(V, reduction, options)
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    rows = slice(*chunk(TOKENS[0], RANKS, rank)) if sequence else slice(None)
    x = case.input.detach()[rows].requires_grad_()
    weight, bias = (leaf.detach()[start : start + sizes[rank]].requires_grad_() for leaf in case.leaves()[1:])
    with Collectives() as seen:
        loss = vocab_parallel_linear_cross_entropy(
            x, weight, case.target, group=dist.group.WORLD, vocab_start=start, vocab_size=V, sequence_parallel=sequence,
            linear_bias=bias, chunk_tokens=5, reduction=reduction, **given(options, V, "cpu"),
        )  # fmt: skip
    with Collectives() as seen_backward:
        loss.backward(case.upstream)
    return loss.detach(), x.grad, weight.grad, bias.grad, seen.kinds, seen_backward.kinds


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor-parallel", "sequence-parallel"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("V", "sizes"), VOCABULARIES)
def test_by_the_group_it_is_torchs(pool: Pool, V, sizes, options, reduction, sequence):
    """14 tokens in chunks of 5: a gather to agree, three gathers of statistics; one reduction of input gradients."""
    results = pool.run(by_group, V, sizes, reduction, sequence, options, ranks=RANKS)
    case = tokens_of(V, reduction, options)
    loss = results[0][0]
    of_input = torch.cat([each[1] for each in results]) if sequence else results[0][1]
    gradients = [of_input, *(torch.cat([each[i] for each in results]) for i in (2, 3))]
    check(case, loss, gradients, reduction=reduction, **given(options, V, "cpu"))
    for result in results:
        assert torch.equal(result[0], loss)  # bitwise
        assert sequence or torch.equal(result[1], of_input)
        assert result[4] == ["all-gather"] * (4 + sequence)
        assert result[5] == ["reduce-scatter" if sequence else "all-reduce"]


def frozen_by_group(reduction: str, frozen: tuple[int, ...]) -> tuple[list[Any], list[str]]:
    """Two backward passes from an expanded number. Returns the first pass's gradients, with None for frozen leaves."""
    case, rank = tokens_of(8, reduction, {}), dist.get_rank()
    parts = [case.input, *(leaf[2 * rank : 2 * rank + 2] for leaf in case.leaves()[1:])]
    leaves = [part.detach().requires_grad_(i not in frozen) for i, part in enumerate(parts)]
    loss = vocab_parallel_linear_cross_entropy(
        leaves[0], leaves[1], case.target, group=dist.group.WORLD, vocab_start=2 * rank, vocab_size=8,
        linear_bias=leaves[2], chunk_tokens=5, reduction=reduction,
    )  # fmt: skip
    wanted, upstream = [leaf for leaf in leaves if leaf.requires_grad], torch.tensor(-0.37).expand(loss.shape)
    with Collectives() as seen:
        first, second = (torch.autograd.grad(loss, wanted, upstream, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    found = iter(first)
    return [next(found) if leaf.requires_grad else None for leaf in leaves], seen.kinds


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("frozen", "collectives"),
    [
        pytest.param((), ["all-reduce"] * 2, id="nothing"),
        pytest.param((0,), [], id="input"),
        pytest.param((1, 2), ["all-reduce"] * 2, id="weight-and-bias"),
    ],
)
def test_by_the_group_what_is_frozen_is_not_computed_nor_reduced(pool: Pool, frozen, collectives, reduction):
    results = pool.run(frozen_by_group, reduction, frozen, ranks=RANKS)
    case = tokens_of(8, reduction, {})
    case = case._replace(upstream=torch.full_like(case.upstream, -0.37))
    truth, eager = (oracle(case, dtype, reduction=reduction)[1] for dtype in (torch.float64, torch.bfloat16))
    for i, (true, other) in enumerate(zip(truth, eager, strict=True)):
        parts = [gradients[i] for gradients, _ in results]
        if i in frozen:
            assert parts == [None] * RANKS
            continue
        found = parts[0] if i == 0 else torch.cat(parts)
        assert max_error(found, true) <= 2 * max_error(other, true) + 2**-8 * float(true.abs().max())
    assert [kinds for _, kinds in results] == [collectives] * RANKS


class Waiting:
    """A collective's work handle that records when it is waited for."""

    def __init__(self, work: dist.Work, seen: list[str]) -> None:
        self.work, self.seen = work, seen

    def wait(self) -> None:
        self.seen.append("wait")
        self.work.wait()


def order_of_work() -> list[str]:
    """Logits GEMMs, gathers started and gathers waited for, in the order in which they happen."""
    seen: list[str] = []
    all_gather, logits = gather.start_all_gather, LogitFactors.logits

    def started(*arguments: Any, **options: Any) -> Waiting:
        seen.append("gather")
        return Waiting(all_gather(*arguments, **options), seen)

    def multiplied(product: LogitFactors, rows: slice, out: Tensor) -> Tensor:
        seen.append("gemm")
        return logits(product, rows, out)

    case, mesh = make((6,), 8), ProcessMesh.grid(tp=2)
    weight = distribute(case.linear_weight.detach(), Layout(mesh, "tp: S(0)")).requires_grad_()
    with patch.object(gather, "start_all_gather", started), patch.object(LogitFactors, "logits", multiplied):
        linear_cross_entropy(case.input.detach(), weight, case.target, chunk_tokens=2)
    return seen


def test_a_gather_runs_beside_the_next_chunks_gemm(pool: Pool):
    for seen in pool.run(order_of_work, ranks=2):
        assert seen == ["gemm", "gather", "gemm", "wait", "gather", "gemm", "wait", "gather", "wait"]


def refused(change: Callable[[int], dict[str, Any]]) -> str:
    rank = dist.get_rank()
    case = make((4,), 8)
    call = {
        "input": case.input, "linear_weight": case.linear_weight[2 * rank : 2 * rank + 2], "target": case.target,
        "vocab_start": 2 * rank, "vocab_size": 8,
    }  # fmt: skip
    call |= change(rank)
    with Collectives() as seen, pytest.raises((ValueError, TypeError)) as raised:
        vocab_parallel_linear_cross_entropy(group=dist.group.WORLD, **call)
    assert seen.kinds == ["all-gather"]
    return str(raised.value)


def a_whole_weight(rank: int) -> dict[str, Any]:
    return {"linear_weight": torch.zeros(8, 16), "vocab_start": 0}


def a_wrong_target(rank: int) -> dict[str, Any]:
    return {"target": torch.tensor([0, 1, 8, 2])} if rank == 2 else {}


def a_wrong_input(rank: int) -> dict[str, Any]:
    return {"input": torch.zeros(3 if rank == 1 else 4, 16)}


def fewer_tokens(rank: int) -> dict[str, Any]:
    return {"input": torch.zeros(3, 16), "target": torch.zeros(3).long()} if rank == 3 else {}


def a_wrong_chunk(rank: int) -> dict[str, Any]:
    return {"chunk_tokens": 2.5 if rank == 1 else 2}


def other_chunks(rank: int) -> dict[str, Any]:
    return {"chunk_tokens": 3 if rank == 1 else 2}


def other_smoothing(rank: int) -> dict[str, Any]:
    return {"label_smoothing": 0.1 if rank == 1 else 0.0}


def an_unknown_option(rank: int) -> dict[str, Any]:
    return {"smoothing": 0.1} if rank == 1 else {}


def whole_sequences(rank: int) -> dict[str, Any]:
    return {"sequence_parallel": True}


def a_dtensor(rank: int) -> dict[str, Any]:
    return {"input": distribute(torch.zeros(4, 16), Layout(ProcessMesh.grid(tp=4), ""))}


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        pytest.param(a_whole_weight, ["the classes 0 to 8 on rank 0, 0 to 8 on rank 1"] * 4, id="whole-weight"),
        pytest.param(
            a_wrong_target,
            [*["see the error of rank 2"] * 2, "target[2] is 8, which is no class", "rank 2"],
            id="target",
        ),
        pytest.param(
            a_wrong_input,
            ["of rank 1", "input of shape (3, 16) for a target of shape (4,); give [4, H]", "of rank 1", "of rank 1"],
            id="input",
        ),
        pytest.param(
            whole_sequences,
            ["for a target of shape (4,); give [1, H], this rank's part of dim 0"] * 4,
            id="sequence",
        ),
        pytest.param(
            fewer_tokens,
            ["different numbers of tokens: 4 on rank 2, 3 on rank 3; give every rank"] * 4,
            id="fewer-tokens",
        ),
        pytest.param(a_wrong_chunk, ["of rank 1", "chunk_tokens is 2.5", "of rank 1", "of rank 1"], id="chunk"),
        pytest.param(
            other_chunks, ["numbers of tokens at a time: 2 on rank 3, 3 on rank 1; give every rank"] * 4, id="chunks"
        ),
        pytest.param(
            other_smoothing,
            ["bytes for a token: 12 on rank 3, 20 on rank 1; give every rank of the group the same label_smooth"] * 4,
            id="smoothing",
        ),
        pytest.param(
            an_unknown_option,
            ["of rank 1", "unexpected keyword argument 'smoothing'", "of rank 1", "of rank 1"],
            id="an-unknown-option",
        ),
        pytest.param(a_dtensor, ["takes local tensors; give DTensors to linear_cross_entropy"] * 4, id="dtensor"),
    ],
)
def test_every_rank_is_told_what_is_wrong(pool: Pool, change, messages):
    for text, expected in zip(pool.run(refused, change, ranks=RANKS), messages, strict=True):
        assert expected in text


# By the layout

GRID = ProcessMesh.grid(dp=2, tp=2)


def batch(ignored: int) -> Given:
    case = make((4, 3), 7, dtype=torch.float64)
    case.target[:ignored] = -100
    return case


def training_step(sequence: bool, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """The whole loss and gradients; tokens are sharded over dp and classes over tp, as `parallelize` shards them."""
    case = batch(ignored)
    x = distribute(case.input.detach(), Layout(GRID, "dp: S(0), tp: S(1)" if sequence else "dp: S(0)")).requires_grad_()
    weight = distribute(case.linear_weight.detach(), Layout(GRID, "tp: S(0)")).requires_grad_()
    target = distribute(case.target, Layout(GRID, "dp: S(0)"))
    with Collectives() as seen:
        loss = reshard(linear_cross_entropy(reshard(x, GRID, {"dp": "S(0)"}), weight, target, chunk_tokens=4))
        loss.backward()
    forward = ["all-gather"] * sequence + ["all-reduce"] + ["all-gather"] * 2 + ["all-reduce"]
    assert seen.kinds == [*forward, "reduce-scatter" if sequence else "all-reduce"]
    return loss.detach().full_tensor(), x.grad.full_tensor(), weight.grad.full_tensor()


@pytest.mark.parametrize("ignored", [0, 2], ids=["none-ignored", "a-rank-all-ignored"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor-parallel", "sequence-parallel"])
def test_by_the_layout_the_inputs_gradient_is_reduced_once(pool: Pool, sequence, ignored):
    case = batch(ignored)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target)
    expected = (loss.detach(), *torch.autograd.grad(loss, case.leaves()))
    for found in pool.run(training_step, sequence, ignored, ranks=4):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
