"""Training runs: what they are, what they read, how they go."""
