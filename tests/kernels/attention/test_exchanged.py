"""Attention to a rank's own keys and to received ones, beside scores written out on whole rows, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels.attention.exchanged import Places, backward, forward
from weft.kernels.attention.options import VisibleKeys

from tests.kernels.attention.dense import Dropped, dense, seen_by
from tests.kernels.matmul.cases import assert_as_good_as_eager

B, T, HEADS, KV_HEADS, D, P, KEY = 2, 40, 4, 2, 8, 0.3, 77
DOCUMENTS = torch.tensor([[0] * 25 + [1] * 3 + [2] * 12, [0] + [1] * 30 + [2] * 9])
# The tokens of this rank in each row: some documents whole, of others the head and the tail, or nothing.
HELD = ([*range(4, 9), *range(20, 28)], [0, *range(1, 4), *range(25, 30), *range(32, 36)])


class Received:
    """Keys received from nobody: taken from the whole tensors."""

    def __init__(self, key: Tensor, value: Tensor, window: int | None, device: str) -> None:
        seen = seen_by(T, T, window=window, documents=DOCUMENTS)
        others = [
            [token for token in range(T) if token not in held and seen[row, held, token].any()]
            for row, held in enumerate(HELD)
        ]
        self.key, self.value = (
            torch.cat([x[row, tokens] for row, tokens in enumerate(others)]).unsqueeze(0) for x in (key, value)
        )
        own, received = (self._ranges(seen, keys) for keys in (HELD, others))
        self.own, count = VisibleKeys.of(own, len(own)).to(torch.device(device)), sum(map(len, others))
        seeing = (received[:, 0] < received[:, 1]).nonzero().flatten()
        self.queries = slice(int(seeing[0]), int(seeing[-1]) + 1)
        self.received = VisibleKeys.of(received[self.queries], count).to(torch.device(device))
        tokens = [token for held in HELD for token in held]
        rows = [row for row, held in enumerate(HELD) for _ in held]
        places = [token for row in others for token in row]
        self.places = Places(*(torch.tensor(each, device=device) for each in (tokens, rows, places)))
        self.others, self.returned = others, []

    @staticmethod
    def _ranges(seen: Tensor, keys: Any) -> Tensor:
        found, before = [], 0
        for row, held in enumerate(HELD):
            for query in held:
                first = sum(key < int(seen[row, query].nonzero()[0]) for key in keys[row])
                found.append([before + first, before + first + int(seen[row, query, keys[row]].sum())])
            before += len(keys[row])
        return torch.tensor(found, dtype=torch.int32)

    def wait(self) -> tuple[Tensor, Tensor]:
        return self.key, self.value

    def return_gradients(self, dkey: Tensor, dvalue: Tensor) -> Callable[[Tensor, Tensor], None]:
        self.returned = [dkey[0], dvalue[0]]
        return lambda dkey, dvalue: None


def written_out(
    operands: list[Tensor], upstream: Tensor, window: int | None, p: float, scores: dict[str, Any], dtype: torch.dtype
) -> Any:
    """The output of the rank's queries, and the gradients of these, of all keys and values, and of sinks."""
    q, k, v, *sinks = (x.detach().to(dtype, copy=True).requires_grad_() for x in operands)
    index = torch.arange(B * HEADS * T * T).reshape(B, HEADS, T, T)
    seen = seen_by(T, T, window=window, documents=DOCUMENTS)
    dropped = Dropped(p, KEY, index) if p else None
    output, _ = dense(q, k, v, seen, head_dim=D, dropped=dropped, sinks=sinks[0] if sinks else None, **scores)
    output = torch.stack([output[row, held] for row, held in enumerate(HELD)])
    output.backward(upstream.to(dtype))
    assert q.grad is not None
    of_queries = torch.stack([q.grad[row, held] for row, held in enumerate(HELD)])
    return output.detach(), of_queries, k.grad, v.grad, *(each.grad for each in sinks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("p", [0.0, P], ids=["", "dropout"])
@pytest.mark.parametrize("scores", [{}, {"softcap": 0.8}, {"scale": 0.2}], ids=["", "softcap", "scale"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_values_and_gradients(
    has_sinks: bool, scores: dict[str, Any], p: float, window: int | None, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    widths = (HEADS * D, KV_HEADS * D, KV_HEADS * D)
    whole = [torch.randn(B, T, width, generator=generator).to(dtype) for width in widths]
    own = [torch.stack([x[row, held] for row, held in enumerate(HELD)]).to(device) for x in whole]
    upstream = torch.randn(own[0].shape, generator=generator).to(dtype)
    received = Received(*(x.to(device) for x in whole[1:3]), window, device)
    sinks = torch.linspace(-1, 2, HEADS).to(dtype) if has_sinks else None
    options: dict[str, Any] = {"head_dim": D, "scale": D**-0.5, "dropout": p, "number": KEY, "name": None, **scores}
    options |= {"first_row": 0, "first_head": 0, "heads": HEADS, "tokens": T, "received": received}
    operands = (*own, None, None if sinks is None else sinks.to(device))
    output, saved = forward(*operands, **options)
    dq, dk, dv, _, dsinks = backward(saved, upstream.to(device), (True, True, True, False, has_sinks), **options)
    gradients = []
    for of_own, of_others in zip((dk, dv), received.returned, strict=True):
        assert of_own is not None
        gradient = torch.zeros(B, T, KV_HEADS * D, dtype=dtype)
        others = of_others.cpu().split([len(each) for each in received.others])
        for row, held in enumerate(HELD):
            gradient[row, held], gradient[row, received.others[row]] = of_own[row].cpu(), others[row]
        gradients.append(gradient)
    assert dq is not None
    found, given = [output.cpu(), dq.cpu(), *gradients], whole
    if sinks is not None:
        assert dsinks is not None
        found, given = [*found, dsinks.cpu()], [*whole, sinks]
    eager, truth = (written_out(given, upstream, window, p, scores, each) for each in (dtype, torch.float64))
    for one, other, exact in zip(found[:4], eager[:4], truth[:4], strict=True):
        assert_as_good_as_eager(one, other, exact)
    if sinks is not None:  # a few sums, which eager torch may have exact by luck: with them the gradient of the query
        assert_as_good_as_eager(*(torch.cat((each[4], each[1].flatten())) for each in (found, eager, truth)))
