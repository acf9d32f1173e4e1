"""Searches for counterexamples by Hypothesis: a short one in `./run test`, a long one in `./run test_exhaustive`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis.strategies import SearchStrategy


def searched(
    *strategies: SearchStrategy[Any], examples: int = 100
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `hypothesis.given`, as two items: with a tenth of the examples, and, marked exhaustive, with all."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def item(most: int) -> Callable[[], None]:
            return hypothesis.settings(max_examples=most)(hypothesis.given(*strategies)(test))

        @pytest.mark.parametrize(
            "search",
            [
                pytest.param(item(examples // 10), id="few"),
                pytest.param(item(examples), id="many", marks=pytest.mark.exhaustive),
            ],
        )
        def search_for_a_counterexample(search: Callable[[], None]) -> None:
            search()

        search_for_a_counterexample.__doc__ = test.__doc__
        return search_for_a_counterexample

    return decorate
