"""add and sigmoid_gate: the ops, their local computation and their layout rules."""

from .sharded import add, sigmoid_gate

__all__ = ["add", "sigmoid_gate"]
