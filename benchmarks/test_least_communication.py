"""Compares a step's recorded communication with the least known, for every family and plan, on shapes without data."""

from __future__ import annotations

import math

from benchmarks.conftest import Tell
from benchmarks.least import FAMILIES, PARTS, ROWS, Amount, compared

Found = dict[tuple[str, str, str, str], tuple[Amount, Amount]]  # keyed by mesh, plan, part of the step and family


def test_least_communication(tell: Tell) -> None:
    """Compares a block and the "ends" (embedding, head, loss), in forward and backward; and a block's gradients."""
    found = tell.measuring(every_row)
    print(
        f"\n{'mesh':17}{'plan':33}{'part':17}{'family':24}{'recorded: collectives, bytes a rank receives':58}"
        "least known"
    )
    for (where, plan, part, recorded, least), families in alike(found).items():
        whose = "all" if len(families) == len(FAMILIES) else ", ".join(families)
        print(f"{where:17}{plan:33}{part:17}{whose:24}{recorded:58}{least}")
    for plan in dict.fromkeys(row.name for row in ROWS):
        of_plan = [both for (_, name, _, _), both in found.items() if name == plan]
        collectives, nbytes = (
            max(over(recorded.kinds.total(), least.kinds.total()) for recorded, least in of_plan),
            max(over(recorded.nbytes, least.nbytes) for recorded, least in of_plan),
        )
        tell(
            f"least communication, {plan}", "Weft", "count", collectives_over_least=collectives, bytes_over_least=nbytes
        )
    assert all(recorded == least for recorded, least in found.values())


def every_row() -> Found:
    each = {(row.where, row.name): {family: compared(family, row) for family in FAMILIES} for row in ROWS}
    return {
        (*of_row, part, family): parts[part]
        for of_row, families in each.items()
        for part in PARTS
        for family, parts in families.items()
    }


def alike(found: Found) -> dict[tuple[str, str, str, str, str], list[str]]:
    """The lines of the table, and the families with the numbers of each line.

    Parts without communication, recorded or needed, are left out.
    """
    families: dict[tuple[str, str, str, str, str], list[str]] = {}
    for (where, plan, part, family), (recorded, least) in found.items():
        if recorded.kinds or least.kinds:
            told = "the same" if recorded == least else str(least)
            families.setdefault((where, plan, part, str(recorded), told), []).append(family)
    return families


def over(recorded: float, least: float) -> float:
    """recorded / least; 1 if both are 0."""
    if not least:
        return math.inf if recorded else 1.0
    return recorded / least
