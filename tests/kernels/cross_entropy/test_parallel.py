"""Vocab-parallel cross-entropy on processes: by the group and by the layout, against torch's on the whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from weft.kernels import cross_entropy, linear_cross_entropy, vocab_parallel_cross_entropy
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import distribute, layout_of, reshard, to_global
from weft.reshard.world.groups import device_mesh

from tests.kernels.cross_entropy.cases import make, max_error, torch_loss_and_gradient, ulps
from tests.support.collectives import Collectives
from tests.support.pool import Pool

Loss = Callable[..., Tensor]
RANKS = 4
OPTIONS: list[Any] = [
    pytest.param({}, id="plain"),
    pytest.param({"label_smoothing": 0.1}, id="smoothing"),
    pytest.param(
        {"weight": True, "label_smoothing": 0.2, "z_loss": 0.01, "softcap": 7.0, "logit_scale": 1.3}, id="all"
    ),
]
VOCABULARIES: list[Any] = [  # and how the ranks share it
    pytest.param(8, [2, 2, 2, 2], id="even"),
    pytest.param(5, [2, 2, 1, 0], id="5-over-4"),
    pytest.param(1, [1, 0, 0, 0], id="1-over-4"),
    pytest.param(31, [1, 0, 29, 1], id="any-sizes"),
]


def given(options: dict[str, Any], V: int) -> dict[str, Any]:
    weight = torch.rand(V, generator=torch.Generator().manual_seed(9)) + 0.1
    return options | {"weight": weight} if "weight" in options else options


def by_group(V: int, sizes: list[int], options: dict[str, Any], reduction: str) -> tuple[Tensor, Tensor, list[Any]]:
    logits, target, upstream = make(9, V, "cpu", torch.bfloat16, reduction)
    target[3] = -100
    rank = dist.get_rank()
    start = sum(sizes[:rank])
    mine = logits[:, start : start + sizes[rank]].clone().requires_grad_()
    with Collectives() as seen:
        loss = vocab_parallel_cross_entropy(
            mine,
            target,
            group=dist.group.WORLD,
            vocab_start=start,
            vocab_size=V,
            reduction=reduction,
            **given(options, V),
        )
        loss.backward(upstream)
    return loss.detach(), mine.grad, seen.kinds


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("V", "sizes"), VOCABULARIES)
def test_by_the_group_it_is_torchs_with_one_collective(pool: Pool, V, sizes, options, reduction):
    results = pool.run(by_group, V, sizes, options, reduction, ranks=RANKS)
    logits, target, upstream = make(9, V, "cpu", torch.bfloat16, reduction)
    target[3] = -100
    given_options = given(options, V) | {"reduction": reduction}
    truth = torch_loss_and_gradient(logits.double(), target, upstream, **given_options)
    eager = torch_loss_and_gradient(logits.float(), target, upstream, **given_options)
    gradient = torch.cat([part for _, part, _ in results], -1)
    for ours, true, other in zip((results[0][0], gradient), truth, (eager[0], eager[1].bfloat16()), strict=True):
        assert max_error(ours, true) <= 2 * max_error(other, true) + 1e-6 * float(true.abs().max())
    for loss, _, kinds in results:
        assert torch.equal(loss, results[0][0])  # bitwise
        assert kinds == ["all-gather"]


def backward_twice(reduction: str) -> tuple[Tensor, Tensor]:
    """The upstream gradient is one number, expanded."""
    logits, target, _ = make(9, 8, "cpu", torch.bfloat16)
    rank = dist.get_rank()
    mine = logits[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(
        mine, target, group=dist.group.WORLD, vocab_start=2 * rank, vocab_size=8, reduction=reduction
    )
    upstream = torch.tensor(-0.37).expand(loss.shape)
    with Collectives() as seen:
        first, second = (torch.autograd.grad(loss, mine, upstream, retain_graph=True)[0] for _ in range(2))
    assert seen.kinds == []
    return first, second


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_by_the_group_a_second_backward_is_the_same(pool: Pool, reduction):
    results = pool.run(backward_twice, reduction, ranks=RANKS)
    logits, target, upstream = make(9, 8, "cpu", torch.bfloat16, reduction)
    _, truth = torch_loss_and_gradient(
        logits.double(), target, torch.full_like(upstream, -0.37).double(), reduction=reduction
    )
    assert all(torch.equal(first, second) for first, second in results)
    assert ulps(torch.cat([first for first, _ in results], -1), truth).max() <= 1


def refused(change: Callable[[int], dict[str, Any]]) -> str:
    logits, target, _ = make(4, 8, "cpu")
    rank = dist.get_rank()
    call = {"logits": logits[:, 2 * rank : 2 * rank + 2], "vocab_start": 2 * rank, "vocab_size": 8, "target": target}
    call |= change(rank)
    with pytest.raises((ValueError, TypeError)) as raised:
        vocab_parallel_cross_entropy(call.pop("logits"), call.pop("target"), group=dist.group.WORLD, **call)
    return str(raised.value)


def gathered(rank: int) -> dict[str, Any]:
    """Logits after an all-gather, for which Megatron's loss was too high by log(tp)."""
    return {"logits": torch.zeros(4, 8), "vocab_start": 0}


