"""Ops that plain torch computes on every device: their local computation and their layout rules."""

from .sharded import add, pack, sigmoid_gate, unpack

__all__ = ["add", "pack", "sigmoid_gate", "unpack"]
