"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from weft.kernels.random import sharded

from tests.support.draws import drawn_once


@pytest.fixture(scope="module", autouse=True)
def drawn_values() -> Iterator[None]:
    """The models of tests, which are alike, draw equal initial values once, as in the worker processes."""
    with patch.object(sharded, "_fill_normal", drawn_once):
        yield
