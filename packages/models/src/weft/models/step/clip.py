"""Gradient clipping over a whole model, cut into pipeline stages or not. Called by `find_gradients`."""

from __future__ import annotations

import math

from torch import Tensor, nn
from weft.reshard import clip_grad_norm_

from ..parallel.parallelize import pipeline_of


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm` over the whole model; return the norm before scaling.

    max_norm: 0 means no scaling, as in Megatron, nanoGPT and transformers.
    The norm is a scalar. Communication and errors: as `clip_grad_norm_`, called with all parameters requiring
    gradients.
    Under pipeline parallelism each rank passes the parameters of the local stages; a parameter shared by several
    stages counts on the first stage only.
    """
    max_norm = max_norm or math.inf
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    pipeline = pipeline_of(model)
    if pipeline is None:
        return clip_grad_norm_(trained.values(), max_norm)
    copies = [parameter for name, parameter in trained.items() if not pipeline.is_counted_here(name)]
    return clip_grad_norm_(trained.values(), max_norm, mesh=pipeline.mesh, copies=copies)
