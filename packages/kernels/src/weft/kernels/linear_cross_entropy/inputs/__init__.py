"""The input of a vocab-parallel product."""
