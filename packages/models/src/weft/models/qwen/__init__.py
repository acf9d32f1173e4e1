"""Qwen 2, 2.5 and 3: their config, their model and how it is laid out."""
