"""add and sigmoid_gate: the ops, their local computation and their layout rules."""

from .gate import sigmoid_gate
from .sharded import add

__all__ = ["add", "sigmoid_gate"]
