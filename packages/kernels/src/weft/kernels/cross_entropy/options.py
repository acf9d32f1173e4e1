"""The options of cross-entropy as a value, and the checks of options and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Required, TypedDict

import torch
from torch import Tensor

from ..dispatch.arguments import MOST, described, is_flag, is_int, is_number
from ..dispatch.backend import can_read

REDUCTIONS = ("mean", "sum", "none")
LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FLAGS = ("inplace_backward", "return_lse", "return_z_loss", "return_token_accuracy")
# Options which are numbers: the least, the most, and the words for both.
RANGES = (
    ("label_smoothing", 0, 1, "a share of the target, 0 to 1"),
    ("z_loss", 0, MOST, "a finite factor, 0 or more"),
    ("softcap", math.ulp(0), MOST, "a finite bound above 0, or None for no bound"),
    ("logit_scale", -MOST, MOST, "a finite factor"),
)
TARGET_DTYPES = (torch.int32, torch.int64, torch.uint8)

Reduction = Literal["none", "mean", "sum"]


class LossOptions(TypedDict, total=False):
    """The options of cross-entropy that add no output, for type checkers. `Options` has the defaults."""

    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    inplace_backward: bool


class AllOptions(LossOptions, total=False):
    """All options of cross-entropy."""

    return_lse: bool
    return_z_loss: bool
    return_token_accuracy: bool


class LossTensors(TypedDict, total=False):
    """Tensors that cross-entropy takes beside the options."""

    weight: Tensor | None
    denominator: float | Tensor | None


class LossAlone(LossTensors, LossOptions, total=False):
    """Keyword arguments of a call that returns the loss."""

    return_lse: Literal[False]
    return_z_loss: Literal[False]
    return_token_accuracy: Literal[False]


class LossAndLse(LossTensors, LossOptions, total=False):
    """Keyword arguments of a call that returns the loss and the logsumexp."""

    return_lse: Required[Literal[True]]
    return_z_loss: Literal[False]
    return_token_accuracy: Literal[False]


class AnyOutputs(LossTensors, AllOptions, total=False):
    """Keyword arguments of a call that returns any outputs: the loss, or a tuple that begins with the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a call, explained at `weft.kernels.cross_entropy`. Raises ValueError for a value out of range."""

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
        for name in FLAGS:
            flag = getattr(self, name)
            if flag is not False and not is_flag(flag):
                raise ValueError(f"{name} is {described(flag)}; give True or False")
        if type(self.reduction) is not str or self.reduction not in REDUCTIONS:
            listed = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"reduction is {described(self.reduction)}; choose one of {listed}")
        if type(self.ignore_index) is not int and not is_int(self.ignore_index):
            raise ValueError(
                f"ignore_index is {described(self.ignore_index)}; give an int, negative to ignore no class"
            )
        for name, least, most, wanted in RANGES:
            number = getattr(self, name)  # a symbol in a graph with dynamic sizes
            if number is None and name == "softcap":
                continue
            if not ((type(number) is float or is_number(number)) and least <= number <= most):
                raise ValueError(f"{name} is {described(number)}; give {wanted}")

    def gradient_in_forward(self, dtype: torch.dtype) -> bool:
        """Whether forward can compute the gradient of logits of that dtype, before the upstream gradient arrives.

        The upstream gradient must be a scalar. Not in float16: the gradient of an unscaled loss would underflow, the
        reason why losses are scaled in float16.
        """
        return self.reduction != "none" and not self.return_lse and dtype != torch.float16

    def has_two_weights(self, weight: Tensor | None) -> bool:
        """Whether a token has two weights, for which "mean" needs two denominators.

        In the loss a token has the weight of its class, in the z-loss and the accuracy the weight 1.
        """
        return weight is not None and (self.z_loss > 0 or self.return_token_accuracy)

    @property
    def gives_lse(self) -> bool:
        """Whether an output needs each token's logsumexp."""
        return self.return_lse or self.return_z_loss

    @property
    def columns(self) -> int:
        """The number of columns of the statistics [N, columns] which a shard computes for each row; see `merged.py`."""
        return 3 + 2 * (self.label_smoothing > 0) + self.return_token_accuracy

    @property
    def num_constants(self) -> int:
        """The number of outputs without a gradient, z-loss and accuracy; they are the last outputs."""
        return self.return_z_loss + self.return_token_accuracy

    @property
    def num_outputs(self) -> int:
        """The number of outputs: loss, lse, and the constants."""
        return 1 + self.return_lse + self.num_constants

    def flat(self) -> tuple[Any, ...]:
        """The options as arguments of a custom op, in the order of SCHEMA."""
        return tuple(getattr(self, part.split()[1]) for part in SCHEMA.split(", "))

    @classmethod
    def of_flat(cls, *values: Any) -> Options:
        """The options from arguments of a custom op, in the order of SCHEMA."""
        return cls(**{part.split()[1]: value for part, value in zip(SCHEMA.split(", "), values, strict=True)})


