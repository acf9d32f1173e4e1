"""cross_entropy on plain tensors and DTensors; vocab-parallel where the logits are sharded on the vocabulary."""

from __future__ import annotations

import math
from typing import Any, Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...backend import can_read, has_data
from ...sharded import apply_many, autocasts
from ...sharded.traced import groups_of
from .. import agreement
from ..agreement import Classes
from ..custom_ops import Place
from ..guess import Once
from ..options import Asked, AskedOfLoss, Form, Options, Reduction, check, check_contiguous, check_target, form_of
from .gather import attempted
from .layouts import CROSS_ENTROPY, local_denominator
from .traced import compiled


@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_dim: int = -1,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: Literal[False] = False,
    return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False,
    **options: Unpack[AskedOfLoss],
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_dim: int = -1,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: Literal[True],
    return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False,
    **options: Unpack[AskedOfLoss],
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_dim: int = -1,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    return_z_loss: Literal[True],
    return_token_accuracy: bool = False,
    **options: Unpack[AskedOfLoss],
) -> tuple[Tensor, ...]: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_dim: int = -1,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: Literal[True],
    **options: Unpack[AskedOfLoss],
) -> tuple[Tensor, ...]: ...
@overload
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    class_dim: int = -1,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    **options: Unpack[AskedOfLoss],
) -> Tensor | tuple[Tensor, ...]: ...
@autocasts("cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    class_dim: int = -1,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    denominator: float | Tensor | None = None,
    inplace_backward: bool = False,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Cross-entropy of logits [..., V], whose last dim is the classes, against class ids [...].

    Otherwise it means what `torch.nn.functional.cross_entropy` means. class_dim: another dim of the logits that is the classes: 1
    for logits as torch has them, [N, V, ...]. target: of int64, int32 or uint8. Returns float32 (float64 for float64 logits):
    [...] for "none", a scalar otherwise; a tuple where more is asked for, in this order:
    return_lse: the logsumexp of each token [...], differentiable, 0 where ignored.
    return_z_loss: the z-loss that is part of the loss, reduced as the loss is; without a gradient.
    return_token_accuracy: 1 for each token whose class has the largest logit, the first of several as torch.argmax has it, else
    0; reduced as the loss is, "mean" being over the tokens that are not ignored, or over denominator; without a gradient.
    The logits' gradient is within a unit in the last place of their dtype; with labels smoothed, of what is subtracted there;
    float32 with a softcap or scale no better than float32 arithmetic.
    weight: [V], of each class. label_smoothing: the share of the target that is spread over all classes.
    logit_scale, softcap: a logit x counts as cap * tanh(scale * x / cap), without a cap as scale * x.
    z_loss: adds z_loss * logsumexp(logits)**2 to each token's loss (Chowdhery et al. 2022, section 5). It has no class: "mean"
    without a denominator divides it by the number of tokens, also where the classes have weights.
    denominator: what "mean" divides by, in place of the weights of the tokens that are not ignored; give the global count
    where tokens are sharded, and nothing needs to be counted.
    inplace_backward: the gradient takes the memory of the logits, which must be contiguous and no leaf; whoever saved them
    for another backward, and a second backward, get autograd's error. Without it the gradient of a scalar loss is made in
    forward where it can be (by one shard of all classes), for the upstream gradient that is to be expected.
    Layouts: logits sharded on the vocabulary make it vocab-parallel, uneven and empty shards included; tokens sharded as
    the target is shard the loss ("none") or leave it Partial(sum). The weight is replicated.
    Communication: where the vocabulary is sharded, one all-gather of 12 bytes per token and rank in forward (4 more with label
    smoothing, and with the accuracy), none in backward; for "mean" without a denominator, one all-reduce of a number or two over the axes that
    shard the tokens. Over several axes of a mesh that is not the whole world, one an axis, since not all are there to make their group.
    The host waits for no device.
    torch.compile(fullgraph=True) takes it as one node of the graph.
    Raises ValueError for shapes, dtypes, options and targets that do not fit; LayoutError for layouts that do not.
    """
    if not -logits.ndim <= class_dim < logits.ndim:
        raise ValueError(
            f"class_dim is {class_dim} for logits of shape {tuple(logits.shape)}; give the dim of the classes"
        )
    if class_dim not in (-1, logits.ndim - 1):
        logits = logits.movedim(class_dim, -1)
    check_target(logits.shape, target)
    options = Options(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
        logit_scale=logit_scale, inplace_backward=inplace_backward, return_lse=return_lse, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
    )  # fmt: skip
    check_not_leaf(logits, options)
    operands = (logits, target, weight, as_denominator(denominator, weight, form_of(logits)))
    if torch.compiler.is_compiling():
        outputs = _asked(compiled(*operands, options=options, place=Place(groups=groups_of(*operands))), options)
    else:
        outputs = apply_many(CROSS_ENTROPY, *operands, options=options, once=_once(logits, options))
    return outputs if len(outputs) > 1 else outputs[0]


def _asked(compiled: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    """Compiled, the lse is always among the outputs."""
    loss, lse, *constants = compiled
    return (loss, lse, *constants) if options.return_lse else (loss, *constants)


def _once(logits: Tensor, options: Options) -> Once | None:
    """Where forward may make the gradient: in memory of its own, since others may read the logits before backward."""
    wanted = torch.is_grad_enabled() and logits.requires_grad and has_data(logits)
    return Once() if wanted and not options.inplace_backward and options.made_ahead(logits.dtype) else None


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: Literal[False] = False,
    return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False,
    **options: Unpack[AskedOfLoss],
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: Literal[True],
    return_z_loss: Literal[False] = False,
    return_token_accuracy: Literal[False] = False,
    **options: Unpack[AskedOfLoss],
) -> tuple[Tensor, Tensor]: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    return_z_loss: Literal[True],
    return_token_accuracy: bool = False,
    **options: Unpack[AskedOfLoss],
) -> tuple[Tensor, ...]: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: Literal[True],
    **options: Unpack[AskedOfLoss],
) -> tuple[Tensor, ...]: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    return_lse: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    **options: Unpack[AskedOfLoss],
) -> Tensor | tuple[Tensor, ...]: ...
@autocasts("cross_entropy")
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **options: Unpack[Asked],
) -> Tensor | tuple[Tensor, ...]:
    """`cross_entropy` of local tensors, for programs that hold process groups and no layouts.

    logits: [..., V], of the classes vocab_start to vocab_start + V of vocab_size; V may differ between ranks and be 0.
    target, weight: as there, of all classes and the same on every rank. options: as there; a mean counts these tokens.
    Every rank of the group gets the loss, bitwise the same, and the gradient of its own logits.
    Communication: one all-gather over `group`, of 12 bytes per token and rank (4 more with label smoothing, and with the accuracy) and twice as many once;
    none in backward. torch.compile(fullgraph=True) takes it as one node of the graph.
    Raises ValueError as `cross_entropy` does, on every rank of the group where one cannot go on, or where the ranks' classes
    are not each of the vocabulary once: gathered logits, for one. On a GPU the classes are compared when a group and sizes are
    first met, and the loss is NaN where they do not fit later, or another rank cannot go on: the host waits for no device.
    The number of tokens, label_smoothing and float64 logits decide how many bytes a rank gathers, and are not compared: there
    is no smaller gather before. Where they differ between ranks, the backend fails as it does for any such gather; with
    TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares them first, and every rank raises RuntimeError with the numbers of elements.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; call this on its ranks alone")
    if torch.compiler.is_compiling():
        _check_local(logits, target)
        asked, scalar = Options(**options), as_denominator(denominator, weight, form_of(logits))
        place = Place(vocab_start, vocab_size, [group.group_name], checked=True)
        outputs = _asked(compiled(logits, target, weight, scalar, options=asked, place=place), asked)
        return outputs if len(outputs) > 1 else outputs[0]

    def attempt() -> tuple[Options, Tensor | None]:
        _check_local(logits, target)
        asked, scalar = Options(**options), as_denominator(denominator, weight, form_of(logits))
        check_not_leaf(logits, asked)
        check_contiguous(logits, asked)
        check(form_of(logits), target, weight, scalar, asked, vocab_start, vocab_size)
        return asked, scalar

    held = Classes(vocab_start, logits.shape[-1] if logits.ndim else 0, vocab_size)
    columns = 3 + bool(options.get("label_smoothing")) + bool(options.get("return_token_accuracy"))
    (asked, scalar), gather = attempted(attempt, group, held, lambda: agreement.stand_in(target, logits, columns))
    outputs = apply_many(
        CROSS_ENTROPY, logits, target, weight, scalar,
        options=asked, vocab_start=vocab_start, vocab_size=vocab_size, gather=gather,
    )  # fmt: skip
    return outputs if len(outputs) > 1 else outputs[0]


def _check_local(*tensors: Tensor) -> None:
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise ValueError("vocab_parallel_cross_entropy takes local tensors; give DTensors to cross_entropy")


def as_denominator(denominator: float | Tensor | None, weight: Tensor | None, logits: Form) -> Tensor | None:
    """A number as a tensor on the logits' device, which no host has to wait for.

    Raises ValueError for what is no number to divide by, or where a gradient of it or of the weight is expected; LayoutError
    for a DTensor that is not whole on every rank.
    """
    for name, tensor in (("denominator", denominator), ("weight", weight)):
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"the {name} requires a gradient, and cross-entropy has none for it; give {name}.detach()")
    if denominator is None:
        return None
    if isinstance(denominator, DTensor) and not torch.compiler.is_compiling():  # which takes it apart later
        denominator = local_denominator(denominator)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1:
            raise ValueError(f"denominator has shape {tuple(denominator.shape)}; give one number")
        if can_read(denominator):
            number = _check_divisor(denominator)
            if denominator.device != logits.device:  # a copy from the host would wait
                denominator = torch.full((), number, dtype=wide, device=logits.device)
        return denominator.reshape(()).to(dtype=wide, device=logits.device)
    return torch.full((), _check_divisor(denominator), dtype=wide, device=logits.device)


def _check_divisor(denominator: Any) -> float:
    try:
        number = float(denominator)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"denominator is {denominator!r}; give a number, the count of tokens over all ranks")
    return number


def check_not_leaf(logits: Tensor, options: Options) -> None:
    """Raises ValueError for a gradient in the memory of a parameter: logits that are a leaf, or a view of one."""
    if not options.inplace_backward or torch.compiler.is_compiling():  # compiled, it is not done in place
        return
    node, leaf = logits.grad_fn, logits if logits.is_leaf and logits.requires_grad else None
    while node is not None and leaf is None:  # up to where several tensors meet, in memory of its own
        leaf = getattr(node, "variable", None)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    if leaf is not None and _memory(leaf) == _memory(logits):
        raise ValueError("inplace_backward would overwrite logits that are a leaf; use it on the output of an op")


def _memory(tensor: Tensor) -> int:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