def overlapping(rank: int) -> dict[str, Any]:
    return {"vocab_start": 2 * max(rank, 1)}


def a_gap(rank: int) -> dict[str, Any]:
    return {"vocab_size": 9}


def a_wrong_target(rank: int) -> dict[str, Any]:
    return {"target": torch.tensor([0, 1, 8, 2])} if rank == 2 else {}


def a_wrong_weight(rank: int) -> dict[str, Any]:
    return {"weight": torch.ones(2 if rank == 1 else 8)}


def a_wrong_option(rank: int) -> dict[str, Any]:
    return {"reduction": "avg"} if rank == 1 else {}


def an_unknown_option(rank: int) -> dict[str, Any]:
    return {"smoothing": 0.1} if rank == 1 else {}


def text_for_a_number(rank: int) -> dict[str, Any]:
    return {"label_smoothing": "0.1" if rank == 1 else 0.1}


def no_start(rank: int) -> dict[str, Any]:
    return {"vocab_start": None} if rank == 1 else {}


def short_logits(rank: int) -> dict[str, Any]:
    return {"logits": torch.zeros(3, 2)} if rank == 1 else {}


def a_wrong_denominator(rank: int) -> dict[str, Any]:
    return {"denominator": "3" * 400 if rank == 1 else 3.0}


def wide_logits(rank: int) -> dict[str, Any]:
    return {"logits": torch.zeros(4, 2, dtype=torch.float64)} | a_wrong_target(rank)


def strided_in_place(rank: int) -> dict[str, Any]:
    return {"logits": torch.zeros(2, 4).T if rank == 1 else torch.zeros(4, 2), "inplace_backward": True}


def a_dtensor(rank: int) -> dict[str, Any]:
    return {"logits": distribute(torch.zeros(4, 8), Layout(ProcessMesh.grid(tp=4), "tp: S(1)"))}


