"""Training runs: configuration, data flow of a step, launching of processes, metrics and checkpoints."""
