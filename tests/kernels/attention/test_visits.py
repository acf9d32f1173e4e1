"""Attention's programs visit the blocks with a visible key or query and no further block, and move the fewest bytes."""

from __future__ import annotations

import importlib
import random

import pytest
import torch
from torch import Tensor
from weft.kernels.attention.ranges import Ranges, document_bounds, keys_seen, ranges_from_keys
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.attention.cases import Case, launched
from tests.kernels.attention.test_ranges import keys_among

pytestmark = pytest.mark.usefixtures("interpreted")


def lengths(seed: int, tokens: int, mean: int) -> list[int]:
    """Random lengths of documents which fill a row."""
    generator, found = random.Random(seed), list[int]()
    while sum(found) < tokens:
        found.append(min(tokens - sum(found), 1 + int(generator.expovariate(1 / mean))))
    return found


def ranges(places: list[int], S: int, causal: bool, window: int | None, documents: list[int] | None) -> Ranges:
    bounds = None
    if documents is not None:
        ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
        bounds = document_bounds(ids)
    return ranges_from_keys(keys_seen(torch.tensor(places, dtype=torch.int32), S, causal, window, bounds), S)


def compacted(full: Ranges) -> Ranges:
    """The ranges where only the keys that a query sees are here."""
    held = (full.queries[0, :, 0] < full.queries[0, :, 1]).nonzero()[:, 0]
    return ranges_from_keys(keys_among(full.keys, held.int()), len(held))


PACKED, SHORT = lengths(1, 400, 60), lengths(2, 400, 3)
ALL = [*range(400)]
RUNS = [*range(37), *range(300, 341)]
CASES = {
    "causal": ranges(ALL, 400, True, None, None),
    "full": ranges(ALL, 400, False, None, None),
    "window": ranges(ALL, 400, True, 50, None),
    "short-window": ranges(ALL, 400, True, 3, None),
    "documents": ranges(ALL, 400, True, None, PACKED),
    "documents-not-causal": ranges(ALL, 400, False, None, PACKED),
    "short-documents": ranges(ALL, 400, True, None, SHORT),
    "documents-in-a-window": ranges(ALL, 400, True, 20, PACKED),
    "fewer-queries": ranges(ALL[333:], 400, True, None, None),
    "fewer-queries-in-a-window": ranges(ALL[333:], 400, True, 40, None),
    "runs-of-queries": ranges(RUNS, 400, True, None, None),
    "runs-of-queries-in-a-window": ranges(RUNS, 400, True, 30, None),
    "runs-of-queries-in-documents": ranges(RUNS, 400, True, None, PACKED),
    "many-runs-with-the-keys-they-see": compacted(ranges(ALL[::3], 400, True, None, SHORT)),
    "queries-before-the-keys": ranges([*range(-100, 70)], 400, True, None, None),
}


def mask_of(sides: Tensor, cols: int) -> Tensor:
    """bool [rows, cols]"""
    start, stop = sides.unsqueeze(1).unbind(-1)
    return (start <= torch.arange(cols)) & (torch.arange(cols) < stop)


