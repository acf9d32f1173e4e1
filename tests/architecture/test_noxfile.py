"""The sessions of noxfile.py: their installs and commands, recorded instead of run by nox and pip."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
from weft.models.cli.command import COMMANDS

from tests.architecture.rules import ROOT, nox_sessions

PIP = ("-m", "pip", "--disable-pip-version-check", "install")


class Replaced(Exception):
    """Another program has taken the place of nox."""


class Session:
    """Stands for nox's session: records its commands, and gives the environments it makes a python."""

    def __init__(self, home: Path, *posargs: str) -> None:
        self.posargs, self.invoked_from = list(posargs), str(home)
        self.ran: list[tuple[str, ...]] = []
        self._home = home

    def run(self, *command: str, **settings: Any) -> None:
        self.ran.append(command)
        if command[1:3] == ("-m", "venv"):
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin/python").touch()

    def log(self, message: str) -> None:
        pass

    def error(self, message: str) -> NoReturn:
        raise SystemExit(message)

    @property
    def installed(self) -> set[str]:
        """The packages requested from pip."""
        installs = [command for command in self.ran if command[1:5] == PIP]
        asked = {word for command in installs for word in command[command.index("-c") + 2 :]}
        return {word for word in asked if not word.startswith("-")}


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    nox = SimpleNamespace(
        session=lambda function: function,
        Session=Session,
        options=SimpleNamespace(),
        logger=SimpleNamespace(logger=SimpleNamespace(addFilter=lambda keep: None)),
    )
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("weft_noxfile", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "_say_size", lambda session, pip, constraints: None)
    return module


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The program, arguments, environment and folder of the execve that replaces nox."""
    found: list[Any] = []

    def execve(program: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        found.extend((program, arguments, environment, os.getcwd()))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    yield found
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def called(function: Callable[[Session], None], home: Path, *posargs: str) -> Session:
    session = Session(home, *posargs)
    with contextlib.suppress(Replaced):
        function(session)
    return session


def test_training_installs_the_packages_and_torch_alone(
    noxfile: ModuleType, tmp_path: Path, replaced: list[Any]
) -> None:
    packages = {f"./packages/{name}" for name in ("mesh", "reshard", "kernels", "models")}
    assert called(noxfile.train, tmp_path).installed == {"torch", "hatchling", "editables"} | packages


def test_tests_add_their_tools_to_the_environment_of_training(
    noxfile: ModuleType, tmp_path: Path, replaced: list[Any]
) -> None:
    called(noxfile.train, tmp_path)
    tests = called(noxfile.test, tmp_path)
    assert tests.installed == {*noxfile.TEST_TOOLS, *noxfile.DOCS_TOOLS}
    assert {command[0] for command in tests.ran} == {str(tmp_path / ".nox/weft/bin/python")}
    for again in (noxfile.train, noxfile.test, noxfile.docs, noxfile.types):
        assert not called(again, tmp_path).installed


def test_a_change_of_what_is_pinned_installs_all_of_it_again(
    noxfile: ModuleType, tmp_path: Path, replaced: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = called(noxfile.test, tmp_path)
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("torch==1.0\n")
    monkeypatch.setattr(noxfile, "CONSTRAINTS", pinned)
    assert called(noxfile.test, tmp_path).installed == first.installed


def test_other_versions_have_an_environment_and_constraints_of_their_own(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile, "CONSTRAINTS", tmp_path / "constraints.txt")
    noxfile.CONSTRAINTS.write_text("numpy==2.4.6\nnvidia-nccl-cu13==2.29.7\npytest==9.1\ntorch==2.13.0\n")
    ran = called(noxfile.test_with, tmp_path, "torch==2.11.0", "numpy<2.4", "tests/mesh", "-k", "a")
    assert (tmp_path / ".nox/with.txt").read_text() == "pytest==9.1\ntorch==2.11.0\nnumpy<2.4\n"
    installs = [command for command in ran.ran if command[1:5] == PIP]
    assert {command[command.index("-c") + 1] for command in installs} == {str(tmp_path / ".nox/with.txt")}
    assert ran.installed >= {"torch", *noxfile.TEST_TOOLS}
    python = str(tmp_path / ".nox/with/bin/python")
    assert ran.ran[-1] == (python, "-m", "pytest", noxfile.TIME_LIMIT, "tests/mesh", "-k", "a")


def test_other_versions_are_asked_for_where_none_is_named(noxfile: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="with which versions"):
        called(noxfile.test_with, tmp_path, "tests/mesh")


@pytest.mark.parametrize("session", COMMANDS)
def test_a_users_command_takes_the_place_of_nox(
    noxfile: ModuleType, tmp_path: Path, replaced: list[Any], monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    monkeypatch.chdir(ROOT)
    called(getattr(noxfile, session), tmp_path, "a b", "--help")
    program, arguments, environment, where = replaced
    assert program == arguments[0] == str(tmp_path / ".nox/weft/bin/python")
    assert arguments[1:] == ("-m", "weft.models.cli", session, "a b", "--help")
    assert environment == {**os.environ, "WEFT_PROGRAM": "./run"}
    assert where == str(tmp_path)
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set()), "heard by `weft`, once it is there"


def test_run_knows_those_that_nox_gives_way_to() -> None:
    source = (ROOT / "noxfile.py").read_text()
    given_way = re.findall(r'_give_way\(session, "(\w+)"\)', source)
    (listed,) = re.findall(r"case \$last in (.*)\) break", (ROOT / "run").read_text())
    assert sorted(listed.split(" | ")) == sorted(given_way)
    assert set(given_way) < nox_sessions(source)
    assert set(given_way) == set(COMMANDS)
