"""What a step communicates beside the least that is known, for every family and plan: recorded on shapes, and counted."""

from __future__ import annotations

from benchmarks.conftest import Tell
from benchmarks.least import FAMILIES, ROWS, Amount, compared


def test_least_communication(tell: Tell) -> None:
    """A block each way, and the gradients of a model of one block."""
    print(
        f"\n{'family':8}{'mesh':17}{'plan':32}{'phase':11}{'recorded: collectives, bytes a rank receives':54}least known"
    )
    found = tell.measuring(every_row)
    for (family, where, plan, phase), (recorded, least) in found.items():
        print(f"{family:8}{where:17}{plan:32}{phase:11}{recorded!s:54}{least if recorded != least else 'the same'}")
    for plan in dict.fromkeys(row.name for row in ROWS):
        of_plan = [both for (_, _, name, _), both in found.items() if name == plan]
        collectives, nbytes = (
            max(recorded.kinds.total() / least.kinds.total() for recorded, least in of_plan),
            max(recorded.nbytes / least.nbytes for recorded, least in of_plan),
        )
        tell(
            f"least communication, {plan}", "Weft", "count", collectives_over_least=collectives, bytes_over_least=nbytes
        )
    assert all(recorded == least for recorded, least in found.values())


def every_row() -> dict[tuple[str, str, str, str], tuple[Amount, Amount]]:
    return {
        (family, row.where, row.name, phase): both
        for family in FAMILIES
        for row in ROWS
        for phase, both in compared(family, row).items()
    }
