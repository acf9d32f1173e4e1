"""Which layouts linear cross-entropy takes and gives."""
