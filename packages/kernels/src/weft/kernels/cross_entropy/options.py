"""The options of cross-entropy as a value, and the checks of options and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from ..backend import can_read

REDUCTIONS = ("mean", "sum", "none")
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TARGET_DTYPES = (torch.int32, torch.int64, torch.uint8)


Reduction = Literal["none", "mean", "sum"]


class AskedOfLoss(TypedDict, total=False):
    """The options of cross-entropy as arguments: those that leave it to return the loss alone."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    inplace_backward: bool


class Asked(AskedOfLoss, total=False):
    """All of them."""

    return_lse: bool
    return_z_loss: bool
    return_token_accuracy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """See `weft.kernels.cross_entropy`. Raises ValueError for a value out of range."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    inplace_backward: bool = False
    return_lse: bool = False
    return_z_loss: bool = False
    return_token_accuracy: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {self.reduction!r}; choose one of {', '.join(map(repr, REDUCTIONS))}")
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index is {self.ignore_index!r}; give an int, negative to ignore no class")
        if not 0 <= self.label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing!r}; give a share of the target, 0 to 1")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss is {self.z_loss!r}; give a finite factor, 0 or more")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap is {self.softcap!r}; give a finite bound above 0, or None for no bound")
        if not -math.inf < self.logit_scale < math.inf:  # in a graph with dynamic sizes it is a symbol
            raise ValueError(f"logit_scale is {self.logit_scale!r}; give a finite factor")

    def gradient_in_forward(self, dtype: torch.dtype) -> bool:
        """Whether forward can compute the gradient of logits of that dtype, before the upstream gradient arrives.

        The upstream gradient must be one number. Not in float16: there the gradient of an unscaled loss underflows, which is why
        losses are scaled.
        """
        return self.reduction != "none" and not self.return_lse and dtype != torch.float16

    def weighs_apart(self, weight: Tensor | None) -> bool:
        """Whether one part of a mean has class weights and another has none. z-loss and accuracy have none."""
        return weight is not None and (self.z_loss > 0 or self.return_token_accuracy)

    @property
    def gives_lse(self) -> bool:
        """Whether an output needs each token's logsumexp."""
        return self.return_lse or self.return_z_loss

    @property
    def columns(self) -> int:
        """How many statistics a row has."""
        return 3 + 2 * (self.label_smoothing > 0) + self.return_token_accuracy

    @property
    def constants(self) -> int:
        """How many outputs have no gradient: the last ones."""
        return self.return_z_loss + self.return_token_accuracy

    @property
    def outputs(self) -> int:
        """Loss and lse, and then the constants."""
        return 1 + self.return_lse + self.constants

    def flat(self) -> tuple[Any, ...]:
        """As arguments of a custom op, in the order of SCHEMA."""
        return tuple(getattr(self, part.split()[1]) for part in SCHEMA.split(", "))

    @classmethod
    def of_flat(cls, *values: Any) -> Options:
        """From the arguments of a custom op."""
        return cls(**{part.split()[1]: value for part, value in zip(SCHEMA.split(", "), values, strict=True)})


# Of a custom op. inplace_backward is not among them, since torch.compile decides on memory.
SCHEMA = "int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap, float logit_scale, bool return_lse, bool return_z_loss, bool return_token_accuracy"


@dataclass(frozen=True, slots=True)
class Form:
    """The shape, dtype and device of logits, which need not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form_of(logits: Tensor) -> Form:
    return Form(tuple(logits.shape), logits.dtype, logits.device)


def check(
    logits: Form,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    options: Options,
    vocab_start: int,
    vocab_size: int,
) -> bool:
    """Raises ValueError for tensors that cross-entropy cannot take. Returns whether the host knows that every target is a class
    and none is ignored.

    Target values are checked on the CPU only: elsewhere the host would have to wait for the device. There a target that is no
    class gives a loss of NaN.
    """
    if not logits.shape or logits.dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits of shape {logits.shape} and dtype {logits.dtype}; give [..., classes] in "
            f"{', '.join(str(dtype) for dtype in LOGITS_DTYPES)}"
        )
    check_target(logits.shape, target)
    if weight is not None and (weight.shape != (vocab_size,) or not weight.is_floating_point()):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} and dtype {weight.dtype}; give one float for each of the {vocab_size} "
            f"classes"
        )
    for name, tensor in (("target", target), ("weight", weight), ("denominator", denominator)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}; move one to the other")
    if denominator is not None and options.reduction != "mean":
        raise ValueError(f"a denominator with reduction={options.reduction!r}; only 'mean' divides; leave it None")
    _check_shard(logits.shape[-1], vocab_start, vocab_size)
    return can_read(target) and _check_values(target, options.ignore_index, vocab_size)


def check_target(logits: tuple[int, ...], target: Tensor) -> None:
    """Raises ValueError for a target that is no class id for each row of logits of that shape."""
    if target.dtype not in TARGET_DTYPES:
        remedy = "; probabilities are not taken: of them give target.argmax(-1), or write (-target * logits.log_softmax(-1)).sum(-1)"
        raise ValueError(
            f"target has dtype {target.dtype} and shape {tuple(target.shape)}, not {', '.join(map(str, TARGET_DTYPES))}; give class "
            f"ids of shape {tuple(logits[:-1])}" + (remedy if target.is_floating_point() else "")
        )
    if tuple(target.shape) != tuple(logits[:-1]):
        torchs = len(logits) > 2 and tuple(target.shape) == (*logits[:1], *logits[2:])
        raise ValueError(
            f"target of shape {tuple(target.shape)} for logits of shape {tuple(logits)}; give one class id for each row: "
            f"{tuple(logits[:-1])}, classes being the last dim of logits"
            + ("; or class_dim=1 for logits as torch has them, [N, C, ...]" if torchs else "")
        )


def check_contiguous(logits: Tensor, options: Options) -> None:
    """Raises ValueError for inplace_backward where the memory of the logits has gaps, or is shared by several of them."""
    if options.inplace_backward and not logits.is_contiguous():
        raise ValueError(
            f"inplace_backward with logits of shape {tuple(logits.shape)} and strides {logits.stride()}: their memory is "
            f"shared or has gaps; give contiguous logits, or leave inplace_backward off"
        )


def _check_shard(V: int, vocab_start: int, vocab_size: int) -> None:
    if vocab_start < 0:
        raise ValueError(f"vocab_start is {vocab_start}; give the id of this shard's first class, 0 or more")
    if vocab_start + V > vocab_size:
        raise ValueError(
            f"logits hold classes {vocab_start} to {vocab_start + V} of a vocabulary of {vocab_size}; "
            "give this shard's logits alone, not gathered ones, and the size of the whole vocabulary"
        )


def _check_values(target: Tensor, ignore_index: int, vocab_size: int) -> bool:
    if target.numel() == 0:
        return False
    low, high = (each.item() for each in target.aminmax())
    if low >= 0 and high < vocab_size:
        return not low <= ignore_index <= high
    target = target.long()  # an int32 would be compared with an ignore_index cut to 32 bits
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if not bool(wrong.any()):
        return False
    index = tuple(wrong.nonzero()[0].tolist())
    raise ValueError(
        f"target{list(index) or ''} is {int(target[index])}, which is no class of {vocab_size} (0 to {vocab_size - 1})"
        f"; correct it, or use ignore_index ({ignore_index}) for a token without a class"
    )
