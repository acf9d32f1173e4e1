"""Ways to compute attention and its gradients: Weft's op and kernels, and torch's SDPA and flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import attention, document_bounds

from benchmarks.losses import Made, Ways
from benchmarks.truth import CHUNKED, ROUNDED, Part, Truth

DOCUMENT = 500  # the mean length
# All rows of a call together: with as many, no way takes less than `timing.QUICK`, and all are timed alike.
TOKENS_OF_A_CALL = 65536
WIDTH, GROUP = 4096, 4  # numbers of all heads; query heads that share a key head
MASKED = 8192  # the longest rows with a dense mask, which torch's SDPA reads for every head
NEVER = 1e-12  # a dropout probability: the mask is drawn, but no weight is dropped
TORCH, AGAIN, MASK, FLEX = "torch SDPA", "torch SDPA, again", "torch SDPA, a dense mask", "flex_attention"
KERNEL = "Weft, the kernels"
CHUNK_BYTES = 1 << 30  # of scores in float64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Causal attention of `batch` rows of `tokens`, with grouped queries, in bf16."""

    tokens: int
    head_dim: int
    batch: int
    heads: int
    kv_heads: int
    packed: bool = False  # in documents of DOCUMENT tokens on average
    window: int | None = None
    dropout: float = 0.0

    @classmethod
    def of(cls, tokens: int, head_dim: int, **options: Any) -> Case:
        """As large as a layer of a Llama with 8 billion parameters."""
        heads = WIDTH // head_dim
        batch = max(1, TOKENS_OF_A_CALL // tokens)
        return cls(
            tokens=tokens, head_dim=head_dim, batch=batch, heads=heads, kv_heads=max(1, heads // GROUP), **options
        )

    @property
    def name(self) -> str:
        options = ["packed"] * self.packed
        options += [] if self.window is None else [f"a window of {self.window}"]
        options += ["dropout"] * bool(self.dropout)
        return ", ".join(
            [
                f"attention, {self.batch} x {self.tokens} tokens", *(options or ["plain"]),
                f"{self.heads} heads of {self.head_dim}, {self.kv_heads} for keys, bf16",
            ]
        )  # fmt: skip

    @property
    def is_plain(self) -> bool:
        """Whether torch's SDPA computes the call without a mask."""
        return not self.packed and self.window is None and not self.dropout

    @cached_property
    def documents(self) -> list[list[int]]:
        """The lengths of the documents in each row: exponential with the mean DOCUMENT, the last one cut."""
        generator = torch.Generator().manual_seed(0)

        def drawn() -> Iterator[int]:
            left = self.tokens
            while left:
                length = 1 + int(torch.empty(()).exponential_(1 / DOCUMENT, generator=generator))
                yield min(length, left)
                left -= min(length, left)

        return [list(drawn()) for _ in range(self.batch)] if self.packed else [[self.tokens]] * self.batch

    @property
    def pairs(self) -> int:
        """The pairs of a query and a key that the query sees, of one head, in all rows."""
        window = self.tokens if self.window is None else self.window

        def of(length: int) -> int:
            seen = min(window, length)
            return seen * (seen + 1) // 2 + (length - seen) * seen

        return sum(of(length) for row in self.documents for length in row)

    @property
    def flop(self) -> int:
        """Of forward's two products and backward's five, for the pairs seen; scores are computed again (Dao 2023)."""
        return 7 * 2 * self.pairs * self.heads * self.head_dim

    def ids(self, device: str) -> Tensor:
        """The document of each token, [batch, tokens]."""
        rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in self.documents]
        return torch.stack(rows).to(device)

    def seen(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Which keys the queries at `rows` see. ids: of one or several rows of tokens, [..., tokens]."""
        places = torch.arange(self.tokens, device=ids.device)
        seen = (places <= rows[:, None]) & (ids[..., rows, None] == ids[..., None, :])
        return seen if self.window is None else seen & (places > rows[:, None] - self.window)

    def operands(self, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        """Query, key, value with gradients, [batch, tokens, heads * head_dim], and the output's gradient."""
        generator = torch.Generator(device).manual_seed(0)
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.tokens, count * self.head_dim) for count in counts]
        *given, grad = (torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)
        return (*(each.requires_grad_() for each in given), grad)


def attends(case: Case, device: str) -> Mapping[str, Callable[[], Attend]]:
    """What makes each way of a case: a function of query, key and value.

    Whatever a training step makes once for all layers is made beforehand: bounds of documents, and masks.
    """
    found: dict[str, Callable[[], Attend]] = {"Weft": lambda: _weft(case, device)}
    if case.is_plain:
        found |= {KERNEL: lambda: _kernels(case), TORCH: lambda: _sdpa(case), AGAIN: lambda: _sdpa(case)}
    if case.packed and case.tokens <= MASKED:
        found[MASK] = lambda: _sdpa(case, device)
    if case.window is None and not case.dropout:
        found[FLEX] = lambda: _flex(case, device)
    return found


