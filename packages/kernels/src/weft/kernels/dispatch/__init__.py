"""How an op runs on plain tensors and on DTensors: backend, autocast, recomputation and sharded calls, shared by all ops."""
