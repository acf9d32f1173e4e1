"""Ops for large models, on plain tensors and on DTensors by their layout."""

from .attention import attention
from .cross_entropy.sharded import cross_entropy, vocab_parallel_cross_entropy
from .dropout import dropout
from .elementwise import add
from .embedding import embedding
from .linear_cross_entropy import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from .matmul import linear
from .norm import rms_norm
from .random import normal, uniform
from .rope import rope
from .swiglu import swiglu

__all__ = [
    "add",
    "attention",
    "cross_entropy",
    "dropout",
    "embedding",
    "linear",
    "linear_cross_entropy",
    "normal",
    "rms_norm",
    "rope",
    "swiglu",
    "uniform",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
