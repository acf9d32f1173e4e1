"""Benchmarks run on the tests' worker processes."""

from tests.conftest import pool

__all__ = ["pool"]
