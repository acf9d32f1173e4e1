"""Ops for large models, on plain tensors and on DTensors by their layout."""

from typing import TYPE_CHECKING

from weft.mesh.extension import version_of

from .attention import KeyValueCache, attention, document_bounds
from .cross_entropy.sharded import cross_entropy, vocab_parallel_cross_entropy
from .dropout import dropout
from .embedding import embedding
from .experts import experts
from .grouped_matmul import grouped_matmul
from .layer_norm import add_layer_norm, layer_norm
from .linear_cross_entropy import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from .local import on_local_tensors
from .matmul import all_gather_matmul, linear, matmul, matmul_reduce_scatter
from .plain import add, sigmoid_gate
from .projections import qkv_linear, swiglu_linear
from .random import normal, uniform
from .rms_norm import add_rms_norm, rms_norm
from .rope import rms_norm_rope, rope, rope_tables
from .routing import combine, dispatch, route, router_statistics, sequence_load
from .swiglu import geglu, gelu, swiglu

__all__ = [
    "KeyValueCache",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "all_gather_matmul",
    "attention",
    "combine",
    "cross_entropy",
    "dispatch",
    "document_bounds",
    "dropout",
    "embedding",
    "experts",
    "geglu",
    "gelu",
    "grouped_matmul",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "matmul_reduce_scatter",
    "normal",
    "on_local_tensors",
    "qkv_linear",
    "rms_norm",
    "rms_norm_rope",
    "rope",
    "rope_tables",
    "route",
    "router_statistics",
    "sequence_load",
    "sigmoid_gate",
    "swiglu",
    "swiglu_linear",
    "uniform",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

__version__: str
if not TYPE_CHECKING:  # type checkers would accept any attribute of a module with a __getattr__
    __getattr__ = version_of(__name__)
