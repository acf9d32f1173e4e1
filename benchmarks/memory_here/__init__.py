"""Predicted memory beside the memory of real processes on this machine."""
