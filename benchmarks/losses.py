"""Ways to compute a loss and the gradients: Weft's, torch's, Liger's and Apple's, to compare times and memory.

Each call of a way takes the next of the given sets of operands.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.kernels.cross_entropy import function
from weft.kernels.cross_entropy.options import Options

from benchmarks.failures import Failures
from benchmarks.record import ours

Operands = Sequence[tuple[Tensor, ...]]
SHARDS = 8
EAGER, AGAIN = "eager torch", "eager torch, again"
FLOAT32 = "Weft, float32 gradient"


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a call of a way."""

    loss: Tensor  # a scalar; for `of_a_shard` the shard's statistics, [N, 3]
    gradients: Sequence[Tensor]  # of the operands which require a gradient, in the operands' order


Way = Callable[[], Made]


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to compute a case, by name."""

    made: dict[str, Way] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)  # ways whose package is not installed
    failed: Failures = field(default_factory=Failures)  # the reason of each failed way

    def add(self, name: str, operands: Operands, make: Callable[[], Callable[..., Tensor]], package: str = "") -> None:
        """Adds a way.

        make: imports the package and returns the loss, a function of a set of operands. package: required by `make`.
        """
        with self.failed.of(name):
            if package and not importlib.util.find_spec(package):
                self.absent.append(name)
            else:
                self.made[name] = _backward_of(make(), operands)


def may_be_captured(name: str) -> bool:
    """Whether a CUDA graph can capture the way: the host must not wait for the device, as it does in Liger."""
    return ours(name) or name in (EAGER, AGAIN)


def of_logits(operands: Operands) -> Ways:
    """Ways to compute a mean cross-entropy of logits [N, V], and the gradient of the logits."""
    ways = Ways()
    ways.add("Weft", operands, lambda: cross_entropy)
    for name in (EAGER, AGAIN):
        ways.add(name, operands, lambda: _eager)
    ways.add("torch.compile", operands, lambda: torch.compile(_eager, dynamic=False))
    ways.add("Liger, and a copy of the logits", operands, _liger, package="liger_kernel")
    return ways


def of_a_shard(operands: Operands) -> Ways:
    """Weft's kernels for the first of SHARDS shards, without the gather.

    The other shards' statistics count as adding nothing.
    """
    classes = operands[0][0].shape[1]
    options, size = Options(), SHARDS * classes + SHARDS - 1  # the last shards may hold a class less
    upstream = torch.ones((), device=operands[0][0].device)

    def made(logits: Tensor, target: Tensor) -> Made:
        kept: list[Tensor] = []

        def gather(statistics: Tensor) -> Callable[[], Tensor]:
            kept.append(statistics)
            return lambda: statistics.unsqueeze(0)

        _, saved = function.forward(logits, target, options=options, vocab_size=size, gather=gather)
        found = function.backward(
            saved, (upstream,), (True, False, False, False), options=options, vocab_size=size, gather=gather
        )
        return Made(kept[0], [each for each in found if each is not None])

    return Ways({"Weft, one shard": _in_turn(made, operands)})


def of_products(operands: Operands) -> Ways:
    """Ways to compute a mean linear cross-entropy of x, weight and target, and both gradients."""
    ways = Ways()
    ways.add("Weft", operands, lambda: linear_cross_entropy)
    ways.add(FLOAT32, [_with_float32_gradient(*each) for each in operands], lambda: linear_cross_entropy)
    for name in (EAGER, AGAIN):
        ways.add(name, operands, lambda: _eager_linear)
    ways.add("torch.compile", operands, lambda: torch.compile(_eager_linear, dynamic=False))
    if hasattr(F, "linear_cross_entropy"):
        ways.add("torch, chunked", operands, _chunked)
    else:
        ways.absent.append("torch, chunked")
    ways.add("Liger", operands, _liger_linear, package="liger_kernel")
    ways.add("CCE", operands, _cce, package="cut_cross_entropy")
    # CCE skips the gradients of unlikely classes. At the start of training all classes are unlikely.
    ways.add("CCE, unfiltered", operands, lambda: _cce(filter_eps=None), package="cut_cross_entropy")
    return ways


def three_gemms(x: Tensor, weight: Tensor) -> Callable[[], object]:
    """The three GEMMs which every linear cross-entropy needs.

    The GEMMs compute the logits, and the products of the logits' gradient with both factors.
    """
    x, weight = x.detach(), weight.detach()
    logits = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    torch.mm(x, weight.mT, out=logits)
    scores = logits / logits.shape[1] ** 0.5  # random data: with zeros, a GPU draws less power and runs faster
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)

    def way() -> None:
        torch.mm(x, weight.mT, out=logits)
        torch.mm(scores, weight, out=dx)
        torch.mm(scores.mT, x, out=dweight)

    return way


def copying(sources: Sequence[Tensor]) -> Callable[[], object]:
    """Copies the sources in turn, one source a call, into memory allocated in advance."""
    turns = itertools.cycle([(source, torch.empty_like(source)) for source in sources])

    def way() -> None:
        source, copy = next(turns)
        copy.copy_(source)

    return way


def _in_turn(call: Callable[..., Made], operands: Operands) -> Way:
    turns = itertools.cycle(operands)
    return lambda: call(*next(turns))


def _backward_of(loss: Callable[..., Tensor], operands: Operands) -> Way:
    """A way which runs forward and backward, and returns the gradients instead of accumulating them in `.grad`."""

    def made(*tensors: Tensor) -> Made:
        found = loss(*tensors)
        return Made(found.detach(), torch.autograd.grad(found, [each for each in tensors if each.requires_grad]))

    return _in_turn(made, operands)


def _eager(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def _eager_linear(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _eager(F.linear(x, weight), target)


def _with_float32_gradient(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """The operands with a new leaf on the weight's memory, whose `grad_dtype` is float32."""
    leaf = weight.detach().requires_grad_()
    leaf.grad_dtype = torch.float32
    return x, leaf, target


def _chunked() -> Callable[..., Tensor]:
    chunked = torch.nn.LinearCrossEntropyOptions()
    return lambda *tensors: F.linear_cross_entropy(*tensors, options=chunked)


def _liger() -> Callable[..., Tensor]:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def liger(logits: Tensor, target: Tensor) -> Tensor:
        # Liger overwrites the logits with the gradient, and other ways still need the logits.
        loss: Tensor = LigerCrossEntropyFunction.apply(logits.clone(), target, None)[0]
        return loss

    return liger


def _liger_linear() -> Callable[..., Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]
        return loss

    return liger


def _cce(**options: Any) -> Callable[..., Tensor]:
    import cut_cross_entropy

    def cce(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = cut_cross_entropy.linear_cross_entropy(x, weight, target, **options)
        return loss

    return cce