def one_dtensor(rank: int) -> dict[str, Any]:
    return a_dtensor(rank) if rank == 1 else {}


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        pytest.param(gathered, ["the classes 0 to 8 on rank 0, 0 to 8 on rank 1"] * 4, id="gathered"),
        pytest.param(overlapping, ["2 to 4 on rank 0, 2 to 4 on rank 1, 4 to 6 on rank 2"] * 4, id="overlapping"),
        pytest.param(a_gap, ["which are not each of a vocabulary of 9 once"] * 4, id="a-gap"),
        pytest.param(
            a_wrong_target,
            [*["see the error of rank 2"] * 2, "target[2] is 8, which is no class", "rank 2"],
            id="a-wrong-target",
        ),
        pytest.param(
            a_wrong_weight, ["of rank 1", "weight of shape (2,)", "of rank 1", "of rank 1"], id="a-wrong-weight"
        ),
        pytest.param(a_wrong_option, ["of rank 1", "reduction is 'avg'", "of rank 1", "of rank 1"], id="an-option"),
        pytest.param(
            an_unknown_option,
            ["of rank 1", "unexpected keyword argument 'smoothing'", "of rank 1", "of rank 1"],
            id="an-unknown-option",
        ),
        pytest.param(
            text_for_a_number,
            ["of rank 1", "label_smoothing is '0.1'; give", "of rank 1", "of rank 1"],
            id="text-for-a-number",
        ),
        pytest.param(no_start, ["of rank 1", "vocab_start is None; give", "of rank 1", "of rank 1"], id="no-start"),
        pytest.param(
            short_logits,
            ["of rank 1", "target of shape (4,) for logits of shape (3, 2)", "of rank 1", "of rank 1"],
            id="short-logits",
        ),
        pytest.param(a_wrong_denominator, ["of rank 1", "denominator is", "of rank 1", "of rank 1"], id="denominator"),
        pytest.param(
            wide_logits, [*["see the error of rank 2"] * 2, "target[2] is 8, which is no class", "rank 2"], id="float64"
        ),
        pytest.param(
            strided_in_place, ["of rank 1", "give contiguous logits", "of rank 1", "of rank 1"], id="in-place"
        ),
        pytest.param(a_dtensor, ["takes local tensors; give DTensors to cross_entropy"] * 4, id="dtensor"),
        pytest.param(one_dtensor, ["of rank 1", "takes local tensors", "of rank 1", "of rank 1"], id="one-dtensor"),
    ],
)
def test_every_rank_is_told_what_is_wrong(pool: Pool, change, messages):
    for text, expected in zip(pool.run(refused, change, ranks=RANKS), messages, strict=True):
        assert expected in text


def outside() -> None:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        with pytest.raises(ValueError, match="rank 2 is not in the group"):
            vocab_parallel_cross_entropy(
                torch.zeros(2, 2), torch.zeros(2).long(), group=group, vocab_start=0, vocab_size=4
            )


def test_a_rank_outside_the_group_is_told_so(pool: Pool):
    pool.run(outside, ranks=3)


# By the layout

GRID = ProcessMesh.grid(dp=2, tp=2)


