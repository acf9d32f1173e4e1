"""Cross-entropy of logits. Forward reads each logit once; backward reads each once and writes the gradient once."""
