"""Experts on a mesh of their own over the model's ranks: their layouts, and how tokens come to them."""
