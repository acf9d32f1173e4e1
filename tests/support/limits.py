"""How long tests wait before they take a process for hung, and a unit for limits on computing times."""

import time

# Seconds: ten times the slowest wait, because other programs may use the cores, too. Less than the limit of a whole
# test in noxfile.py, because a failed wait can name the process that hangs.
PATIENCE = 300.0


def python_seconds() -> float:
    """The processor time of 8,000 rounds of a loop, about a millisecond: a unit for limits on computing times.

    A test measures the unit beside each computation, and compares the shortest or the median of both: on a slow or busy
    machine both take longer.
    """
    start = time.thread_time()
    found: dict[int, tuple[int, int]] = {}
    for number in range(8_000):
        found[number % 97] = (number, len(found))
    return time.thread_time() - start
