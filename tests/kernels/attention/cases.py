"""Calls of the attention kernels with every option, beside dense attention in float64 and in the operands' dtype."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from weft.kernels.attention.options import Drop
from weft.kernels.attention.ranges import Ranges, document_bounds, keys_seen, ranges_from_keys

from tests.kernels.attention.dense import Dropped, dense, seen_by
from tests.kernels.matmul.cases import assert_as_good_as_eager, largest

KEY = 2**63 + 12345  # of 64 bits


@dataclass(frozen=True, kw_only=True)
class Case:
    """Options of one call. places: the token of each query; None for the last T."""

    B: int = 2
    T: int = 21
    S: int = 21
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    places: tuple[int, ...] | None = None
    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None  # ids of a row's tokens, by row
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float | None = None
    by_places: bool = False  # dropout by tensors of places
    grad_lse: bool = False
    strided: bool = False

    def tokens(self) -> list[int]:
        return [*range(self.S - self.T, self.S)] if self.places is None else [*self.places]

    def ranges(self, device: str = "cpu") -> Ranges:
        bounds = None
        if self.documents is not None:
            bounds = document_bounds(torch.tensor(self.documents, device=device))
        places = torch.tensor(self.tokens(), dtype=torch.int32, device=device)
        return ranges_from_keys(keys_seen(places, self.S, self.causal, self.window, bounds), self.S)

    def seen(self) -> Tensor:
        documents = None if self.documents is None else torch.tensor(self.documents)
        return seen_by(
            self.T, self.S, places=self.tokens(), causal=self.causal, window=self.window, documents=documents
        )

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Query, key, value, grad, and sinks and the logsumexp's gradient, where the case has them."""
        generator = torch.Generator().manual_seed(self.T + 7 * self.S)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        made = {
            "query": normal(self.B, self.T, q), "key": normal(self.B, self.S, kv),
            "value": normal(self.B, self.S, kv), "grad": normal(self.B, self.T, q),
        }  # fmt: skip
        made = {name: each.to(dtype) for name, each in made.items()}
        if self.strided:
            made = {name: _strided(each) for name, each in made.items()}
        if self.sinks:
            made["sinks"] = normal(self.heads).to(dtype)
        if self.grad_lse:
            made["grad_lse"] = normal(self.B, self.heads, self.T).float()
        return made

    def drop(self, device: str = "cpu") -> Drop | None:
        """Rows and heads lie in a larger tensor of weights, and far behind its start."""
        if self.dropout is None:
            return None
        threshold = round(self.dropout * 2**16)
        places: list[Tensor | None] = [None, None]
        if self.by_places:
            places = [torch.tensor(each, dtype=torch.int32, device=device) for each in (self._queries(), self._keys())]
        return Drop(
            KEY, threshold, 0.0 if threshold == 2**16 else 2**16 / (2**16 - threshold),
            self._offsets().to(device), self._head_stride(), self._row_stride(), *places, 3, 5,
        )  # fmt: skip

    def dropped(self) -> Dropped | None:
        if self.dropout is None:
            return None
        query, key = torch.arange(self.T)[None] + 3, torch.arange(self.S)[None] + 5
        if self.by_places:
            query, key = torch.tensor(self._queries()), torch.tensor(self._keys())
        head = torch.arange(self.heads)
        index = self._offsets()[:, None, None, None] + head[:, None, None] * self._head_stride()
        index = index + query[:, None, :, None] * self._row_stride() + key[:, None, None, :]
        return Dropped(self.dropout, KEY, index)

    def _offsets(self) -> Tensor:
        return 2**35 + 3 + torch.arange(self.B) * self.heads * self._head_stride()

    def _row_stride(self) -> int:
        return self.S + 16

    def _head_stride(self) -> int:
        return self._row_stride() * (self.T + 8)

    def _queries(self) -> list[list[int]]:
        return [[2 * i + b for i in range(self.T)] for b in range(self.B)]

    def _keys(self) -> list[list[int]]:
        return [[j + 3 * (j > 4) for j in range(self.S)]]


