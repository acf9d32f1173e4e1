"""`run_in_turn` calls functions on threads that are kept."""

from __future__ import annotations

import threading

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.reshard.extension import run_in_turn
from weft.reshard.world.folded import Fold, FoldedGroup


def test_the_threads_are_kept() -> None:
    first, second = (run_in_turn([threading.get_ident] * 3) for _ in range(2))
    assert set(first) == set(second)
    assert len(set(first)) == 3


def test_a_kept_thread_computes_with_the_callers_number_of_threads() -> None:
    before = torch.get_num_threads()
    run_in_turn([torch.get_num_threads] * 2)
    try:
        torch.set_num_threads(before + 1)
        assert run_in_turn([torch.get_num_threads] * 2) == [before + 1] * 2
    finally:
        torch.set_num_threads(before)
    assert run_in_turn([torch.get_num_threads] * 2) == [before] * 2


def test_the_threads_go_on_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("of one function")

    with pytest.raises(ValueError, match="of one function"):
        run_in_turn([fail, threading.get_ident])
    assert len(set(run_in_turn([threading.get_ident] * 2))) == 2


def meet(member: int) -> torch.Tensor:
    """A meeting of two members of "dp", both on this rank."""
    group = FoldedGroup(None, ("dp",), Fold(ProcessMesh.grid(dp=1), (2,)), (member,))
    return group.meet(torch.ones(()), sum)


def test_members_of_a_group_meet() -> None:
    assert [int(each) for each in run_in_turn([lambda: meet(0), lambda: meet(1)])] == [2, 2]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_error_is_that_of_the_function_that_failed_not_of_those_that_waited(failing: int) -> None:
    def fail() -> torch.Tensor:
        raise ValueError("of one function")

    with pytest.raises(ValueError, match="of one function"):
        run_in_turn([fail if member == failing else lambda member=member: meet(member) for member in range(2)])


def test_a_member_that_never_comes_is_named_as_the_fault() -> None:
    """The first waits for a collective that the second does not run, and the second ends."""
    with pytest.raises(RuntimeError, match="wait for different collectives"):
        run_in_turn([lambda: meet(0), lambda: torch.ones(())])
