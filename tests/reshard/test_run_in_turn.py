"""`run_in_turn` calls functions on threads that are kept."""

from __future__ import annotations

import threading

import pytest
import torch
from weft.reshard.extension import run_in_turn


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
