"""How long tests wait before they take a process for hung, and a unit for limits on computing times."""

import time
from collections.abc import Callable

# Seconds: ten times the slowest wait, because other programs may use the cores, too. Less than the limit of a whole
# test in noxfile.py, because a failed wait can name the process that hangs.
PATIENCE = 300.0


def python_seconds() -> float:
    """The processor time of 8,000 rounds of a loop, about a millisecond."""
    start = time.thread_time()
    found: dict[int, tuple[int, int]] = {}
    for number in range(8_000):
        found[number % 97] = (number, len(found))
    return time.thread_time() - start


def python_ratio(compute: Callable[[], object], rounds: int = 5) -> float:
    """The processor time of one call of `compute`, in units of `python_seconds`; the shortest of `rounds` of both.

    The loop is timed beside each call: on a slow or busy machine both take longer. `compute` uses this thread alone.
    """
    times, units = [], []
    for _ in range(rounds):
        start = time.thread_time()
        compute()
        times.append(time.thread_time() - start)
        units.append(python_seconds())
    return min(times) / min(units)
