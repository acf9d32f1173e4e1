"""Rows of examples: packing, the order of rows, targets within a segment, and counts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from weft.models.data.examples.example import Task
from weft.models.data.examples.rows import ExampleBatches, TaskRows, pack
from weft.models.data.sources import Mixture

from tests.models.examples.arrays import ArraySource, random_source
from tests.support.search import searched

TASKS: tuple[Task, ...] = ("sft", "dpo", "kto")


def best_fit(lengths: list[int], width: int) -> list[int]:
    """Best-fit decreasing as its definition says, one example after another: the sorted free places of the rows."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, left in enumerate(free) if left >= length]
        if fitting:
            free[min(fitting, key=lambda row: free[row])] -= length
        else:
            free.append(width - length)
    return sorted(free)


@searched(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90))
def test_packing_is_best_fit_decreasing_and_each_example_is_in_one_row(lengths: list[int], width: int) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), width)
    assert len(rows) == len(lengths)
    used = np.bincount(rows, weights=lengths).astype(int).tolist() if lengths else []
    assert all(0 < places <= width for places in used)
    assert sorted(width - places for places in used) == best_fit(lengths, width)


@pytest.mark.parametrize(("lengths", "says"), [([3, 9], "3 to 9 places, and a row has 8"), ([0, 4], "0 to 4 places")])
def test_an_example_that_fits_no_row_is_refused(lengths: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pack(np.array(lengths), 8)


def test_rows_of_lognormal_lengths_are_nearly_full() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, 50_000).astype(np.int64), 1, 2048)
    rows = pack(lengths, 2048)
    fill = lengths.sum() / ((rows.max() + 1) * 2048)
    print(f"50,000 examples of a mean of {lengths.mean():.0f} tokens in rows of 2,048: {fill:.4f} full")
    assert fill >= 0.97


def batches(
    source: ArraySource | Mixture, *, packed: bool = True, seed: int = 1, batch_size: int = 4
) -> ExampleBatches:
    return ExampleBatches(source, sequence_length=16, batch_size=batch_size, seed=seed, packed=packed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("batch_size", "step"),
    [
        pytest.param(2, "a step takes 2 rows, 2.0 examples on average, 19.0 steps an epoch", id="fewer-rows"),
        pytest.param(
            76,
            "a step takes 76 rows, 76.0 examples on average, 0.5 steps an epoch; give fewer with --data.batch-size",
            id="more-rows-than-there-are",
        ),
    ],
)
def test_rows_are_described_with_what_a_step_takes(batch_size: int, step: str) -> None:
    source = ArraySource("sft", [random_source("sft", 1, 16).examples[0]] * 40)
    full = len(source.examples[0].segments[0].tokens) / 16
    described = batches(source, packed=False, batch_size=batch_size).describe()
    assert described == f"38 examples in 38 rows of 16 tokens ({full:.0%} full), 2 held out; {step}"


def epoch_of(made: ExampleBatches, which: int = 0) -> list[TaskRows]:
    """Every training row of the first epoch, one by one."""
    rows = []
    for number in range(made.num_samples):
        step, row = divmod(number, 4)
        rows.append(made.batch(step, slice(row, row + 1), which))
    return rows


def examples_of(rows: TaskRows) -> list[int]:
    """The examples of rows, by the column of their numbers."""
    return [number for number in rows.examples.flatten().tolist() if number >= 0]


