"""cross_entropy where torch.compile traces it."""
