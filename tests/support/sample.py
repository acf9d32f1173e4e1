"""What `./run test` runs of the many cases, and what it leaves to `./run test_exhaustive`: the rule.

1. A test that has several parameters runs with each value of each, a device too; its other combinations are left.
2. A test that goes through a list of cases takes from it what the fixture `portion` gives it: in `test` every n-th, in a
   second item of that test the others.

       def test_every_pair(portion):
           for src, dst in portion.of(itertools.product(layouts, repeat=2), every=10): ...

3. What Hypothesis searches is `searched` (tests/support/search.py): with a tenth of the examples, and in a second item with all.
4. What takes long and has a shorter sister is marked by hand: `@pytest.mark.exhaustive`.
5. A table whose cases run together, as in one call of the worker processes, is given to `parametrize` by `together`: of the
   cases that rule 1 takes and of the others a list each for every value of its first parameter.

6. A test in tests/models whose cases each run on several processes runs with the first two of those that the rules above take:
   it goes through meshes, plans and families, where the other files go through ops, rules and failures.

What is left has the mark `exhaustive`. Which cases are taken follows from their names alone: it is the same in every process,
on every machine, and whatever else is selected.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")
Value = tuple[str, tuple[int, ...]]  # a parameter, and the identity of what it is

# Marks of tests that `./run test` leaves out as they stand.
ELSEWHERE = {"exhaustive", "gpu", "browser", "first_hour", "faults"}
A_FEW = 2  # cases of a test of models on several processes


def sample(cases: Sequence[tuple[str, frozenset[Any]]]) -> list[str]:
    """The names of a few of the cases, which have all the values; each case is a name and its values.

    Time and again the case with the most values that those before it lack; of several, by `number_of` the name.
    """
    taken: list[str] = []
    lacking = frozenset[Any]().union(*(values for _, values in cases))
    in_order = sorted(cases, key=lambda case: number_of(case[0]), reverse=True)
    while lacking:
        name, values = max(in_order, key=lambda case: len(case[1] & lacking))  # the first of several
        taken.append(name)
        lacking -= values
    return taken


def number_of(case: object) -> int:
    """A number that looks random, and is always the same for what prints the same."""
    return zlib.crc32(str(case).encode())


@dataclass(frozen=True, slots=True)
class Portion:
    """The sample of some cases, or the rest of them."""

    is_sample: bool

    def of(self, cases: Iterable[Case], every: int) -> Iterator[Case]:
        """Of the cases one in `every`, by `number_of`; or the others."""
        return (case for case in cases if (number_of(case) % every == 0) == self.is_sample)


PORTIONS = [
    pytest.param(Portion(True), id="sample"),
    pytest.param(Portion(False), id="rest", marks=pytest.mark.exhaustive),
]


def together(first: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All combinations of what `pytest.param` makes, for `parametrize`: a value of `first`, and a list of what goes with it.

    The list has the values of `others`, as one tuple for each combination. Both may have to be named: ("axes, plan, cases").
    What of `first` is marked by hand is in no sample.
    """
    values, combined = list(first), list(itertools.product(*others))
    rows = [(value, rest, [value.id, *(each.id for each in rest)]) for value in values for rest in combined]
    taken = sample([("-".join(ids), frozenset(enumerate(ids))) for value, _, ids in rows if not value.marks])
    found = []
    portions: list[tuple[bool, str, Any]] = [(True, "sample", ()), (False, "rest", pytest.mark.exhaustive)]
    for (is_sample, word, marks), value in itertools.product(portions, values):
        cases = [
            tuple(itertools.chain(*(each.values for each in rest)))
            for its, rest, ids in rows
            if its is value and ("-".join(ids) in taken) == is_sample
        ]
        if cases:
            found.append(pytest.param(*value.values, cases, id=f"{value.id}-{word}", marks=marks))
    return found


def mark_all_but_a_sample(items: Iterable[pytest.Item]) -> None:
    """Of the items of one test function, those that are in no sample become exhaustive."""
    ours = [
        (item, values_of(item)) for item in items if ELSEWHERE.isdisjoint(mark.name for mark in item.iter_markers())
    ]
    taken = sample([(item.name, values) for item, values in ours])
    if any(_is_of_models_on_processes(item) for item, _ in ours):
        taken = taken[:A_FEW]
    for item, values in ours:
        if values and item.name not in taken:
            item.add_marker(pytest.mark.exhaustive)


def _is_of_models_on_processes(item: pytest.Item) -> bool:
    return "models" in item.path.parts and "pool" in getattr(item, "fixturenames", ())


def values_of(item: pytest.Item) -> frozenset[Value]:
    """The values of the item's parameters; what one `parametrize` lists together is one value."""
    if not hasattr(item, "callspec"):
        return frozenset()
    parameters: dict[str, object] = item.callspec.params
    listed = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in listed]
    alone = [[name] for name in parameters if not any(name in names for names in together)]  # of fixtures
    return frozenset((names[0], tuple(id(parameters[name]) for name in names)) for names in together + alone)