def check_row(source: ArraySource, rows: TaskRows, which: int) -> int:
    """Compare each row with its examples, read one after another. Returns the number of targets."""
    learned = 0
    assert {each.dtype for each in rows.named().values()} == {torch.int64}
    assert rows.positions is not None and rows.documents is not None
    for row in range(len(rows.tokens)):
        numbers = [number for number in rows.examples[row].tolist() if number >= 0]
        assert rows.examples[row].tolist()[len(numbers) :] == [-1] * (rows.examples.shape[1] - len(numbers))
        tokens: list[int] = []
        targets: list[int] = []
        places: list[tuple[int, int]] = []  # (document, position)
        for k, number in enumerate(numbers):
            example = source.examples[number]
            assert rows.labels[row, k].item() == bool(example.label)
            segments = example.segments if source.task == "dpo" else (example.segments[which],)
            for n, segment in enumerate(segments):
                own = segment.tokens.tolist()
                tokens += own
                pairs = zip(own[1:], segment.learned.tolist()[1:], strict=True)
                targets += [*(token if is_learned else -100 for token, is_learned in pairs), -100]
                places += [(len(segments) * k + n, position) for position in range(len(own))]
        padding = rows.tokens.shape[1] - len(tokens)
        assert padding >= 0
        document = len(numbers) * (2 if source.task == "dpo" else 1)
        places += [(document + each // 16, each % 16) for each in range(padding)]  # no longer than a segment
        assert rows.tokens[row].tolist() == tokens + [source.tokenizer.end] * padding
        assert rows.targets[row].tolist() == targets + [-100] * padding
        assert list(zip(rows.documents[row].tolist(), rows.positions[row].tolist(), strict=True)) == places
        learned += sum(target != -100 for target in targets)
    return learned


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize("count", [1, 2, 19, 20, 300])
@pytest.mark.parametrize("task", TASKS)
def test_every_example_is_once_in_an_epoch_or_held_out_and_rows_are_their_examples(
    task: Task, count: int, packed: bool
) -> None:
    """A token is never a target of the segment before; targets are counted without a read of tokens."""
    source = random_source(task, count, 16)
    made = batches(source, packed=packed)
    assert made.row_width == (32 if task == "dpo" else 16)
    epoch = epoch_of(made)
    assert source.reads == [number for rows in epoch for number in examples_of(rows)]  # and nothing else
    for step in range(-(-made.num_samples // 4)):
        for rows in (slice(0, 4), slice(1, 3), slice(2, 2)):
            read = made.batch(step, rows)
            learned = check_row(source, read, 0)
            desirable = int(read.labels.sum())
            assert made.counts(step, rows) == (len(examples_of(read)), learned, desirable)
    held_out = made.held_out(slice(None))
    assert made.held_out_counts(slice(None)) == (
        len(examples_of(held_out)),
        check_row(source, held_out, 0),
        int(held_out.labels.sum()),
    )
    assert len(examples_of(held_out)) == (count // 20 if count >= 20 else 0)
    assert len(held_out.tokens) == made.num_held_out
    trained = [number for rows in epoch for number in examples_of(rows)]
    assert sorted(trained + examples_of(held_out)) == list(range(count)) == list(range(made.num_examples))
    assert packed or made.examples_per_row == 1
    assert max(len(examples_of(rows)) for rows in [*epoch, held_out][: len(epoch)]) <= made.examples_per_row


def test_the_second_set_of_rows_has_the_same_examples_with_mismatched_completions() -> None:
    source = random_source("kto", 100, 16)
    made = batches(source)
    for own, mismatched in zip(epoch_of(made), epoch_of(made, which=1), strict=True):
        assert torch.equal(own.examples, mismatched.examples)
        assert torch.equal(own.labels, mismatched.labels)
        check_row(source, mismatched, 1)
    check_row(source, made.held_out(slice(None), which=1), 1)


@pytest.mark.parametrize(("task", "which"), [("sft", 1), ("dpo", 1), ("kto", 2)])
def test_other_tasks_have_one_set_of_rows(task: Task, which: int) -> None:
    with pytest.raises(ValueError, match=f"rows of {task} have no set {which}; only kto has a second"):
        batches(random_source(task, 3, 16)).batch(0, slice(None), which)


def test_rows_depend_on_the_data_the_seed_and_the_step_alone() -> None:
    source = random_source("sft", 300, 16)
    made, fresh = batches(source), batches(source)
    for step in (1000, 3, 0):
        again, part = fresh.batch(step, slice(None)), made.batch(step, slice(1, 3))
        for name, tensor in part.named().items():
            assert torch.equal(tensor, again.named()[name][1:3])
    other = batches(source, seed=2)
    assert not torch.equal(made.batch(0, slice(None)).tokens, other.batch(0, slice(None)).tokens)
    assert torch.equal(made.held_out(slice(None)).tokens, other.held_out(slice(None)).tokens)


def test_each_epoch_has_its_own_order_of_the_same_rows() -> None:
    made = batches(random_source("sft", 300, 16), batch_size=1)
    epochs = [
        [tuple(examples_of(made.batch(epoch * made.num_samples + row, slice(None)))) for row in range(made.num_samples)]
        for epoch in range(2)
    ]
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]


def test_a_batch_larger_than_the_data_begins_again() -> None:
    made = batches(random_source("dpo", 3, 16), packed=False, batch_size=7)
    rows = [made.batch(0, slice(row, row + 1)) for row in range(7)]
    assert Counter(number for each in rows for number in examples_of(each)).most_common()[-1][1] == 2
    assert made.counts(0, slice(None)).examples == 7


def test_at_most_128_examples_are_held_out() -> None:
    made = batches(random_source("sft", 3000, 4))
    assert made.held_out_counts(slice(None)).examples == 128


def test_a_mixture_takes_rows_by_weight_and_numbers_the_examples_of_all_sources() -> None:
    sources = [random_source("kto", 40, 16), random_source("kto", 70, 16, seed=1, first=40)]
    mixture = Mixture(((sources[0], Fraction(3)), (sources[1], Fraction(1))))  # type: ignore[arg-type]
    made = batches(mixture, packed=False)
    taken = Counter[bool]()
    for step in range(10):
        rows = made.batch(step, slice(None))
        for row, number in enumerate(examples_of(rows)):
            assert rows.tokens[row, 0] == number  # of random_source's tokens
            expected = sources[number >= 40].examples[number - 40 * (number >= 40)]
            assert rows.labels[row, 0].item() == expected.label
            taken[number >= 40] += 1
    assert taken == {False: 30, True: 10}
    packed = batches(mixture)
    assert made.num_examples == packed.num_examples == 110
    assert packed.held_out_counts(slice(None)).examples == 2 + 3
    for step in range(10):
        for numbers in packed.batch(step, slice(None)).examples:
            assert len({number >= 40 for number in numbers.tolist() if number >= 0}) == 1


def test_a_segment_longer_than_the_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="a segment has 17 tokens, above the sequence length 16"):
        batches(random_source("dpo", 90, 17))
