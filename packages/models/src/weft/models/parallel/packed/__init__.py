"""Context parallelism of packed rows: the cut of a row by its documents, and the keys that ranks send one another."""
