"""How ranks report each other's mistakes where the host may not wait for the device: the path of a GPU, run on gloo."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft.kernels import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from weft.kernels.cross_entropy import options, reference
from weft.kernels.cross_entropy.sharded import gather
from weft.kernels.linear_cross_entropy.sharded import loss as linear

from tests.kernels.reads import NoReads
from tests.support.pool import Pool

RANKS, EACH = 2, 3  # each rank holds as many classes
FITS = "1.7918"  # log(6)
Change = dict[str, Any]


def of_logits(held: int = EACH, **change: Any) -> Tensor:
    return vocab_parallel_cross_entropy(
        torch.zeros(4, held), torch.zeros(4).long(),
        group=dist.group.WORLD, vocab_start=EACH * dist.get_rank(), vocab_size=EACH * RANKS, **change,
    )  # fmt: skip


def of_products(held: int = EACH, tokens: int = 4, **change: Any) -> Tensor:
    return vocab_parallel_linear_cross_entropy(
        torch.zeros(tokens, 5), torch.zeros(held, 5), torch.zeros(tokens).long(),
        group=dist.group.WORLD, vocab_start=EACH * dist.get_rank(), vocab_size=EACH * RANKS, **change,
    )  # fmt: skip


def went_on(*arguments: Any, **given: Any) -> Any:
    raise ValueError("went on to the chunks")


def one_after_the_other(loss: Callable[..., Tensor], changes: list[Change], stops: bool) -> list[str]:
    """The loss or the error of each call on this rank; rank 1 makes the changes, rank 0 none.

    stops: whether rank 0 stops before the chunks of the last call, where it would wait for rank 1.
    """
    rank, found = dist.get_rank(), []
    with ExitStack() as patches:
        patches.enter_context(patch.object(gather, "on_gpu", lambda tensor: True))
        patches.enter_context(patch.object(reference, "can_read", lambda tensor: False))
        patches.enter_context(patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        patches.enter_context(patch.object(options, "_check_values", lambda *arguments: None))
        for call, change in enumerate(changes):
            again = call > 0 and rank == 0  # which the host reads nothing for
            if again and stops:
                patches.enter_context(patch.object(linear, "apply_many", went_on))
            with NoReads() if again else ExitStack():
                try:
                    result: Any = loss(**(change if rank else {}))
                except (ValueError, TypeError) as error:
                    result = error
            found.append(str(result) if isinstance(result, Exception) else f"{float(result):.4f}")
    return found


@pytest.mark.parametrize(
    ("loss", "change", "messages"),
    [
        pytest.param(of_logits, {"held": 2}, ["classes 0 to 3 on rank 0, 3 to 5 on rank 1"] * 2, id="classes"),
        pytest.param(of_logits, {"reduction": "avg"}, ["the error of rank 1", "'avg'"], id="option"),
        pytest.param(of_products, {"held": 2}, ["classes 0 to 3 on rank 0, 3 to 5 on rank 1"] * 2, id="linear-classes"),
        pytest.param(of_products, {"reduction": "avg"}, ["the error of rank 1", "'avg'"], id="linear-option"),
        pytest.param(of_products, {"tokens": 3}, ["tokens: 4 on rank 0, 3 on rank 1"] * 2, id="linear-tokens"),
        pytest.param(of_products, {"chunk_tokens": 2}, ["at a time: 4 on rank 0, 2 on rank 1"] * 2, id="linear-chunks"),
    ],
)
def test_at_first_every_rank_is_told(pool: Pool, loss, change, messages):
    for (found,), message in zip(
        pool.run(one_after_the_other, loss, [change], False, ranks=RANKS), messages, strict=True
    ):
        assert message in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"held": 2}, "3 to 5 on rank 1", id="classes"),
        pytest.param({"reduction": "avg"}, "'avg'", id="option"),
    ],
)
def test_later_the_others_have_a_loss_of_nan(pool: Pool, change, message):
    others, mine = pool.run(one_after_the_other, of_logits, [{}, change, {}], False, ranks=RANKS)
    assert others == [FITS, "nan", FITS]
    assert (mine[0], mine[2]) == (FITS, FITS)
    assert message in mine[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"held": 2}, "3 to 5 on rank 1", id="classes"),
        pytest.param({"reduction": "avg"}, "'avg'", id="option"),
        pytest.param({"tokens": 3}, "4 on rank 0, 3 on rank 1", id="tokens"),
    ],
)
def test_later_a_rank_with_chunks_to_gather_raises_at_once(pool: Pool, change, message):
    others, mine = pool.run(one_after_the_other, of_products, [{}, change], True, ranks=RANKS)
    assert others == [FITS, "went on to the chunks"]
    assert mine[0] == FITS
    assert message in mine[1]


def with_other_tokens() -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group, rank = dist.new_group(), dist.get_rank()
        with pytest.raises(RuntimeError) as error:
            vocab_parallel_cross_entropy(
                torch.zeros(4 + rank, EACH), torch.zeros(4 + rank).long(),
                group=group, vocab_start=EACH * rank, vocab_size=EACH * RANKS,
            )  # fmt: skip
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    return str(error.value)


def test_torchs_own_checks_tell_every_rank_of_other_tokens(pool: Pool):
    """Ranks have 4 and 5 tokens, and gather two further rows each: no gathered value could tell, but the shapes do."""
    for message in pool.run(with_other_tokens, ranks=RANKS):
        assert "Tensor shapes: 18vs 21" in message or "Tensor shapes: 21vs 18" in message  # 3 numbers of each row