def ways_of(case: Case, operands: tuple[Tensor, ...], names: Collection[str] | None = None) -> Ways:
    """The ways to compute a case forward and backward. names: of some of the ways; None for all."""
    *leaves, grad = operands
    torch.compiler.reset()  # torch compiles a function for eight shapes; more would run uncompiled
    ways = Ways()

    def add(name: str, make: Callable[[], Attend]) -> None:
        with ways.failed.of(name):
            attend = make()

            def way() -> Made:
                output = attend(*leaves)
                return Made(output.detach(), torch.autograd.grad(output, leaves, grad))

            ways.made[name] = way

    for name, make in attends(case, grad.device.type).items():
        if names is None or name in names:
            add(name, make)
    return ways


def _weft(case: Case, device: str) -> Attend:
    options: dict[str, Any] = {"head_dim": case.head_dim, "window": case.window}
    if case.packed:
        options["documents"] = document_bounds(case.ids(device))
    if case.dropout:
        options |= {"dropout": case.dropout, "dropout_key": 0}
    return lambda q, k, v: attention(q, k, v, **options)


def _kernels(case: Case) -> Attend:
    """Weft's kernels, also where torch's fused attention was measured faster."""
    from weft.kernels.attention.sharded.op import ATTENTION
    from weft.kernels.dispatch.sharded import apply

    return lambda q, k, v: apply(ATTENTION, q, k, v, None, None, None, head_dim=case.head_dim)


def _sdpa(case: Case, masked_on: str | None = None) -> Attend:
    """torch's scaled_dot_product_attention. masked_on: the device of a dense mask; None for a causal call."""
    mask = None
    if masked_on is not None:
        ids = case.ids(masked_on)
        mask = case.seen(ids, torch.arange(case.tokens, device=masked_on))[:, None]  # [batch, 1, T, T]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [_heads(x, case.head_dim) for x in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(-2)

    return attend


def _flex(case: Case, device: str) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = case.ids(device)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[b, i] == ids[b, j]) if case.packed else i >= j

    rows = case.batch if case.packed else None
    blocks = create_block_mask(seen, rows, None, case.tokens, case.tokens, device=device)
    run = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = run(*(_heads(x, case.head_dim) for x in (q, k, v)), block_mask=blocks, enable_gqa=True)
        assert isinstance(mixed, Tensor)
        return mixed.transpose(1, 2).flatten(-2)

    return attend


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[batch, T, heads * D] -> [batch, heads, T, D]"""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def truth_of(case: Case, operands: tuple[Tensor, ...]) -> Truth:
    """The output and the gradients in float64, of the last row's last key head and the query heads that share it.

    Scores are computed for a chunk of queries at a time.
    """
    D, group = case.head_dim, case.heads // case.kv_heads
    q, k, v, grad = (x.detach()[-1].unflatten(-1, (-1, D)).transpose(0, 1).double() for x in _last(operands, D, group))
    ids = case.ids(q.device.type)[-1]
    output, dq, dk, dv = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    step = max(1, CHUNK_BYTES // (8 * group * case.tokens))
    for rows in torch.arange(case.tokens, device=q.device).split(step):
        scores = (q[:, rows] @ k.mT) * D**-0.5  # [group, rows, T]
        weights = scores.masked_fill_(~case.seen(ids, rows), -torch.inf).softmax(-1)
        output[:, rows] = weights @ v
        dv += (weights.mT @ grad[:, rows]).sum(0, keepdim=True)
        dweights = grad[:, rows] @ v.mT
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True)) * D**-0.5
        dq[:, rows] = dscores @ k
        dk += (dscores.mT @ q[:, rows]).sum(0, keepdim=True)

    def part(figure: str, told: str, of: Callable[[Made], Tensor], true: Tensor, width: int, allowed: float) -> Part:
        return Part(figure, told, lambda made: of(made)[-1, :, -width:], true.transpose(0, 1).flatten(1), allowed)

    return [
        part("output_error", "the output", lambda made: made.loss, output, group * D, ROUNDED),
        part("query_gradient_error", "the query's gradient", lambda made: made.gradients[0], dq, group * D, CHUNKED),
        part("key_gradient_error", "the key's gradient", lambda made: made.gradients[1], dk, D, CHUNKED),
        part("value_gradient_error", "the value's gradient", lambda made: made.gradients[2], dv, D, CHUNKED),
    ]


def _last(operands: tuple[Tensor, ...], D: int, group: int) -> list[Tensor]:
    """The last key head of key and value, and its query heads of query and of the output's gradient."""
    widths = (group * D, D, D, group * D)
    return [x[..., -width:] for x, width in zip(operands, widths, strict=True)]
