"""Every plan of a space, listed without bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from weft.models.predict.plans import Candidate, Space, check_members


class EveryPlan(NamedTuple):
    """The accepted plans of a space, and the number of refused plans by reason."""

    accepted: list[Candidate]
    refused: Counter[str]


def list_every_plan(space: Space, check: Callable[[Candidate], None]) -> EveryPlan:
    """The members of every family. check: as for `check_members`."""
    found = EveryPlan([], Counter())
    for family in space.families():
        members, refused = check_members(space, family, check)
        assert len(members) + sum(refused.values()) == space.count_members(family)
        assert all(family.complexity <= each.complexity for each in members)
        found.accepted.extend(members)
        found.refused.update(refused)
    return found
