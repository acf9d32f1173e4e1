"""Pipelines: schedules as values, a model cut into stages, and what runs them."""
