"""How the statistics of all shards of the vocabulary come together."""
