"""Cross-entropy of `input @ linear_weight.T`, a chunk of tokens at a time: all logits never exist at once."""

from .sharded import linear_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = ["linear_cross_entropy", "vocab_parallel_linear_cross_entropy"]
