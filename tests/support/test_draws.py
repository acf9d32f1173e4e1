"""A worker draws the same initial values once; other keys, parts, deviations and dtypes have values of their own."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor
from weft.kernels.random import normal_, philox
from weft.kernels.random.philox import Part
from weft.kernels.random.sharded import _fill_normal

from tests.support import draws
from tests.support.pool import Pool

WHOLE = Part.of((4, 6))
QUESTIONS = [
    (WHOLE, 1, 1.0, torch.float32),
    (WHOLE, 2, 1.0, torch.float32),
    (WHOLE, 1, 0.5, torch.float32),
    (WHOLE, 1, 1.0, torch.float64),
    (Part.of((4, 6), [slice(1, 3), slice(2, 5)]), 1, 1.0, torch.float32),
    (Part.of((2, draws.SMALL)), 1, 1.0, torch.float32),
]


def drawn(times: int) -> tuple[int, list[Tensor]]:
    """The number of draws of normal_ for the same tensor, and the tensors; each is overwritten by the next call."""
    found = []
    with patch.object(draws, "draw", wraps=draws.draw) as drawing:
        for _ in range(times):
            tensor = normal_(torch.empty(4, 6), 7)
            found.append(tensor.clone())
            tensor.zero_()
    return drawing.call_count, found


def differences() -> list[bool]:
    """For each question, asked twice, whether the answers are those of a draw."""
    from weft.kernels.random import sharded

    assert sharded._fill_normal is not draws.draw
    equal = []
    for part, key, std, dtype in QUESTIONS * 2:
        kept, anew = (torch.full(part.sizes, torch.nan, dtype=dtype) for _ in range(2))
        sharded._fill_normal(kept, part, key, std)
        draws.draw(anew, part, key, std)
        equal.append(torch.equal(kept, anew))
    return equal


def in_another_way() -> int:
    """The number of draws of normal_ after a change of how Philox is computed."""
    with patch.object(draws, "draw", wraps=draws.draw) as drawing:
        for blocks in (13, 17, 13):
            with patch.object(philox, "_BLOCKS_A_THREAD", blocks):
                normal_(torch.empty(4, 6), 7)
    return drawing.call_count


def test_values_computed_in_another_way_are_drawn_anew() -> None:
    with Pool() as pool:
        assert pool.run(in_another_way, ranks=1) == [2]


def test_the_same_values_are_drawn_once() -> None:
    with Pool() as pool:
        ((times, tensors),) = pool.run(drawn, 3, ranks=1)
        assert times == 1
        expected = torch.empty(4, 6)
        _fill_normal(expected, WHOLE, 7)
        assert all(torch.equal(each, expected) for each in tensors)
        assert pool.run(drawn, 1, ranks=1)[0][0] == 0  # a later call


def test_kept_values_are_those_of_a_draw() -> None:
    with Pool() as pool:
        assert pool.run(differences, ranks=1) == [[True] * 2 * len(QUESTIONS)]
