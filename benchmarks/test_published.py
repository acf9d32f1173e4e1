"""Predicts published training steps, and prints predicted beside reported seconds and memory.

Three files are data: the rows in `published/rows.toml`, the differences of each program from Weft's in
`published/stacks.toml`, machines in `weft/models/predict/chips.toml`. No number belongs to a single row. A
step is traced on shapes, without a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import pytest

from benchmarks import history
from benchmarks.conftest import Tell
from benchmarks.published.predicted import activations_gib, memory_gib, predict, program_of, trace_of
from benchmarks.published.rows import GIB, Row, published_rows
from benchmarks.published.stacks import Program, Stack, stacks
from benchmarks.record import keep_rows

MEAN, MOST = 0.08, 0.20  # of the errors of seconds
MEMORY = 0.08  # of the error of a row's memory


@dataclass(frozen=True, slots=True)
class Prediction:
    """A figure of a published step: `seconds`, `memory` or `activations` in bytes, as predicted and as reported."""

    row: str
    figure: str
    predicted: float
    reported: float
    held_out: bool
    source: str

    @property
    def ratio(self) -> float:
        return self.predicted / self.reported

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


@cache
def predictions() -> tuple[Prediction, ...]:
    """Each reported figure of each published row, with Weft's prediction."""
    return tuple(
        Prediction(row.name, figure, predicted, reported, row.held_out, row.source)
        for row in published_rows()
        for figure, predicted, reported in _figures(row)
    )


def _figures(row: Row) -> list[tuple[str, float, float]]:
    """The row's reported figures: name, predicted and reported value."""
    found = []
    if row.seconds is not None:
        found.append(("seconds", predict(row).seconds, row.seconds))
    if row.memory_gib is not None:
        found.append(("memory", memory_gib(row) * GIB, row.memory_gib * GIB))
    if row.activations_gib is not None:
        found.append(("activations", activations_gib(row) * GIB, row.activations_gib * GIB))
    return found


def predicted(figure: str, held_out: bool | None = None) -> list[Prediction]:
    """The predictions of a figure, of all rows or of those given or held out; prints a line for each."""
    found = [each for each in predictions() if each.figure == figure and held_out in (None, each.held_out)]
    for each in found:
        note = "  held out" if each.held_out else ""
        print(f"{each.row:36} {each.predicted:12.5g} {each.reported:12.5g} {each.ratio:7.3f}{note}")
    errors = [each.error for each in found]
    print(f"{len(errors)} rows: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    return found


def mean_error(found: Sequence[Prediction]) -> float:
    return statistics.mean(each.error for each in found)


@pytest.mark.parametrize("held_out", [False, True], ids=["given", "held-out"])
def test_seconds_are_predicted(held_out: bool, tell: Tell) -> None:
    found = predicted("seconds", held_out)
    for each in found:
        tell(each.row, "Weft", "count", predicted_seconds=each.predicted, reported_seconds=each.reported)
    assert mean_error(found) <= MEAN
    assert max(each.error for each in found) <= MOST


@pytest.mark.parametrize("held_out", [False, True], ids=["given", "held-out"])
def test_memory_is_predicted(held_out: bool, tell: Tell) -> None:
    found = predicted("memory", held_out)
    for each in found:
        tell(f"{each.row}, memory", "Weft", "count", predicted_bytes=each.predicted, reported_bytes=each.reported)
    assert all(each.error <= MEMORY for each in found)


def test_activations_are_predicted() -> None:
    assert all(each.error <= MEMORY for each in predicted("activations"))
    for row in published_rows():
        if row.activations_gib is not None:  # the paper's own count, which shares no code with the trace
            assert activations_by_formula(row) == pytest.approx(row.activations_gib, rel=0.01)


def test_predictions_are_kept_for_the_page_of_results() -> None:
    keep_rows(history.RESULTS / "predicted.json", map(asdict, predictions()))


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
