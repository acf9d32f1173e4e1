"""Cross-entropy of `input @ linear_weight.T`, computed by chunks of tokens: all logits are never in memory at once."""

from .sharded import linear_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = ["linear_cross_entropy", "vocab_parallel_linear_cross_entropy"]
