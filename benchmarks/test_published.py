"""Predicts training steps that others have published, and prints predicted beside reported seconds and memory.

The rows are data, `published/rows.toml`; what each program does otherwise than Weft's is data, `published/stacks.toml`;
machines are `weft/models/predict/chips.toml`. No number belongs to a row. Needs no GPU: a step is traced on shapes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import pytest

from benchmarks.conftest import Tell
from benchmarks.published.predicted import activations_gib, memory_gib, predict, program_of, trace_of
from benchmarks.published.rows import GIB, Row, published_rows
from benchmarks.published.stacks import Program, Stack, stacks

MEAN, MOST = 0.08, 0.20  # of the errors of seconds
MEMORY = 0.08  # of the error of a row's memory
# Rows whose memory is further off than that.
MEMORY_IS_OPEN = {
    "torchtitan-405b-512-1f1b": "what else a stage in float8 keeps, beside gathered weights and whole gradients",
    "torchtitan-405b-512-interleaved": "as the row with 1f1b",
    "torchtitan-405b-512-cp8-256k": "what the ring of 8 keeps",
}


def compare(rows: Sequence[Row], predicted: Callable[[Row], float], reported: Callable[[Row], float]) -> list[float]:
    """Prints a line for each row, and returns the ratios of predicted to reported."""
    ratios = []
    for row in rows:
        value, truth = predicted(row), reported(row)
        ratios.append(value / truth)
        print(f"{row.name:36} {value:9.2f} {truth:9.2f} {value / truth:7.3f}{'  held out' if row.held_out else ''}")
    errors = [abs(ratio - 1) for ratio in ratios]
    print(f"{len(errors)} rows: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    return ratios


@pytest.mark.parametrize("held_out", [False, True], ids=["given", "held-out"])
def test_seconds_are_predicted(held_out: bool, tell: Tell) -> None:
    rows = [row for row in published_rows() if row.seconds is not None and row.held_out is held_out]
    ratios = compare(rows, lambda row: predict(row).seconds, lambda row: row.seconds or 0.0)
    for row, ratio in zip(rows, ratios, strict=True):
        assert row.seconds is not None
        tell(row.name, "Weft", "count", predicted_seconds=ratio * row.seconds, reported_seconds=row.seconds)
    errors = [abs(ratio - 1) for ratio in ratios]
    assert statistics.mean(errors) <= MEAN
    assert max(errors) <= MOST


@pytest.mark.parametrize("held_out", [False, True], ids=["given", "held-out"])
def test_memory_is_predicted(held_out: bool, tell: Tell) -> None:
    rows = [row for row in published_rows() if row.memory_gib is not None and row.held_out is held_out]
    ratios = compare(rows, memory_gib, lambda row: row.memory_gib or 0.0)
    for row, ratio in zip(rows, ratios, strict=True):
        assert row.memory_gib is not None
        nbytes = row.memory_gib * GIB
        tell(f"{row.name}, memory", "Weft", "count", predicted_bytes=ratio * nbytes, reported_bytes=nbytes)
    assert statistics.mean(abs(ratio - 1) for ratio in ratios) <= MEMORY
    far = {row.name for row, ratio in zip(rows, ratios, strict=True) if abs(ratio - 1) > MEMORY}
    assert far <= MEMORY_IS_OPEN.keys()


def test_activations_are_predicted() -> None:
    rows = [row for row in published_rows() if row.activations_gib is not None]
    ratios = compare(rows, activations_gib, lambda row: row.activations_gib or 0.0)
    assert all(abs(ratio - 1) <= MEMORY for ratio in ratios)
    for row in rows:  # the paper's own count, which shares no code with the trace
        assert activations_by_formula(row) == pytest.approx(row.activations_gib, rel=0.01)


def activations_by_formula(row: Row) -> float:
    """GiB on the first rank of a pipeline: equations 2 and 6 of Korthikanti et al. 2022, and their factor of chunks."""
    tensor, stages, chunks = row.axis("tp"), row.axis("pp"), row.chunks
    hidden, heads, layers = row.model.hidden_size, row.model.num_heads, row.model.num_layers
    elements = row.rows / row.microbatches / row.axis("dp") * row.tokens * hidden
    if row.recompute == "selective":
        block = elements * 34 / tensor
    else:
        block = elements * (10 + 24 / tensor + 5 * heads * row.tokens / (hidden * tensor))
    interleaved = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    return block * layers * interleaved / GIB


def test_no_number_was_taken_from_a_row_that_is_held_out() -> None:
    known = {row.chip for row in published_rows()} | set(stacks())
    taken = [(row, number) for row in published_rows() for number in row.takes]
    assert taken
    assert not [row.name for row, _ in taken if row.held_out]
    assert {number.rpartition(".")[0] for _, number in taken} <= known


def test_a_stack_without_facts_leaves_the_trace_as_it_is() -> None:
    row = next(row for row in published_rows() if row.name == "torchtitan-8b-cp2-64k")
    trace = trace_of(row)
    plain = Program(stack=Stack(compiled=True, source=""))
    assert plain.of(trace) == trace
    assert program_of(row).of(trace) != trace


def test_each_stack_is_that_of_a_row() -> None:
    assert {row.stack for row in published_rows()} == set(stacks())
