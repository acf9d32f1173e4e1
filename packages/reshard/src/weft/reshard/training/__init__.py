"""Gradients and parameters of a training step: gradient buckets, gathered parameters (ZeRO), clipping."""
