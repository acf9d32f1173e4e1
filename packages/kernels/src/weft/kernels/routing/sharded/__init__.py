"""The public functions of routing, with their layout rules."""

from .router import route, router_statistics, sequence_load
from .tokens import combine, dispatch, sort_by_expert

__all__ = ["combine", "dispatch", "route", "router_statistics", "sequence_load", "sort_by_expert"]
