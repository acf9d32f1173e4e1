"""A target that is no class stops the kernels where Triton is told to debug, and costs nothing otherwise."""

from __future__ import annotations

import pytest

from tests.kernels.assertions import NAMES, compiled
from tests.support.pool import Pool

ASSERTION = "__assertfail"  # the function that PTX calls when an assertion fails


@pytest.mark.exhaustive
def test_the_device_assertion_is_compiled_in_debug_mode_alone():
    with Pool() as fresh:  # whose kernels are not interpreted
        (found,) = fresh.run(compiled, ranks=1)
    assert found.keys() == set(NAMES)
    for plain, debug in found.values():
        assert ASSERTION not in plain
        assert ASSERTION in debug
        assert ", ".join(map(str, b"a target is no class")) in debug  # PTX has strings as numbers
