"""A training step under any plan: its gradients, its communication and memory as predicted, and gradient clipping."""
