"""Linear cross-entropy on plain tensors, DTensors and process groups."""

from .loss import linear_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = ["linear_cross_entropy", "vocab_parallel_linear_cross_entropy"]
