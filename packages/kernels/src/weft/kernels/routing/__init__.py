"""Mixtures of experts: the choice of experts, tokens sorted by expert and back, and the router's statistics."""

from .sharded import combine, dispatch, route, router_statistics, sequence_load, sort_by_expert

__all__ = ["combine", "dispatch", "route", "router_statistics", "sequence_load", "sort_by_expert"]
