"""Which layouts cross-entropy takes and gives."""
