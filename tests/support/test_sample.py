"""The rules of the sample of `./run test`: values in up to three cases, every n-th case, and no case left out twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import strategies as st

from tests.architecture.rules import ROOT
from tests.support.sample import AT_MOST, Portion, number_of, sample, together
from tests.support.search import searched

pytest_plugins = ["pytester"]
Select = Callable[..., list[str]]

MODULE = """
import pytest
from hypothesis import strategies as st
from tests.support.search import searched

@pytest.fixture(params=["reference", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request): ...

@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 7), (7, 1), (7, 7)])
def test_product(device, rows, columns, dtype): ...

@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 7), (7, 7)])
def test_list(rows, columns): ...

@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("rows", [1, 7])
def test_marked(dtype, rows): ...

@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("letter", "abc")
def test_many(letter, number): ...

@pytest.mark.every_value
@pytest.mark.parametrize("number", range(20))
def test_rules(number): ...

@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(20))
def test_long(number): ...

def test_portions(portion): ...

@searched(st.integers())
def test_searched(number): assert isinstance(number, int)

def test_alone(): ...
"""


@pytest.fixture
def select(pytester: pytest.Pytester) -> Select:
    """Names of the items of MODULE that are selected by marks, or of a single test of MODULE."""
    path = pytester.makepyfile(MODULE)

    def select(marks: str, name: str = "") -> list[str]:
        settings = ("-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"))
        chosen = f"{path}::{name}" if name else str(path)
        (call,) = pytester.inline_run(*settings, "--collect-only", "-q", "-m", marks, chosen).getcalls(
            "pytest_collection_finish"
        )
        return [item.name for item in call.session.items]

    return select


SELECTED: list[list[str]] = []  # selections of MODULE, made by the first test: a pytester serves a single test


@pytest.fixture
def selections(select: Select) -> tuple[list[str], list[str]]:
    if not SELECTED:
        SELECTED.extend((select("not exhaustive and not gpu"), select("exhaustive and not gpu")))
    first, second = SELECTED
    return first, second


def of(names: list[str], test: str) -> list[list[str]]:
    """The parameters of the items of a test."""
    return [name.removesuffix("]").partition("[")[2].split("-") for name in names if name.partition("[")[0] == test]


def test_every_item_is_in_one_selection_and_none_in_both(selections: tuple[list[str], list[str]]) -> None:
    names = sorted(selections[0] + selections[1])
    assert len(names) == len(set(names)) == 2 * 12 + 3 + 4 + 60 + 20 + 20 + 2 + 2 + 1


def test_of_a_product_every_value_is_taken(selections: tuple[list[str], list[str]]) -> None:
    taken = of(selections[0], "test_product")
    assert len(taken) == 3
    assert {device for device, *_ in taken} == {"reference", "interpreted"}
    assert {dtype for *_, dtype in taken} == {"bf16", "fp16", "fp32"}
    assert {rows for _, rows, *_ in taken} == {columns for *_, columns, _ in taken} == {"1", "7"}


def test_a_list_is_taken_whole(selections: tuple[list[str], list[str]]) -> None:
    assert len(of(selections[0], "test_list")) == 3
    assert of(selections[1], "test_list") == []


def test_of_many_values_three_are_taken(selections: tuple[list[str], list[str]]) -> None:
    taken = of(selections[0], "test_many")
    assert len(taken) == AT_MOST == 3
    assert {letter for letter, _ in taken} == {*"abc"}, "the cases have as many values as three can"
    assert len({number for _, number in taken}) == 3


def test_of_values_that_are_rules_all_are_taken(selections: tuple[list[str], list[str]]) -> None:
    assert len(of(selections[0], "test_rules")) == 20
    assert of(selections[1], "test_rules") == []


def test_of_long_cases_as_many_as_named_are_taken(selections: tuple[list[str], list[str]]) -> None:
    assert len(of(selections[0], "test_long")) == 2
    assert len(of(selections[1], "test_long")) == 18


def test_a_value_that_is_marked_needs_no_sample(selections: tuple[list[str], list[str]]) -> None:
    assert of(selections[0], "test_marked") == [["1", "bf16"], ["7", "bf16"]]


@pytest.mark.parametrize(
    ("test", "portions"), [("test_portions", ["sample", "rest"]), ("test_searched", ["few", "many"])]
)
def test_loops_and_searches_have_an_item_in_each(
    selections: tuple[list[str], list[str]], test: str, portions: list[str]
) -> None:
    assert [of(names, test) for names in selections] == [[[part]] for part in portions]


def test_a_selected_test_does_not_depend_on_the_mark_asked_for(
    select: Select, selections: tuple[list[str], list[str]]
) -> None:
    name = next(name for name in selections[1] if name.startswith("test_product"))
    assert select("exhaustive", name) == [name]
    assert select("not exhaustive", name) == []


def test_the_sample_of_three_parameters_is_as_long_as_the_longest() -> None:
    names = ["".join(each) for each in itertools.product("abcdefgh", "123", "xy")]
    taken = sample([(name, frozenset(name)) for name in names])
    assert len(taken) == 8
    assert set("".join(taken)) == set("abcdefgh123xy")


def test_a_table_whose_cases_run_together_has_a_sample_and_a_rest_for_each_value() -> None:
    first, second, third = ([pytest.param({each}, id=each) for each in word] for word in ("ab", "123", "xy"))
    rows = together(first, second, third)
    ids = {row.id: bool(row.marks) for row in rows}
    assert ids == {"a-sample": False, "b-sample": False, "a-rest": True, "b-rest": True}
    cases = {row.id: [(*row.values[0], *(each for (each,) in case)) for case in row.values[1]] for row in rows}
    assert sorted("".join(case) for of_row in cases.values() for case in of_row) == sorted(
        "".join(case) for case in itertools.product("ab", "123", "xy")
    )
    taken = cases["a-sample"] + cases["b-sample"]
    assert len(taken) == 3
    assert set("".join("".join(case) for case in taken)) == set("ab123xy")


def test_of_such_a_table_what_is_marked_by_hand_is_in_no_sample() -> None:
    first = [pytest.param("a", id="a"), pytest.param("b", id="b", marks=pytest.mark.exhaustive)]
    rows = together(first, [pytest.param(each, id=each) for each in "123"])
    assert [(row.id, bool(row.marks), len(row.values[1])) for row in rows] == [
        ("a-sample", False, 3),
        ("b-rest", True, 3),
    ]


def test_portions_are_told_apart_by_what_cases_print_as() -> None:
    cases = [(first, second) for first in range(30) for second in "abc"]
    taken, left = (list(Portion(is_sample).of(cases, every=9)) for is_sample in (True, False))
    assert sorted(taken + left) == cases
    assert 3 <= len(taken) <= 20
    assert list(Portion(True).of(reversed(cases), every=9)) == taken[::-1]
    assert number_of((3, "c")) == 0x88963BFB  # the same in every process, unlike `hash` of a text


def test_few_are_a_tenth_of_the_examples() -> None:
    found: list[int] = []

    def test(number: int) -> None:
        found.append(number)

    (mark,) = searched(st.integers(), examples=200)(test).pytestmark  # type: ignore[attr-defined]
    counts = []
    for search in mark.args[1]:
        found.clear()
        search.values[0]()
        counts.append(len(found))
    assert counts == [20, 200]
