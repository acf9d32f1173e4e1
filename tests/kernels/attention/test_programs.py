"""Random calls of attention, with any options together, against every score written out in float64."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.kernels import attention, document_bounds

from tests.kernels.attention.dense import Dropped, dense, seen_by
from tests.support.sample import Portion

SEEDS = range(120)
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Program:
    """A call drawn by a seed: operands as the sequence has them, and options."""

    def __init__(self, seed: int) -> None:
        draw = Random(seed)
        self.dtype = draw.choice(DTYPES)
        self.head_dim, kv_heads = draw.choice([1, 3, 8, 16, 17, 33, 65]), draw.choice([1, 2, 3])
        self.heads = kv_heads * draw.choice([1, 2, 5])
        self.B, self.T = draw.choice([1, 2, 3]), draw.choice([1, 2, 7, 15, 16, 33, 64, 100, 150])
        self.S = self.T + draw.choice([0, 0, 0, 1, 19])
        generator = torch.Generator().manual_seed(seed)
        self.strided = draw.random() < 0.3

        def normal(tokens: int, heads: int) -> Tensor:
            made = torch.randn(self.B, tokens, heads * self.head_dim + 5, generator=generator, dtype=torch.float64)
            made = made.to(self.dtype)[..., 2:-3]
            return made if self.strided else made.contiguous()

        self.tensors = [normal(self.T, self.heads), normal(self.S, kv_heads), normal(self.S, kv_heads)]
        self.upstream = normal(self.T, self.heads)
        if draw.random() < 0.4:
            self.tensors.append(
                3 * torch.randn(self.heads, generator=generator).to(draw.choice([self.dtype, torch.float32]))
            )
        self.options: dict[str, Any] = {"causal": draw.random() < 0.8}
        if self.options["causal"] and draw.random() < 0.4:
            self.options["window"] = draw.choice([1, 2, 5, 16, 31, 70, 1000])
        if draw.random() < 0.3:
            self.options["softcap"] = draw.choice([0.1, 1.5, 30.0])
        if draw.random() < 0.3:
            self.options["scale"] = draw.choice([0.01, 0.7, 2])
        if draw.random() < 0.4:
            self.options["dropout"] = draw.choice([0.1, 0.5, 0.97, 1])
            self.number = draw.getrandbits(64)
            self.options["dropout_key"] = torch.tensor(self.number, dtype=torch.uint64)
        self.ids = None
        if draw.random() < 0.6:
            self.ids = torch.stack([self._row_of_documents(draw) for _ in range(self.B)])
            self.options["documents"] = document_bounds(self.ids) if draw.random() < 0.4 else self.ids
        self.order = None
        if self.T == self.S and draw.random() < 0.3:
            places = sorted({0, self.S, *(draw.randint(0, self.S) for _ in range(draw.randint(0, 6)))})
            runs = [*pairwise(places)]
            draw.shuffle(runs)
            self.order = self.options["order"] = tuple(runs)
        if "documents" in self.options:
            self.options["documents"] = self.laid(self.options["documents"])

    def _row_of_documents(self, draw: Random) -> Tensor:
        """Ids of documents of very different lengths. A number without tokens is skipped: an empty document."""
        found, number = list[int](), draw.randint(-5, 5)
        while len(found) < self.S:
            number += draw.randint(1, 3)
            found += [number] * draw.choice([1, 1, 2, 7, 30, 200])
        return torch.tensor(found[: self.S])

    def laid(self, x: Tensor) -> Tensor:
        """x [B, tokens, ...] in the order of memory."""
        return x if self.order is None else torch.cat([x[:, start:stop] for start, stop in self.order], 1)

    def leaves(self) -> list[Tensor]:
        return [each.detach().requires_grad_() for each in (*map(self.laid, self.tensors[:3]), *self.tensors[3:])]

    def call(self, *leaves: Tensor) -> Tensor:
        return attention(*leaves[:3], head_dim=self.head_dim, sinks=leaves[3] if leaves[3:] else None, **self.options)

    def found(self, call: Any) -> list[Tensor]:
        leaves = self.leaves()
        output = call(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, self.laid(self.upstream))]

    def written_out(self, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in self.tensors]
        causal, window = self.options["causal"], self.options.get("window")
        seen = seen_by(self.T, self.S, causal=causal, window=window, documents=self.ids)
        dropped = None
        if "dropout" in self.options:
            index = torch.arange(self.B * self.heads * self.T * self.S).view(self.B, self.heads, self.T, self.S)
            dropped = Dropped(self.options["dropout"], self.number, index)
        output, _ = dense(
            *leaves[:3], seen, head_dim=self.head_dim, scale=self.options.get("scale"),
            softcap=self.options.get("softcap"), sinks=leaves[3] if leaves[3:] else None, dropped=dropped,
        )  # fmt: skip
        gradients = torch.autograd.grad(output, leaves, self.upstream.to(output.dtype), materialize_grads=True)
        made = [output.detach(), *gradients]
        return [*map(self.laid, made[:4]), *made[4:]]

    def check(self, found: list[Tensor]) -> None:
        """Errors are at most twice eager torch's, and gradients may err by the rounding of the logsumexp, too."""
        truth, eager = self.written_out(torch.float64), self.written_out(self.dtype)
        for one, other, exact in zip(found, eager, truth, strict=True):
            assert one.isfinite().all()
            eps = torch.finfo(torch.float32 if one.dtype == torch.float32 else self.dtype).eps
            allowed = 2 * (other.double() - exact).abs().max() + 16 * eps * max(1.0, float(exact.abs().max()))
            assert (one.double() - exact).abs().max() <= allowed, self.options


