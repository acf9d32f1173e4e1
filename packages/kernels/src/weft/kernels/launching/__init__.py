"""Launching Triton kernels: as torch ops, with row tiles, ahead of time, and with counted traffic."""
