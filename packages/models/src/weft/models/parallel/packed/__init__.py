"""Context parallelism of packed rows: how documents are cut over the ranks, and which keys the ranks exchange."""
