"""Cross-entropy of logits: each logit is read once in forward, read once and written once in backward."""
