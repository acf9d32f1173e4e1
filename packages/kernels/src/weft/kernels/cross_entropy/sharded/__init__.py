"""Cross-entropy on plain tensors, DTensors and process groups."""

from .loss import cross_entropy, vocab_parallel_cross_entropy

__all__ = ["cross_entropy", "vocab_parallel_cross_entropy"]