# The options in a custom op's schema. inplace_backward is left out, since torch.compile decides on memory.
SCHEMA = (
    "int ignore_index, str reduction, float label_smoothing, float z_loss, float? softcap, float logit_scale, "
    "bool return_lse, bool return_z_loss, bool return_token_accuracy"
)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The shape, dtype and device of a tensor not computed yet, for linear cross-entropy to check the logits."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check(
    logits: Tensor | TensorForm,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    options: Options,
    vocab_start: int,
    vocab_size: int,
) -> bool:
    """Raise ValueError for tensors cross-entropy cannot take. Called by each forward, before any computation.

    Returns True where the host has read the targets and found every one a class, none ignored; the loss then needs no
    mask and no count of ignored tokens. Values are read on the CPU only: on a GPU the host would have to wait, and a
    target outside the vocabulary makes the loss NaN instead.
    logits: [..., V], of the classes vocab_start to vocab_start + V of a vocabulary of vocab_size.
    """
    if not logits.shape or logits.dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and dtype {logits.dtype}; give [..., classes] in "
            f"{', '.join(str(dtype) for dtype in LOGITS_DTYPES)}"
        )
    if target.dtype not in TARGET_DTYPES or target.shape != logits.shape[:-1]:
        refuse_target(logits.shape, target)
    if weight is not None and (weight.shape != (vocab_size,) or not weight.is_floating_point()):
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} and dtype {weight.dtype}; give one float for each of the "
            f"{vocab_size} classes"
        )
    for name, tensor in (("target", target), ("weight", weight), ("denominator", denominator)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits on {logits.device}; move one to the other")
    if denominator is not None and options.reduction != "mean":
        raise ValueError(f"a denominator with reduction={options.reduction!r}; only 'mean' divides; leave it None")
    if vocab_start < 0:
        raise ValueError(f"vocab_start is {vocab_start}; give the id of this shard's first class, 0 or more")
    if (vocab_stop := vocab_start + logits.shape[-1]) > vocab_size:
        raise ValueError(
            f"logits hold classes {vocab_start} to {vocab_stop} of a vocabulary of {vocab_size}; "
            "give this shard's logits alone, not gathered ones, and the size of the whole vocabulary"
        )
    return can_read(target) and _check_values(target, options.ignore_index, vocab_size)


def check_vocabulary(vocab_start: int, vocab_size: int) -> None:
    """Raise ValueError for a first class and a size of the vocabulary which are no ints."""
    if not is_int(vocab_start):
        raise ValueError(f"vocab_start is {described(vocab_start)}; give the id of this shard's first class, 0 or more")
    if not is_int(vocab_size):
        raise ValueError(f"vocab_size is {described(vocab_size)}; give the number of classes of the whole vocabulary")


def refuse_target(logits: tuple[int, ...], target: Tensor) -> NoReturn:
    """Raise ValueError for a target that does not have one class id for each row of logits of this shape.

    The losses compare the caller's shapes, of DTensors the global shapes, so that every rank raises. `check` compares
    the dtype, and the shapes of this rank's tensors, which need not fit where the global shapes do.
    """
    if target.dtype not in TARGET_DTYPES:
        remedy = "; for probabilities, give target.argmax(-1), or compute (-target * logits.log_softmax(-1)).sum(-1)"
        raise ValueError(
            f"target has dtype {target.dtype} and shape {tuple(target.shape)}, not {', '.join(map(str, TARGET_DTYPES))}"
            f"; give class ids of shape {tuple(logits[:-1])}" + (remedy if target.is_floating_point() else "")
        )
    torchs = len(logits) > 2 and tuple(target.shape) == (*logits[:1], *logits[2:])
    raise ValueError(
        f"target of shape {tuple(target.shape)} for logits of shape {tuple(logits)}; give one class id for each "
        f"row: {tuple(logits[:-1])}, with the classes as the last dim of logits"
        + ("; or class_dim=1 for logits in torch's form, [N, C, ...]" if torchs else "")
    )


def check_contiguous(logits: Tensor, options: Options) -> None:
    """Raise ValueError for inplace_backward with logits whose memory has gaps or is shared among elements."""
    if options.inplace_backward and not logits.is_contiguous():
        raise ValueError(
            f"inplace_backward with logits of shape {tuple(logits.shape)} and strides {logits.stride()}: their memory "
            f"is shared or has gaps; give contiguous logits, or leave inplace_backward off"
        )


def _check_values(target: Tensor, ignore_index: int, vocab_size: int) -> bool:
    if target.numel() == 0:
        return False
    smallest, largest = target.aminmax()
    low, high = smallest.item(), largest.item()
    if low >= 0 and high < vocab_size:
        return not low <= ignore_index <= high
    target = target.long()  # in int32, ignore_index would be truncated to 32 bits
    wrong = ((target < 0) | (target >= vocab_size)) & (target != ignore_index)
    if not bool(wrong.any()):
        return False
    index = tuple(wrong.nonzero()[0].tolist())
    raise ValueError(
        f"target{list(index) or ''} is {int(target[index])}, which is no class of {vocab_size} (0 to {vocab_size - 1})"
        f"; correct it, or use ignore_index ({ignore_index}) for a token without a class"
    )