def blocks(sides: Tensor, ROWS: int, COLS: int, phase: int | None, whole: bool) -> list[tuple[int, int, int, bool]]:
    """(first row, first column, stop column, whether seen whole) of each block that the programs visit."""
    kernels = importlib.import_module("tests.kernels.attention_kernels")
    programs = -(-len(sides) // ROWS)
    out = torch.empty(programs, 5, dtype=torch.int32)
    kernels.visited[(programs,)](sides.contiguous(), out, len(sides), phase, WHOLE=whole, ROWS=ROWS, COLS=COLS)
    found = []
    for program, (origin, begin, skipped, wholes, masked) in enumerate(out.tolist()):
        numbers = [(begin + i, True) for i in range(wholes)]
        numbers += [(i + skipped if i >= begin else i, False) for i in range(masked)]
        found += [
            (program * ROWS, origin + number * COLS, origin + (number + 1) * COLS, is_whole)
            for number, is_whole in numbers
        ]
    return found


@pytest.mark.parametrize("phase", [None, 0, 3], ids=["any-column", "multiples-of-8", "shifted"])
@pytest.mark.parametrize(("ROWS", "COLS"), [(16, 16), (32, 8), (8, 32)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_that_is_visited_is_seen(name: str, ROWS: int, COLS: int, phase: int | None) -> None:
    keys, queries = (each[0] for each in CASES[name])
    for sides, cols in ((keys, len(queries)), (queries, len(keys))):
        seen = mask_of(sides, cols)
        found = blocks(sides, ROWS, COLS, phase, whole=phase is None)
        counted = torch.zeros_like(seen, dtype=torch.int64)
        for row, start, stop, is_whole in found:
            part = seen[row : row + ROWS, max(0, start) : stop]
            assert part.any()  # visited over seen is 1.00
            assert part.all() or not is_whole
            assert not is_whole or (start >= 0 and stop <= cols)
            assert phase is None or (start + phase) % 8 == 0
            counted[row : row + ROWS, max(0, start) : stop] += 1
        assert (counted[seen] == 1).all()
        if phase is None:  # no more blocks than where they begin at multiples of their size
            grid = torch.nn.functional.pad(seen, (0, -cols % COLS, 0, -len(sides) % ROWS))
            on_grid = grid.view(-1, ROWS, grid.shape[1] // COLS, COLS).any(3).any(1)
            assert len(found) <= int(on_grid.sum())


def test_most_blocks_of_long_documents_have_no_mask() -> None:
    sides = ranges([*range(1024)], 1024, True, None, [1000, 24]).keys[0]
    found = blocks(sides, 16, 16, None, whole=True)
    masked = sum(not is_whole for *_, is_whole in found)
    assert masked <= 2 * 64 and len(found) > 2000


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(T=40, S=40), id="causal"),
        pytest.param(Case(T=40, S=40, documents=((0,) * 7 + (1,) * 22 + (2,) * 11, (0,) * 40)), id="documents"),
        pytest.param(Case(T=40, S=40, window=9), id="window"),
        pytest.param(Case(T=8, S=40, kv_heads=1), id="fewer-queries"),
    ],
)
def test_bytes_moved(case: Case) -> None:
    """Each program reads its own tokens once, and each key or query visible to these tokens once."""
    T, S, block, number = case.T, case.S, 16, 4 * case.head_dim
    rows = case.B * case.heads * T * number
    seen = case.seen().expand(case.B, T, S)

    def read(mask: Tensor) -> int:
        """How many columns the blocks of rows see, by block."""
        return sum(int(part.any(1).sum()) for part in mask.split(block, 1))

    launch = importlib.import_module("weft.kernels.attention.launch")
    given = case.tensors(torch.float32)
    query, key, value, grad = (given[name] for name in ("query", "key", "value", "grad"))
    options = {"head_dim": case.head_dim, "scale": 1.0}
    with counted_traffic() as forward:
        output, lse = launch.forward(query, key, value, case.ranges(), **options)
    of_keys = case.heads * read(seen) * 2 * number
    ranges_bytes = case.B * case.heads * T * 40  # of a few numbers a row
    assert forward.stored == output.nbytes + lse.nbytes
    assert rows + of_keys <= forward.loaded <= rows + of_keys + ranges_bytes
    with counted_traffic() as backward:
        gradients = launch.backward(grad, query, key, value, output, lse, case.ranges(), **options)
    of_queries = case.heads * read(seen.transpose(1, 2)) * (2 * number + 2 * 4)
    keys = 2 * case.B * case.kv_heads * S * number
    least = 3 * rows + lse.nbytes + of_keys + keys + of_queries
    assert backward.stored == sum(each.nbytes for each in gradients[:3]) + lse.nbytes
    assert least <= backward.loaded <= least + 2 * ranges_bytes


@pytest.mark.exhaustive
def test_nothing_of_the_size_of_the_scores_is_allocated() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                self.numbers = max(self.numbers, out.numel())
            return out

    case = Case(B=1, T=160, S=160, heads=1, kv_heads=1, window=5, dropout=0.5, sinks=True)
    with Largest() as largest:
        launched(case, torch.float32, "cpu")
    assert largest.numbers < 160 * 160
