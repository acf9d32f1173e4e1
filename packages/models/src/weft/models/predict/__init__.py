"""Predicts a training step: seconds and bytes on a chip, the fastest plans, and ranks that wait for ever."""
