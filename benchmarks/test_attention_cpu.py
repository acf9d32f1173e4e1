"""Times attention on a CPU, forward and backward on one thread: a packed row, a window, and a single long document.

A packed row of 8,192 tokens has documents of 500 tokens on average. Beside Weft: torch's attention with a dense mask,
torch's attention on each document by itself, and torch's compiled flex_attention where it runs. CPU times are compared,
which other programs on the machine change least. Peak memory is counted as the bytes that torch's ops allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import attention

from benchmarks.conftest import Tell
from benchmarks.memory import Held
from benchmarks.timing import Processor, in_turn

TOKENS, HEADS, HEAD_DIM = 8192, 8, 64
DOCUMENT = 500  # the mean length
ROUNDS = 3
MEMORY = 6  # the most bytes that forward and backward allocate at a time, in units of the query's: linear in T
MASKED = 0.15  # the most of the masked form's time that a packed row may take
# The most of torch's own time that a single document may take; the same function runs, so the rest is noise.
LONG = 1.15

Heads = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def lengths() -> list[int]:
    """Lengths of documents, geometric with the mean DOCUMENT, which fill the row."""
    generator = torch.Generator().manual_seed(0)
    found: list[int] = []
    while sum(found) < TOKENS:
        drawn = torch.empty(()).exponential_(1 / DOCUMENT, generator=generator)
        found.append(min(TOKENS - sum(found), 1 + int(drawn)))
    return found


def operands() -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient: [1, TOKENS, HEADS * HEAD_DIM]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, TOKENS, HEADS * HEAD_DIM, generator=generator) for _ in range(4))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def torchs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    mixed = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), attn_mask=mask, is_causal=mask is None)
    return mixed.transpose(1, 2).flatten(-2)


def one_by_one(documents: list[int]) -> Attend:
    def attend(*tensors: Tensor) -> Tensor:
        parts = zip(*(x.split(documents, 1) for x in tensors), strict=True)
        return torch.cat([torchs(*part) for part in parts], 1)

    return attend


def flex(ids: Tensor) -> Attend | None:
    """torch's flex_attention, compiled, where this machine compiles it for a CPU. It has no backward on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[0, i] == ids[0, j])

    blocks = create_block_mask(seen, None, None, TOKENS, TOKENS, device="cpu")
    run = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = run(heads(q), heads(k), heads(v), block_mask=blocks)
        assert isinstance(made, Tensor)
        return made.transpose(1, 2).flatten(-2)

    try:
        with torch.no_grad():
            attend(*operands()[:3])
    except Exception:
        return None
    return attend


def step(attend: Attend, tensors: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """A way to compute the output and the gradients of query, key and value."""
    *given, upstream = tensors
    leaves = [x.detach().requires_grad_() for x in given]

    def run() -> list[Tensor]:
        output = attend(*leaves)
        return [output, *torch.autograd.grad(output, leaves, upstream)]

    return run


def forward(attend: Attend, tensors: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return attend(*tensors[:3])

    return run


def compared(title: str, ways: Mapping[str, Callable[[], object]], tell: Tell) -> dict[str, float]:
    """Each way's seconds, printed and recorded."""
    found = tell.measuring(in_turn, ways, Processor(), rounds=ROUNDS, warmup=1)
    first = next(iter(ways))
    print(f"\n{title}")
    for name, timed in found.items():
        print(f"{name:28}{timed.median * 1e3:10.1f} ms{found[first].median / timed.median:8.3f} {first} / {name}")
        tell(title, name, "host_time", **timed.figures)
    return {name: timed.median for name, timed in found.items()}


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(ways: Mapping[str, Callable[[], Any]]) -> None:
    """Every way computes what the first does."""
    first, *others = (way() for way in ways.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-4)


def packed() -> tuple[list[int], Tensor, Attend]:
    """The documents' lengths, the id of each token's document [1, TOKENS], and Weft's attention to them."""
    documents = lengths()
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))[None]
    return documents, ids, lambda q, k, v: attention(q, k, v, head_dim=HEAD_DIM, documents=ids)


@pytest.mark.timeout(1800)
def test_a_packed_row_on_a_cpu(one_thread: None, tell: Tell) -> None:
    (documents, ids, weft), tensors = packed(), operands()
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril_() & (ids.mT == ids)
    forms: dict[str, Attend] = {
        "Weft": weft,
        "each document by itself": one_by_one(documents),
        "a dense mask": lambda q, k, v: torchs(q, k, v, mask),
    }
    ways = {name: step(attend, tensors) for name, attend in forms.items()}
    same(ways)
    title = f"attention on a CPU, {len(documents)} documents in {TOKENS} tokens, forward and backward"
    seconds = compared(title, ways, tell)
    assert seconds["Weft"] <= MASKED * seconds["a dense mask"]
    with Held() as held:
        ways["Weft"]()
    print(f"peak memory of Weft, in units of the query: {held.peak_bytes / tensors[0].nbytes:.2f}")
    tell(title, "Weft", "count", peak_bytes=held.peak_bytes)
    assert held.peak_bytes <= MEMORY * tensors[0].nbytes


@pytest.mark.timeout(1800)
def test_flex_attention_on_a_cpu(one_thread: None, tell: Tell) -> None:
    (documents, ids, weft), tensors = packed(), operands()
    flexible = flex(ids)
    if flexible is None:
        pytest.skip("torch's flex_attention does not run on this CPU")
    ways = {name: forward(form, tensors) for name, form in {"Weft": weft, "flex_attention": flexible}.items()}
    same(ways)
    compared(f"attention on a CPU, {len(documents)} documents in {TOKENS} tokens, forward alone", ways, tell)


@pytest.mark.timeout(1800)
def test_one_long_document_on_a_cpu(one_thread: None, tell: Tell) -> None:
    tensors, ids = operands(), torch.zeros(1, TOKENS, dtype=torch.int64)
    forms: dict[str, Attend] = {
        "Weft": lambda q, k, v: attention(q, k, v, head_dim=HEAD_DIM, documents=ids),
        "torch": torchs,
        "torch again": torchs,
    }
    ways = {name: step(attend, tensors) for name, attend in forms.items()}
    same(ways)
    title = f"attention on a CPU, one document of {TOKENS} tokens, forward and backward"
    seconds = compared(title, ways, tell)
    assert seconds["Weft"] <= LONG * max(seconds["torch"], seconds["torch again"])


@pytest.mark.parametrize("window", [256, 1024])
@pytest.mark.timeout(1800)
def test_a_window_on_a_cpu(window: int, one_thread: None, tell: Tell) -> None:
    tensors, ones = operands(), torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    mask = ones.tril() & ones.triu(1 - window)
    forms: dict[str, Attend] = {
        "Weft": lambda q, k, v: attention(q, k, v, head_dim=HEAD_DIM, window=window),
        "a dense mask": lambda q, k, v: torchs(q, k, v, mask),
    }
    ways = {name: step(attend, tensors) for name, attend in forms.items()}
    same(ways)
    compared(f"attention on a CPU, a window of {window} in {TOKENS} tokens, forward and backward", ways, tell)
