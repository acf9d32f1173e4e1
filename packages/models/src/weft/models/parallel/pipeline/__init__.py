"""A model cut into stages, and what runs them."""
