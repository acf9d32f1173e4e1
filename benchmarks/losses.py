"""The ways to compute a loss and its gradients that are timed and weighed against Weft's: torch's, Liger's, Apple's."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.kernels.cross_entropy import function
from weft.kernels.cross_entropy.options import Options

Way = Callable[[], object]
SHARDS = 8


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _backward_of(loss: Callable[..., Any], *tensors: Tensor) -> Way:
    """Forward and backward, the gradients left to whoever wants them."""
    leaves = [tensor for tensor in tensors if tensor.requires_grad]

    def way() -> list[Tensor]:
        return list(torch.autograd.grad(loss(*tensors), leaves))

    return way


def of_logits(logits: Tensor, target: Tensor) -> tuple[dict[str, Way], list[str]]:
    """Ways to the gradient of a mean cross-entropy of logits [N, V], and the names of those that are not installed."""
    ways = {
        "Weft": _backward_of(cross_entropy, logits, target),
        "eager torch": _backward_of(_eager, logits, target),
        "eager torch, again": _backward_of(_eager, logits, target),
        "torch.compile": _backward_of(torch.compile(_eager), logits, target),
    }
    if not importlib.util.find_spec("liger_kernel"):
        return ways, ["Liger"]
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def liger(logits: Tensor, target: Tensor) -> Tensor:
        # It writes the gradient over the logits, which are the others' too.
        return LigerCrossEntropyFunction.apply(logits.clone(), target, None)[0]

    return ways | {"Liger, and a copy of the logits": _backward_of(liger, logits, target)}, []


def of_a_shard(logits: Tensor, target: Tensor) -> dict[str, Way]:
    """The two kernels of one of SHARDS shards, the gather left out."""
    options, size = Options(), SHARDS * logits.shape[1]
    upstream = torch.ones((), device=logits.device)

    def way() -> object:
        _, saved = function.forward(logits, target, options=options, vocab_size=size)
        return function.backward(saved, (upstream,), (True, False, False, False), options=options, vocab_size=size)

    return {"Weft, one shard": way}


def of_products(x: Tensor, weight: Tensor, target: Tensor) -> tuple[dict[str, Way], list[str]]:
    """Ways to both gradients of a mean linear cross-entropy, and the names of those that are not installed."""

    def given_away(*tensors: Tensor) -> Any:
        return linear_cross_entropy(*tensors, inplace_backward=True)

    ways = {
        "Weft": _backward_of(linear_cross_entropy, x, weight, target),
        "Weft, inplace_backward": _backward_of(given_away, x, weight, target),
    }
    absent = []
    if hasattr(F, "linear_cross_entropy"):
        chunked = torch.nn.LinearCrossEntropyOptions()

        def of_torch(*tensors: Tensor) -> Tensor:
            return F.linear_cross_entropy(*tensors, options=chunked)

        ways["torch, chunked"] = _backward_of(of_torch, x, weight, target)
    else:
        absent.append("torch, chunked")
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]

        ways["Liger"] = _backward_of(liger, x, weight, target)
    else:
        absent.append("Liger")
    if importlib.util.find_spec("cut_cross_entropy"):
        import cut_cross_entropy

        ways["CCE"] = _backward_of(cut_cross_entropy.linear_cross_entropy, x, weight, target)
    else:
        absent.append("CCE")
    return ways, absent


def three_gemms(x: Tensor, weight: Tensor) -> Way:
    """What no linear cross-entropy does without: the logits, and the products of their gradient with both factors."""
    x, weight = x.detach(), weight.detach()
    logits = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    torch.mm(x, weight.mT, out=logits)
    scores = logits / logits.shape[1] ** 0.5  # random data: on zeros a GPU draws less power and runs faster
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def way() -> None:
        torch.mm(x, weight.mT, out=logits)
        torch.mm(scores, weight, out=dx)
        torch.mm(scores.mT, x, out=dweight)

    return way
