"""The ways to compute a loss and its gradients that are timed and weighed against Weft's: torch's, Liger's, Apple's.

A way takes the given sets of operands in turn, call by call; what it returns are the gradients.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.kernels.cross_entropy import function
from weft.kernels.cross_entropy.options import Options

Way = Callable[[], Sequence[Tensor]]
Operands = Sequence[tuple[Tensor, ...]]
SHARDS = 8


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _in_turn(call: Callable[..., Sequence[Tensor]], operands: Operands) -> Way:
    turns = itertools.cycle(operands)
    return lambda: call(*next(turns))


def _backward_of(loss: Callable[..., Any], operands: Operands) -> Way:
    """Forward and backward, the gradients left to whoever wants them."""

    def gradients(*tensors: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(loss(*tensors), [tensor for tensor in tensors if tensor.requires_grad])

    return _in_turn(gradients, operands)


def of_logits(operands: Operands) -> tuple[dict[str, Way], list[str]]:
    """Ways to the gradient of a mean cross-entropy of logits [N, V], and the names of those that are not installed."""
    ways = {
        "Weft": _backward_of(cross_entropy, operands),
        "eager torch": _backward_of(_eager, operands),
        "eager torch, again": _backward_of(_eager, operands),
        "torch.compile": _backward_of(torch.compile(_eager, dynamic=False), operands),
    }
    if not importlib.util.find_spec("liger_kernel"):
        return ways, ["Liger"]
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def liger(logits: Tensor, target: Tensor) -> Tensor:
        # It writes the gradient over the logits, which are the others' too.
        return LigerCrossEntropyFunction.apply(logits.clone(), target, None)[0]

    return ways | {"Liger, and a copy of the logits": _backward_of(liger, operands)}, []


def of_a_shard(operands: Operands) -> dict[str, Way]:
    """The two kernels of one of SHARDS shards, the gather left out."""
    options, size = Options(), SHARDS * operands[0][0].shape[1]
    upstream = torch.ones((), device=operands[0][0].device)

    def gradients(logits: Tensor, target: Tensor) -> Sequence[Tensor]:
        _, saved = function.forward(logits, target, options=options, vocab_size=size)
        dlogits = function.backward(saved, (upstream,), (True, False, False, False), options=options, vocab_size=size)
        return [each for each in dlogits if each is not None]

    return {"Weft, one shard": _in_turn(gradients, operands)}


def of_products(operands: Operands) -> tuple[dict[str, Way], list[str]]:
    """Ways to both gradients of a mean linear cross-entropy of x, weight and target, and the names of those not installed."""

    def given_away(*tensors: Tensor) -> Any:
        return linear_cross_entropy(*tensors, inplace_backward=True)

    ways = {
        "Weft": _backward_of(linear_cross_entropy, operands),
        "Weft, inplace_backward": _backward_of(given_away, operands),
    }
    absent = []
    if hasattr(F, "linear_cross_entropy"):
        chunked = torch.nn.LinearCrossEntropyOptions()

        def of_torch(*tensors: Tensor) -> Tensor:
            return F.linear_cross_entropy(*tensors, options=chunked)

        ways["torch, chunked"] = _backward_of(of_torch, operands)
    else:
        absent.append("torch, chunked")
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]

        ways["Liger"] = _backward_of(liger, operands)
    else:
        absent.append("Liger")
    if importlib.util.find_spec("cut_cross_entropy"):
        import cut_cross_entropy

        ways["CCE"] = _backward_of(cut_cross_entropy.linear_cross_entropy, operands)
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

    def way() -> Sequence[Tensor]:
        torch.mm(x, weight.mT, out=logits)
        torch.mm(scores, weight, out=dx)
        torch.mm(scores.mT, x, out=dweight)
        return []  # they are kept from call to call

    return way
