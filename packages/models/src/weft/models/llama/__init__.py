"""Llama: its config, its model and how it is laid out."""
