"""What the ranks of a group gather once, before they gather in chunks."""
