"""Digests of a run's tensors, and the comparison of two runs' digests: rounding, or a bug."""
