"""The rules by which `./run test` takes a sample of many cases, and leaves the rest to `./run test_exhaustive`.

1. A test with several parameters runs with each value of each parameter, a device included. Other combinations of
   values are left out.
   A test has at most 3 cases in the sample, chosen to have as many values as possible: of a list of 30 errors, 3 are in
   the sample. A test in which every value tests a different rule, as an op or a source file does, is marked
   `@pytest.mark.every_value`, and has no limit. A test whose cases are long, and of which n cases are enough, is
   marked `@pytest.mark.few(n)`: the sample has the first n cases taken by this rule.
2. A test that loops over a list of cases takes the cases from the fixture `portion`. The test becomes two items: with
   every n-th case in `test`, and with the remaining cases.

       def test_every_pair(portion):
           for src, dst in portion.of(itertools.product(layouts, repeat=2), every=10): ...

3. A search by Hypothesis uses `searched` (tests/support/search.py), and becomes two items: with a tenth of the
   examples, and with all.
4. A long test with a shorter version is marked by hand: `@pytest.mark.exhaustive`.
5. A table whose cases run together, as in a call of the worker processes, gets the parameters from `together`.
   Every value of the first parameter has two lists: the cases taken by rule 1, and the remaining cases.
6. A test in tests/models whose cases each run on several processes is taken as if marked `@pytest.mark.few(1)`, unless
   marked with a number. Tests in tests/models vary meshes, plans and families; files elsewhere vary ops, rules and
   failures.

Cases left out have the mark `exhaustive`. The names of the cases alone decide: the sample is the same in every
process, on every machine, and for any selection of tests.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
Value = tuple[str, tuple[int, ...]]  # the name of a parameter, and the ids of the values

# Marks of tests outside every sample.
ELSEWHERE = {"exhaustive", "gpu", "browser", "first_hour", "faults"}
AT_MOST = 3  # cases taken of a test without the marks `every_value` and `few`
A_FEW = 1  # cases taken of a test of models on several processes, without the mark `few`


def sample(cases: Sequence[tuple[str, frozenset[Any]]]) -> list[str]:
    """The names of a few cases, which together have all values. cases: the name and the values of each case.

    Repeatedly takes the case with the most values still missing; among equals, the case with the greatest `number_of`.
    """
    taken: list[str] = []
    missing = frozenset[Any]().union(*(values for _, values in cases))
    in_order = sorted(cases, key=lambda case: number_of(case[0]), reverse=True)
    while missing:
        name, values = max(in_order, key=lambda case: len(case[1] & missing))  # the first among equals
        taken.append(name)
        missing -= values
    return taken


def number_of(case: object) -> int:
    """A hash of the text of `case`, as a number."""
    return zlib.crc32(str(case).encode())


@dataclass(frozen=True, slots=True)
class Portion:
    """The sample of some cases, or the remaining cases."""

    is_sample: bool

    def of(self, cases: Iterable[Case], every: int) -> Iterator[Case]:
        """Every n-th of the cases (n is `every`), chosen by `number_of`; or the remaining cases."""
        return (case for case in cases if (number_of(case) % every == 0) == self.is_sample)


PORTIONS = [
    pytest.param(Portion(True), id="sample"),
    pytest.param(Portion(False), id="rest", marks=pytest.mark.exhaustive),
]


def together(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All combinations of pytest.params, for `parametrize`: each value of `first`, with a list of combinations.

    The list has a tuple with the values of `others` for each combination. Name both, as in ("axes, plan, cases"). A
    value of `first` marked by hand is in no sample.
    """
    values, combined = list(first), list(itertools.product(*others))
    rows = [(value, rest, [value.id, *(each.id for each in rest)]) for value in values for rest in combined]
    taken = sample([("-".join(ids), frozenset(enumerate(ids))) for value, _, ids in rows if not value.marks])
    found = []
    portions: list[tuple[bool, str, Any]] = [(True, "sample", ()), (False, "rest", pytest.mark.exhaustive)]
    for (is_sample, word, marks), value in itertools.product(portions, values):
        cases = [
            tuple(itertools.chain(*(each.values for each in rest)))
            for row_value, rest, ids in rows
            if row_value is value and ("-".join(ids) in taken) == is_sample
        ]
        if cases:
            found.append(pytest.param(*value.values, cases, id=f"{value.id}-{word}", marks=marks))
    return found


def mark_all_but_a_sample(items: Iterable[pytest.Item]) -> None:
    """Mark as exhaustive all items of a test function outside the sample."""
    sampled = [
        (item, values_of(item)) for item in items if ELSEWHERE.isdisjoint(mark.name for mark in item.iter_markers())
    ]
    taken = sample([(item.name, values) for item, values in sampled])[: _limit([item for item, _ in sampled])]
    for item, values in sampled:
        if values and item.name not in taken:
            item.add_marker(pytest.mark.exhaustive)


def _limit(items: list[pytest.Item]) -> int | None:
    """The greatest number of a test's items in the sample; None without a limit."""
    marks = {mark.name: mark for item in items for mark in item.iter_markers()}
    if "few" in marks:
        number: int = marks["few"].args[0]
        return number
    if any(_is_of_models_on_processes(item) for item in items):
        return A_FEW
    return None if "every_value" in marks else AT_MOST


def _is_of_models_on_processes(item: pytest.Item) -> bool:
    return "models" in item.path.parts and "pool" in getattr(item, "fixturenames", ())


def values_of(item: pytest.Item) -> frozenset[Value]:
    """The values of the item's parameters; parameters listed together in a `parametrize` have a joint value."""
    if not hasattr(item, "callspec"):
        return frozenset()
    parameters: dict[str, object] = item.callspec.params
    listed = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in listed]
    alone = [[name] for name in parameters if not any(name in names for names in together)]  # parameters of fixtures
    return frozenset((names[0], tuple(id(parameters[name]) for name in names)) for names in together + alone)
