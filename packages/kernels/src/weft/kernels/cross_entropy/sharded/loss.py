"""`cross_entropy` on plain tensors and DTensors, and `vocab_parallel_cross_entropy` on process groups."""

from __future__ import annotations

from typing import Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...dispatch.arguments import MOST, check_tensors, described, is_int, is_number
from ...dispatch.backend import can_read, has_data, is_compiling
from ...dispatch.sharded import apply_many, autocasts
from ...dispatch.sharded.compiled import groups_of
from ..options import (
    AllOptions,
    AnyOutputs,
    LossAlone,
    LossAndLse,
    Options,
    Reduction,
    TensorForm,
    check,
    check_contiguous,
    check_vocabulary,
    refuse_target,
)
from .custom_ops import VocabShard, apply_custom_op
from .gather import ShardClasses, check_group, placeholder_statistics, run_or_report
from .layout_rule import CROSS_ENTROPY, local_denominator


@overload
def cross_entropy(logits: Tensor, target: Tensor, *, class_dim: int = -1, **options: Unpack[LossAlone]) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, class_dim: int = -1, **options: Unpack[LossAndLse]
) -> tuple[Tensor, Tensor]: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, class_dim: int = -1, **options: Unpack[AnyOutputs]
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

    Otherwise as `torch.nn.functional.cross_entropy`.

    Returns the loss in float32 (float64 for float64 logits): [...] for reduction "none", otherwise a scalar. With
    further outputs requested, returns a tuple: the loss, then these outputs in this order.

    return_lse: the logsumexp of each token [...], differentiable; 0 for ignored tokens.
    return_z_loss: the z-loss contained in the loss, reduced as the loss; not differentiable.
    return_token_accuracy: 1 for each token whose class has the largest logit (the first of equals, as in
        torch.argmax), else 0; not differentiable. Reduced as the loss; "mean" divides by the number of tokens not
        ignored, or by `denominator`.

    target: int64, int32 or uint8.
    class_dim: the dim of the classes if not the last. Give 1 for logits in torch's form [N, V, ...].
    weight: [V], one weight for each class. None: 1 for all classes.
    label_smoothing: the share of the target distributed over all classes.
    logit_scale, softcap: each logit x is replaced by cap * tanh(scale * x / cap); with the cap None by scale * x.
    z_loss: adds z_loss * logsumexp(logits)**2 to each token's loss (Chowdhery et al. 2022, section 5). Class weights
        do not apply to the z-loss: "mean" without a denominator divides this part by the number of tokens.
    denominator: divides the sum for "mean"; None: the sum of the weights of tokens not ignored. If tokens are
        sharded, give the global count to save the count and its all-reduce.
    inplace_backward: backward writes the gradient over the logits, which must be contiguous and not a leaf. Afterwards
        autograd raises in a second backward of the loss, and in the backward of any further op which saved the logits.
        Ignored under torch.compile.

    Precision: the logits' gradient errs by less than a unit in the last place of its dtype. With label smoothing the
        gradient is a difference, and the unit is that of the larger of the two numbers subtracted. With a softcap or
        scale, the gradient of float32 logits has the error of float32 arithmetic.

    Where the vocabulary is not sharded, forward computes the gradient of a scalar loss, for a guess of the upstream
    gradient. Backward computes the gradient again if the guess was wrong. Not so in float16, and not with
    inplace_backward or return_lse.

    Layouts: logits sharded over the vocabulary make the loss vocab-parallel; shards may be uneven or empty. Tokens
    may be sharded, with the target sharded alike: the loss is then sharded for "none", and Partial(sum) otherwise.
    The weight is replicated.

    Communication: for a sharded vocabulary, one all-gather in forward of 12 bytes per token and rank, plus 8 with
    label smoothing and 4 with the accuracy; none in backward. For "mean" without a denominator, one all-reduce of one
    or two numbers over the axes that shard the tokens. Each is a single collective, also over several axes of the mesh.
    The host waits for no device.

    torch.compile(fullgraph=True) sees the loss as a single node of the graph.

    Raises ValueError for invalid shapes, dtypes, options and targets; LayoutError for layouts the loss cannot take.
    """
    check_tensors("cross_entropy", ("logits", "target", "weight"), logits, target, weight, optional=1)
    is_dim = type(class_dim) is int or is_int(class_dim)
    if not (is_dim and -logits.ndim <= class_dim < logits.ndim):
        raise ValueError(
            f"class_dim is {described(class_dim)} for logits of shape {tuple(logits.shape)}; give the dim of the "
            f"classes"
        )
    if class_dim not in (-1, logits.ndim - 1):
        logits = logits.movedim(class_dim, -1)
    if target.shape != logits.shape[:-1]:
        refuse_target(logits.shape, target)
    options = Options(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
        logit_scale=logit_scale, inplace_backward=inplace_backward, return_lse=return_lse, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
    )  # fmt: skip
    _check_not_leaf(logits, options)
    operands = (logits, target, weight, as_denominator(denominator, weight, logits))
    if is_compiling():
        outputs = _select_outputs(
            apply_custom_op(*operands, options=options, shard=VocabShard(groups=groups_of(*operands))), options
        )
    else:
        outputs = apply_many(CROSS_ENTROPY, *operands, options=options, backwards=_backwards(logits, options))
    return outputs if len(outputs) > 1 else outputs[0]


def _select_outputs(outputs: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    """The requested outputs of `apply_custom_op`, which always returns the lse as well."""
    loss, lse, *constants = outputs
    return (loss, lse, *constants) if options.return_lse else (loss, *constants)


def _backwards(logits: Tensor, options: Options) -> list[None] | None:
    """An empty list, with which forward may compute the gradient before backward; None if forward may not.

    None with inplace_backward: forward must not overwrite the logits, which another op may read before backward.
    """
    wanted = torch.is_grad_enabled() and logits.requires_grad and has_data(logits)
    return [] if wanted and not options.inplace_backward and options.gradient_in_forward(logits.dtype) else None


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    **options: Unpack[LossAlone],
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    **options: Unpack[LossAndLse],
) -> tuple[Tensor, Tensor]: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    **options: Unpack[AnyOutputs],
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
    **options: Unpack[AllOptions],
) -> Tensor | tuple[Tensor, ...]:
    """`cross_entropy` of local tensors, for programs with process groups instead of layouts.

    logits: [..., V], this rank's logits of the classes vocab_start to vocab_start + V of vocab_size. V may differ
        between ranks and may be 0.
    target: [...], ids of the whole vocabulary. weight: [vocab_size]. Both, and the denominator, are the same on every
        rank.
    options: as in `cross_entropy`. "mean" is over these tokens.

    Every rank of the group gets the same loss, to the last bit, and the gradient of its own logits.

    Communication: one all-gather over `group` in forward, of 12 bytes per token and rank; 8 bytes a token more with
    label smoothing, and 4 more with the accuracy. Two rows beside the tokens' say which classes the rank has, and
    whether the rank failed. None in backward.

    torch.compile(fullgraph=True) sees the loss as a single node of the graph.

    Raises ValueError as `cross_entropy` does, and if the ranks together do not hold each class of the vocabulary
    exactly once, for example with gathered logits. On a CPU every rank raises if any rank fails. On a GPU the other
    ranks raise only in the first call with this group, vocab_start, V and vocab_size: afterwards the host waits for no
    device. In later calls the loss of the other ranks is NaN, if a rank fails or if the V of all ranks do not add up to
    vocab_size.

    Every rank must gather the same number of bytes, so the ranks must agree on the number of tokens, label_smoothing,
    return_token_accuracy and whether the logits are float64. Weft does not compare these before the gather: where they
    differ, NCCL or gloo fails. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares the sizes first, and every rank
    raises RuntimeError with the numbers of elements.
    """
    check_group("vocab_parallel_cross_entropy", group)
    if is_compiling():
        _check_local(logits, target, weight)
        check_vocabulary(vocab_start, vocab_size)
        parsed, scalar = Options(**options), as_denominator(denominator, weight, logits)
        shard = VocabShard(vocab_start, vocab_size, [group.group_name], checked=True)
        outputs = _select_outputs(apply_custom_op(logits, target, weight, scalar, options=parsed, shard=shard), parsed)
        return outputs if len(outputs) > 1 else outputs[0]

    def attempt() -> tuple[Options, Tensor | None]:
        _check_local(logits, target, weight)
        check_vocabulary(vocab_start, vocab_size)
        parsed, scalar = Options(**options), as_denominator(denominator, weight, logits)
        _check_not_leaf(logits, parsed)
        check_contiguous(logits, parsed)
        check(logits, target, weight, scalar, parsed, vocab_start, vocab_size)
        return parsed, scalar

    classes = ShardClasses(vocab_start, logits.shape[-1] if logits.ndim else 0, vocab_size)
    columns = 3 + 2 * bool(options.get("label_smoothing")) + bool(options.get("return_token_accuracy"))
    (parsed, scalar), gather = run_or_report(
        attempt, group, classes, lambda: placeholder_statistics(target, logits, columns)
    )
    outputs = apply_many(
        CROSS_ENTROPY, logits, target, weight, scalar,
        options=parsed, vocab_start=vocab_start, vocab_size=vocab_size, gather=gather,
    )  # fmt: skip
    return outputs if len(outputs) > 1 else outputs[0]


def _check_local(logits: Tensor, target: Tensor, weight: Tensor | None) -> None:
    names = ("logits", "target", "weight")
    check_tensors("vocab_parallel_cross_entropy", names, logits, target, weight, optional=1)
    if isinstance(logits, DTensor) or isinstance(target, DTensor):
        raise ValueError("vocab_parallel_cross_entropy takes local tensors; give DTensors to cross_entropy")


def as_denominator(
    denominator: float | Tensor | None, weight: Tensor | None, logits: Tensor | TensorForm
) -> Tensor | None:
    """The denominator as a scalar tensor on the logits' device. The host waits for no copy between devices.

    Called before the loss runs, by `cross_entropy`, `linear_cross_entropy` and the vocab-parallel form of each.
    logits: only dtype and device are read. A linear loss has no logits yet, and gives a TensorForm.
    Raises ValueError for a denominator that is not a number of 0 or more, and if the denominator or the weight requires
    a gradient; LayoutError for a DTensor that is not replicated.
    """
    for name, tensor in (("denominator", denominator), ("weight", weight)):
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"the {name} requires a gradient, which cross-entropy does not compute; give {name}.detach()"
            )
    if denominator is None:
        return None
    if isinstance(denominator, DTensor) and not is_compiling():  # the compiled op unwraps it
        denominator = local_denominator(denominator)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(denominator, Tensor):
        if denominator.numel() != 1 or denominator.is_complex() or denominator.dtype == torch.bool:
            raise ValueError(
                f"denominator has shape {tuple(denominator.shape)} and dtype {denominator.dtype}; give one number"
            )
        if can_read(denominator):
            number = _check_divisor(denominator)
            if denominator.device != logits.device:  # full, not a copy: the host would wait for a copy
                denominator = torch.full((), number, dtype=wide, device=logits.device)
        return denominator.reshape(()).to(dtype=wide, device=logits.device)
    return torch.full((), _check_divisor(denominator), dtype=wide, device=logits.device)


def _check_divisor(denominator: object) -> float:
    """The denominator, a number or a tensor of one on a CPU, as a float.

    Raises ValueError for a denominator that is not a number of 0 or more.
    """
    number = denominator.item() if isinstance(denominator, Tensor) else denominator
    if not (is_number(number) and 0 <= number <= MOST):
        raise ValueError(f"denominator is {number!r}; give a number, the count of tokens over all ranks")
    return float(number)


def _check_not_leaf(logits: Tensor, options: Options) -> None:
    """Raise ValueError if inplace_backward would overwrite a leaf: the logits themselves, or the base of their view."""
    if not options.inplace_backward or is_compiling():  # inplace_backward is ignored in a compiled graph
        return
    node, leaf = logits.grad_fn, logits if logits.is_leaf and logits.requires_grad else None
    # Follow the views back to their base. An op of several tensors is no view: its output has memory of its own.
    while node is not None and leaf is None:
        leaf = getattr(node, "variable", None)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    if leaf is not None and _memory(leaf) == _memory(logits):
        raise ValueError("inplace_backward would overwrite logits that are a leaf; use it on the output of an op")


def _memory(tensor: Tensor) -> int:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