def _strided(x: Tensor) -> Tensor:
    """The same numbers in a tensor whose rows are part of longer ones, with batches between the rows."""
    T, B, width = x.shape[1], x.shape[0], x.shape[2]
    wider = torch.full((T, B, width + 5), torch.nan, dtype=x.dtype)
    wider[..., 3 : 3 + width] = x.transpose(0, 1)
    return wider[..., 3 : 3 + width].transpose(0, 1)


def launched(case: Case, dtype: torch.dtype, device: str, launches: Sequence[Any] = (None, None)) -> list[Tensor]:
    """output, logsumexp, dquery, dkey, dvalue, and dsinks where the case has sinks. launches: forward's, backward's."""
    launch = importlib.import_module("weft.kernels.attention.launch")
    given = {name: each.to(device) for name, each in case.tensors(dtype).items()}
    query, key, value, grad = (given[name] for name in ("query", "key", "value", "grad"))
    ranges, drop = case.ranges(device), case.drop(device)
    options: dict[str, Any] = {"head_dim": case.head_dim, "softcap": case.softcap}
    options["scale"] = case.head_dim**-0.5 if case.scale is None else case.scale
    sinks = given.get("sinks")
    output, lse = launch.forward(query, key, value, ranges, sinks, drop, launch=launches[0], **options)
    gradients = launch.backward(
        grad, query, key, value, output, lse, ranges, sinks, drop,
        grad_logsumexp=given.get("grad_lse"), launches=launches[1], **options,
    )  # fmt: skip
    return [each.cpu() for each in (output, lse, *gradients) if each is not None]


def written_out(case: Case, dtype: torch.dtype, compute: torch.dtype) -> list[Tensor]:
    """`launched` by dense attention on the same numbers, computed in another dtype."""
    given = {name: each.to(compute) for name, each in case.tensors(dtype).items()}
    leaves = [given[name].detach().requires_grad_() for name in ("query", "key", "value", "sinks") if name in given]
    sinks = leaves[3] if case.sinks else None
    output, lse = dense(
        *leaves[:3], case.seen(), head_dim=case.head_dim, scale=case.scale, softcap=case.softcap, sinks=sinks,
        dropped=case.dropped(),
    )  # fmt: skip
    outputs, upstream = [output], [given["grad"]]
    if case.grad_lse:
        outputs, upstream = [output, lse], [given["grad"], given["grad_lse"].to(lse.dtype)]
    gradients = torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)
    return [output.detach(), lse.detach(), *gradients]


def assert_correct(case: Case, dtype: torch.dtype, device: str, launches: Sequence[Any] = (None, None)) -> None:
    """Asserts that outputs, logsumexps and gradients err at most twice as much as eager torch's in the same dtype.

    Gradients may err by the rounding of the logsumexp, too: backward computes the weights from it (Dao 2023), and eager
    torch keeps them.
    """
    found = launched(case, dtype, device, launches)
    eager, truth = written_out(case, dtype, dtype), written_out(case, dtype, torch.float64)
    assert len(found) == len(truth)
    assert torch.equal(found[1] == -torch.inf, truth[1] == -torch.inf)
    nothing = truth[1] == -torch.inf  # rows that see nothing
    assert_as_good_as_eager(found[0], eager[0], truth[0])
    assert_as_good_as_eager(*(each[1].masked_fill(nothing, 0) for each in (found, eager, truth)))
    rounding = largest(truth[1].masked_fill(nothing, 0)) * torch.finfo(torch.float32).eps  # of the logsumexp
    for one, other, exact in zip(found[2:5], eager[2:5], truth[2:5], strict=True):
        allowed = 2 * largest(other.double() - exact) + (4 * torch.finfo(dtype).eps + rounding) * largest(exact)
        assert one.shape == exact.shape and largest(one.double() - exact) <= allowed
    if case.sinks:  # a few sums, which eager torch may have exact by luck: with them the larger gradient of the query
        assert_as_good_as_eager(*(torch.cat((each[5], each[2].flatten())) for each in (found, eager, truth)))


def merged(*options: dict[str, Any]) -> Case:
    """The default case with all of these options."""
    case = Case()
    for each in options:
        case = replace(case, **each)
    return case
