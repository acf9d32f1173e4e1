"""Liger's rope takes other shapes and overwrites its input: the timed code still gives the same values as Weft."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import layers


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x [1, heads, N, D], in place; the tables [1, N, D / 2]."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    x.data.copy_(turned)


class RopeOfLiger(torch.autograd.Function):
    """As Liger's: queries and keys in place, and their gradients too."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        assert q.transpose(1, 2).is_contiguous() and q.shape[2:] == k.shape[2:] and cos.ndim == 3
        turn(q, cos, sin)
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2).transpose(1, 2), k.transpose(1, 2).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turn(dq, cos, -sin)
        return dq, dk, None, None


def test_liger_turns_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", SimpleNamespace(LigerRopeFunction=RopeOfLiger))
    case = layers.CASES["rope"]
    given = layers.operands(case, 6, 256, "cpu", 0)
    ways = layers.ways_of(case, [given], backward=True)
    assert not ways.failed and not ways.absent
    before = given[0].detach().clone()
    first, wanted = ways.made["Liger"](), ways.made["Weft"]()
    torch.testing.assert_close(first.loss, wanted.loss, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(first.gradients, wanted.gradients, rtol=2**-7, atol=2**-7)
    assert torch.equal(given[0], before)
    again = ways.made["Weft"]()
    assert torch.equal(again.loss, wanted.loss) and torch.equal(again.gradients[0], wanted.gradients[0])
