"""How ops run on plain tensors and on DTensors: backend, autocast, recomputation and sharded calls."""
