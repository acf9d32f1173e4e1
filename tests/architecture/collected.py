"""Lists every test in the repository, whatever is selected: `python -m tests.architecture.collected` prints JSON.

An entry of the list has the test's name and marks, whether the whole function is marked exhaustive, whether the test
runs on several processes, and the public names of the packages used by the test's code (none for an exhaustive test).
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

PACKAGES = ("weft.mesh.infer", "weft.reshard", "weft.kernels")
Found = list[tuple[str, pytest.Item]]  # by name, before tests are deselected and pytest-xdist adds groups
FOUND = pytest.StashKey[Found]()  # in a session that collects all tests; filled by tests/conftest.py


class Session:
    """A pytest plugin: keeps all collected tests."""

    def __init__(self) -> None:
        self.found: Found = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = session.config.stash[FOUND]


def described(found: Found) -> list[dict[str, Any]]:
    """The tests as JSON values."""
    return [
        {
            "name": name,
            "marks": sorted(marks),
            "by_hand": any(mark.name == "exhaustive" for mark in getattr(item.obj, "pytestmark", [])),  # type: ignore[attr-defined]
            "on_processes": "pool" in getattr(item, "fixturenames", ()),
            "uses": [] if "exhaustive" in marks else sorted(uses(item)),
        }
        for name, item in found
        for marks in [{mark.name for mark in item.iter_markers()}]
    ]


def uses(item: pytest.Item) -> set[str]:
    """Public names of the packages reached from the test's function or from a parameter of the test."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    found: set[str] = set()
    for start in (item.obj, *parameters.values()):  # type: ignore[attr-defined]
        found |= reached_from(start)
    return found


def reached_from(value: Any) -> set[str]:
    """The public names used by a function, directly or through functions of the tests, or contained in a value."""
    try:
        return _reached_from(value)
    except TypeError:  # not hashable
        return _reached_from.__wrapped__(value)


@functools.cache
def _reached_from(value: Any) -> set[str]:
    found: set[str] = set()
    seen: set[int] = set()
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found |= _public().get(id(value), set()) | _public().get(id(type(value)), set())
        if isinstance(value, functools.partial):
            left += [value.func, *value.args]
        elif isinstance(value, tuple | list):
            left += value
        elif is_dataclass(value) and not isinstance(value, type):
            left += [getattr(value, field.name) for field in fields(value)]
        elif isinstance(value, type) and value.__module__.startswith("tests."):
            left += vars(value).values()
        elif isinstance(value, FunctionType) and hasattr(value, "hypothesis"):
            left.append(value.hypothesis.inner_test)
        elif isinstance(value, FunctionType) and value.__module__.startswith("tests."):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            held = {name: cell.cell_contents for name, cell in cells.items() if cell != type(cell)()}
            left += _loaded(value.__code__, value.__globals__ | held)
    return found


def _loaded(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Values loaded by the code: by a global name, or as an attribute of a module."""
    holder: object = None
    for operation, name in _operations(code):
        if operation in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            holder = names.get(name)
            yield holder
        elif operation in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(holder, ModuleType | type):
            holder = getattr(holder, name, None)
            yield holder
        else:
            holder = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _loaded(constant, names)


@functools.cache
def _operations(code: CodeType) -> list[tuple[str, Any]]:
    """The code's instructions and their arguments; many tests reach the same code."""
    return [(instruction.opname, instruction.argval) for instruction in dis.get_instructions(code)]


@functools.cache
def _public() -> dict[int, set[str]]:
    """The public names of the packages, by the identity of the objects named."""
    found: dict[int, set[str]] = {}
    for package in PACKAGES:
        module = __import__(package, fromlist=["__all__"])
        for name in module.__all__:
            found.setdefault(id(getattr(module, name)), set()).add(f"{package}.{name}")
    return found


def main() -> None:
    plugin = Session()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[plugin])
    assert status == pytest.ExitCode.OK, said.getvalue()
    print(json.dumps(described(plugin.found)))


if __name__ == "__main__":  # imported by the name under which tests/conftest.py knows the module
    from tests.architecture import collected

    collected.main()