def by_layout(layout: str, options: dict[str, Any], reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, lse and gradient of both, with tokens over dp and classes over tp, or both over classes."""
    logits, target, _ = make(9, 7, "cpu", torch.float64)
    target[3] = -100
    x = distribute(logits, Layout(GRID, layout)).requires_grad_()
    tokens = Layout(layout_of(x).mesh, dict.fromkeys(layout_of(x).shard_order.get(0, ()), "S(0)"))
    loss, lse = cross_entropy(x, distribute(target, tokens), reduction=reduction, return_lse=True, **given(options, 7))
    whole_loss, whole_lse = reshard(loss), reshard(lse)
    (whole_loss.sum() + whole_lse.square().sum()).backward()
    return to_global(loss), to_global(lse), to_global(x.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", ["dp: S(0), tp: S(1)", "dp: S(1), tp: S(1)", "tp: S(1), dp: S(1)", "dp: S(0)", ""])
def test_by_the_layout_loss_and_lse_are_those_of_one_process(pool: Pool, layout, options, reduction):
    logits, target, _ = make(9, 7, "cpu", torch.float64)
    target[3] = -100
    logits.requires_grad_()
    loss, lse = cross_entropy(logits, target, reduction=reduction, return_lse=True, **given(options, 7))
    (loss.sum() + lse.square().sum()).backward()
    for found in pool.run(by_layout, layout, options, reduction, ranks=4):
        for ours, expected in zip(found, (loss.detach(), lse.detach(), logits.grad), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def in_place_by_layout() -> None:
    logits, target, _ = make(6, 7, "cpu")
    leaf = distribute(logits, Layout(GRID, "tp: S(1)")).requires_grad_()
    whole_target = distribute(target, Layout(GRID))
    with pytest.raises(ValueError, match="a leaf"):
        cross_entropy(leaf, whole_target, inplace_backward=True)
    (expected,) = torch.autograd.grad(cross_entropy(leaf, whole_target), leaf)
    inner = leaf * 1.0
    loss = cross_entropy(inner, whole_target, inplace_backward=True)
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad.to_local(), expected.to_local())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def others_of_logits_in_place() -> None:
    leaf = distribute(make(6, 7, "cpu")[0], Layout(GRID, "tp: S(1)")).requires_grad_()
    logits = leaf * 2.0
    squares = (logits * logits).sum()
    cross_entropy(logits, make(6, 7, "cpu")[1], inplace_backward=True).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    with pytest.raises(ValueError, match="a leaf"):
        cross_entropy(leaf.view(6, 7), make(6, 7, "cpu")[1], inplace_backward=True)


def test_anchor_4_in_place_by_the_layout_others_who_saved_the_logits_are_told(pool: Pool):
    pool.run(others_of_logits_in_place, ranks=4)


def denominators_laid_out() -> None:
    logits, target, _ = make(6, 7, "cpu")
    x, t = distribute(logits, Layout(GRID, "dp: S(0)")), distribute(target, Layout(GRID, "dp: S(0)"))
    with pytest.raises(
        LayoutError, match=r"denominator has layout \(dp: P\(sum\), tp: R\); reshard it to \(dp: R, tp: R\)"
    ):
        cross_entropy(x, t, denominator=(t != -100).sum())
    loss = reshard(cross_entropy(x, t, denominator=distribute(torch.tensor(6.0), Layout(GRID))))
    torch.testing.assert_close(loss.to_local(), cross_entropy(logits, target))


def test_a_denominator_that_is_not_whole_is_refused(pool: Pool):
    pool.run(denominators_laid_out, ranks=4)


def test_in_place_by_the_layout(pool: Pool):
    pool.run(in_place_by_layout, ranks=4)


def refused_by_layout(loss: Loss, parts: tuple[int, int], dtype: torch.dtype, message: str) -> None:
    """parts: tokens of the target on the ranks of each half of "dp". The logits have 3 tokens on each rank."""
    mesh = device_mesh(GRID, "cpu")
    rows, columns, whole = torch.zeros(3, 5), torch.zeros(4, 5), torch.zeros(sum(parts))
    target = torch.zeros(parts[mesh.get_local_rank("dp")], dtype=dtype)
    t = DTensor.from_local(target, mesh, (Shard(0), Replicate()), run_check=False, shape=whole.shape, stride=(1,))
    operands = {
        cross_entropy: lambda: [DTensor.from_local(rows[:, :4], mesh, (Shard(0), Shard(1)))],
        linear_cross_entropy: lambda: [
            DTensor.from_local(rows, mesh, (Shard(0), Replicate())),
            DTensor.from_local(columns, mesh, (Replicate(), Shard(0))),
        ],
    }
    with pytest.raises(ValueError, match=message):
        loss(*operands[loss](), t)


@pytest.mark.parametrize("loss", [cross_entropy, linear_cross_entropy])
@pytest.mark.parametrize(
    ("parts", "dtype", "message"),
    [
        pytest.param((3, 2), torch.int64, r"\(5,\) for logits of shape \(6, 8\)", id="global-tokens"),
        pytest.param((4, 2), torch.int64, r"\([42],\) for logits of shape \(3, 4\)", id="local-tokens"),
        pytest.param((3, 3), torch.float32, "target has dtype torch.float32", id="dtype"),
    ],
)
def test_by_the_layout_every_rank_refuses_a_target_that_does_not_fit(pool: Pool, loss, parts, dtype, message):
    """The global shapes may differ where this rank's shapes fit; this rank's may differ where the global shapes fit."""
    pool.run(refused_by_layout, loss, parts, dtype, message, ranks=4)


def a_sharded_weight() -> None:
    logits, target, _ = make(6, 8, "cpu")
    with pytest.raises(LayoutError, match=r"cross_entropy needs dim 0 of the weight whole; reshard the weight to"):
        cross_entropy(
            distribute(logits, Layout(GRID, "tp: S(1)")), distribute(target, Layout(GRID)),
            weight=distribute(torch.ones(8), Layout(GRID, "tp: S(0)")),
        )  # fmt: skip


def test_a_sharded_weight_is_refused(pool: Pool):
    pool.run(a_sharded_weight, ranks=4)