@pytest.mark.parametrize("way", ["eager", "compiled", "interpreted"])
def test_random_calls(way: str, portion: Portion, request: pytest.FixtureRequest) -> None:
    if way == "interpreted":
        request.getfixturevalue("interpreted")
    # the interpreter is slow
    for seed in portion.of(SEEDS if way != "compiled" else SEEDS[:40], every=30 if way == "interpreted" else 20):
        program = Program(seed)
        if way == "interpreted" and (program.dtype == torch.float64 or program.T * program.heads > 500):
            continue  # the kernels have no float64, and the interpreter is slow
        call: Any = program.call
        if way == "compiled":
            torch._dynamo.reset()
            call = torch.compile(program.call, fullgraph=True, backend="aot_eager")
        try:
            program.check(program.found(call))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_random_calls_without_data(portion: Portion) -> None:
    """Fake tensors get the shapes, dtypes and strides of real ones."""
    for seed in portion.of(SEEDS, every=20):
        program = Program(seed)
        real = program.found(program.call)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            leaves = [mode.from_tensor(each) for each in program.leaves()]
            output = program.call(*leaves)
            fake = [output, *torch.autograd.grad(output, leaves, mode.from_tensor(program.laid(program.upstream)))]
        for one, other in zip(fake, real, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()), seed


def test_random_documents_one_by_one(portion: Portion) -> None:
    """A packed row equals its documents alone, without dropout, whose masks follow the place in the row."""
    for seed in portion.of(SEEDS, every=20):
        program = Program(seed)
        if program.ids is None or program.order or program.T != program.S or "dropout" in program.options:
            continue
        packed = program.found(program.call)
        alone = {name: each for name, each in program.options.items() if name != "documents"}
        for row, ids in enumerate(program.ids):
            for document in ids.unique():
                place = ids == document
                leaves = [x[row : row + 1, place].detach().requires_grad_() for x in program.tensors[:3]]
                sinks = program.tensors[3] if program.tensors[3:] else None
                output = attention(*leaves, head_dim=program.head_dim, sinks=sinks, **alone)
                found = [output, *torch.autograd.grad(output, leaves, program.upstream[row : row + 1, place])]
                for one, whole in zip(found, packed, strict=False):
                    eps = torch.finfo(program.dtype).eps
                    allowed = 16 * eps * max(1.0, float(whole.abs().max()))
                    assert (one[0].double() - whole[row, place].double()).abs().max() <= allowed, seed
