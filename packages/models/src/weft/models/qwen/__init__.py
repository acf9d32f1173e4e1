"""Qwen 2, 2.5 and 3."""
