"""Predictions of a step: seconds and bytes on a chip, plans compared, ranks that wait for one another."""
