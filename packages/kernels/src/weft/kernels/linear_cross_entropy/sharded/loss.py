"""`linear_cross_entropy` on plain tensors and DTensors, and `vocab_parallel_linear_cross_entropy` on process groups.

Every rank of a vocabulary's group needs all of the input. `SharedInput`: the ranks have all of the input already.
`GatheredInput`: each rank has some of the tokens.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor, library
from torch.distributed.tensor import DTensor
from weft.mesh.extension import largest_part
from weft.reshard.extension import Pending, group_named, reduce_scatter, start_all_gather, wait_for

from ...cross_entropy.options import (
    AllOptions,
    AnyOutputs,
    LossAlone,
    LossAndLse,
    Options,
    Reduction,
    check_vocabulary,
    refuse_target,
)
from ...cross_entropy.sharded import gather
from ...cross_entropy.sharded.custom_ops import VocabShard
from ...cross_entropy.sharded.gather import VocabGather, check_group
from ...cross_entropy.sharded.loss import as_denominator
from ...dispatch.arguments import check_flag
from ...dispatch.backend import is_compiling
from ...dispatch.op import Tensors
from ...dispatch.sharded import apply_many, autocasts
from ...dispatch.sharded.compiled import groups_of
from ...dispatch.sharded.second_derivatives import refuse_second_derivative
from ..function import cast_form, check_factors, check_operands
from ..gradients import Wanted
from .agreement import AgreedSizes, check_and_size, classes_of, compare_sizes
from .custom_ops import apply_custom_op, compare
from .layout_rule import LINEAR_CROSS_ENTROPY


class LinearArguments(TypedDict, total=False):
    """Keyword arguments of the linear losses beside those of `cross_entropy`, for type checkers."""

    linear_bias: Tensor | None
    chunk_tokens: int | None
    compute_dtype: torch.dtype | None


class LinearLossAlone(LinearArguments, LossAlone): ...


class LinearLossAndLse(LinearArguments, LossAndLse): ...


class LinearAnyOutputs(LinearArguments, AnyOutputs): ...


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Unpack[LinearLossAlone]
) -> Tensor: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Unpack[LinearLossAndLse]
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, **options: Unpack[LinearAnyOutputs]
) -> Tensor | tuple[Tensor, ...]: ...
@autocasts("linear_cross_entropy")
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    weight: Tensor | None = None,
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
    """`cross_entropy` of the logits `input @ linear_weight.T + linear_bias`, which never exist all at once.

    Otherwise as `torch.nn.functional.linear_cross_entropy`.
    input: [..., H]. linear_weight: [V, H]. linear_bias: [V], or None. target: [...], int64, int32 or uint8.
    Further arguments and the returned outputs are as in `cross_entropy`.
    compute_dtype: the dtype to cast the GEMMs' factors to. The logits are never narrower than float32. None: the
        input's dtype, which the weight must then have. If given, the gradients have the operands' own dtypes: the
        gradient of a float32 weight is the float32 sum. Under autocast, autocast's dtype.
    chunk_tokens: the number of tokens in a chunk, whose logits' gradient is in memory at once. A chunk is computed in
        parts: only a part's logits are in memory at once. None: chunks are as long as a limit of 1 GiB allows
        (64 MiB on a CPU). Within the limit are the gradient of a chunk's logits, a part's logits, and the lower bits
        of the weight gradient's sum; the first two get at least half. To choose equally on every rank, the default
        assumes an evenly sharded vocabulary. chunk_tokens and the dtype of the weight's gradient must be the same on
        every rank.
    inplace_backward: do not copy the gradients computed in forward. By default backward copies them if it may run
        again, with retain_graph or in a CUDA graph; otherwise it returns the tensors themselves. With
        inplace_backward a second backward raises autograd's error, and a CUDA graph must be replayed as a whole.
        Under torch.compile backward always copies.

    The gradients of weight and bias have the dtype of their `grad_dtype`, an attribute of leaves in torch. In float32
    the weight's gradient is the sum itself. torch.compile rounds the gradients to the weight's dtype first.

    Memory above inputs and gradients, for 16-bit factors: the 16-bit gradient of a chunk's logits, and the float32
    logits of a part of its tokens, or of two parts if vocab-parallel. For wider factors a part is the whole chunk.
    With several chunks also the weight gradient's sum: 8 extra bits an element in bfloat16; a float32 sum in float16,
    and for more than 64 chunks. If backward copies, also the gradients computed in forward.
    Work: three GEMMs, 6 N H V flop. Four GEMMs for "none", with return_lse, and in float16, because backward computes
    the logits again. Only required gradients are computed.
    Layouts: input and linear_weight as in the einsum "...h,vh->...v", and the resulting logits as in `cross_entropy`.
    A weight sharded over V makes the loss vocab-parallel, and the input's gradient Partial(sum) over those axes.
    Communication: as in `cross_entropy`, with one gather for each part while the next part's GEMM runs. None in
    backward.

    torch.compile(fullgraph=True) sees the loss as a single node. With DTensors, compile on every rank of their mesh.
    Raises ValueError for invalid shapes, dtypes, options and targets; LayoutError for layouts the loss cannot take.
    """
    check_operands("linear_cross_entropy", input, linear_weight, target, linear_bias, weight)
    form = cast_form(input, compute_dtype)
    check_factors(form, linear_weight, linear_bias, chunk_tokens, compute_dtype)
    if target.shape != input.shape[:-1]:
        refuse_target((*input.shape[:-1], linear_weight.shape[0]), target)
    options = Options(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
        logit_scale=logit_scale, inplace_backward=inplace_backward, return_lse=return_lse, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
    )  # fmt: skip
    scalar = as_denominator(denominator, weight, form)
    operands = (input, linear_weight, target, linear_bias, weight, scalar)
    arguments: dict[str, Any] = {
        "options": options,
        "wanted": _wanted(input, linear_weight, linear_bias),
        "chunk_tokens": chunk_tokens,
        "compute_dtype": compute_dtype,
    }
    if is_compiling():
        outputs = apply_custom_op(
            *operands, **arguments, shard=VocabShard(groups=groups_of(*operands)), disagreement=None
        )
    else:
        outputs = apply_many(LINEAR_CROSS_ENTROPY, *operands, **arguments)
    return outputs if len(outputs) > 1 else outputs[0]


@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    **options: Unpack[LinearLossAlone],
) -> Tensor: ...
@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    **options: Unpack[LinearLossAndLse],
) -> tuple[Tensor, Tensor]: ...
@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    **options: Unpack[LinearAnyOutputs],
) -> Tensor | tuple[Tensor, ...]: ...
@autocasts("linear_cross_entropy")
def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    linear_bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **options: Unpack[AllOptions],
) -> Tensor | tuple[Tensor, ...]:
    """`linear_cross_entropy` of local tensors, for programs with process groups instead of layouts.

    input: [..., H], the same on every rank; with sequence_parallel this rank's part of dim 0, split as torch.chunk
        splits.
    linear_weight: [V, H], linear_bias: [V], of this rank's classes vocab_start to vocab_start + V of vocab_size. V
        may differ between ranks and may be 0.
    target: of all tokens. weight: of all classes. These, chunk_tokens, compute_dtype and the options are the same on
        every rank.

    Every rank gets the same loss, to the last bit, the gradient of its own weight and bias, and the full gradient of
    its input.

    Communication: in forward one all-gather of 36 bytes per rank, to compare the ranks' sizes. Then one all-gather
    for each part while the next part's GEMM runs, of 12 bytes per token and rank; 8 more with label smoothing, and 4
    more with the accuracy. In backward one all-reduce of the input's gradient. With sequence_parallel the input is
    all-gathered first, and a reduce-scatter replaces the all-reduce.
    torch.compile(fullgraph=True) works. Invalid options then raise while tracing.
    Raises ValueError as `linear_cross_entropy` does, on every rank of the group if any rank fails. Also if the ranks
    together do not hold each class of the vocabulary exactly once, or differ in tokens, chunks or bytes per token. On
    a GPU the host reads the ranks' sizes, and waits for the device, only in the first call with a group and these
    sizes. In later calls, sizes that differ between ranks make the loss NaN instead. A rank which fails after the
    comparison raises alone, at once. The other ranks cannot learn of the failure: they wait in their next gather until
    the launcher or the group's timeout ends them.
    """
    check_group("vocab_parallel_linear_cross_entropy", group)
    name = group.group_name
    shard = VocabShard(vocab_start, vocab_size, [name])

    def parse_options() -> tuple[Options, Tensor | None]:
        check_operands("vocab_parallel_linear_cross_entropy", input, linear_weight, target, linear_bias, weight)
        check_flag("vocab_parallel_linear_cross_entropy", "sequence_parallel", sequence_parallel)
        check_vocabulary(vocab_start, vocab_size)
        if any(isinstance(tensor, DTensor) for tensor in (input, linear_weight, target)):
            raise ValueError(
                "vocab_parallel_linear_cross_entropy takes local tensors; give DTensors to linear_cross_entropy"
            )
        return Options(**options), as_denominator(denominator, weight, cast_form(input, compute_dtype))

    if is_compiling():
        parsed, scalar = parse_options()
        remaining = (linear_weight, target, linear_bias, weight, scalar)
        wanted = _wanted(input, linear_weight, linear_bias)
        flags = [each is not None for each in wanted]
        with torch.no_grad():
            disagreement = compare(
                input, *remaining, flags, chunk_tokens, compute_dtype, sequence_parallel, *shard, *parsed.flat()
            )
        whole = _whole(input, target, name, sequence_parallel, disagreement)
        outputs = apply_custom_op(
            whole, *remaining, options=parsed, wanted=wanted,
            chunk_tokens=chunk_tokens, compute_dtype=compute_dtype, shard=shard, disagreement=disagreement,
        )  # fmt: skip
        return outputs if len(outputs) > 1 else outputs[0]

    def attempt() -> tuple[tuple[Options, Tensor | None], AgreedSizes]:
        parsed, scalar = parse_options()
        sizes = check_and_size(
            input, linear_weight, target, linear_bias, weight, scalar, options=parsed, classes=classes, wanted=wanted,
            chunk_tokens=chunk_tokens, compute_dtype=compute_dtype,
            rank=group.rank(), ranks=group.size(), sequence_parallel=sequence_parallel,
        )  # fmt: skip
        return (parsed, scalar), sizes

    classes, wanted = classes_of(linear_weight, vocab_start, vocab_size), _wanted(input, linear_weight, linear_bias)
    (parsed, scalar), disagreement = compare_sizes(attempt, group, classes, input.device)
    whole = _whole(input, target, name, sequence_parallel, disagreement)
    loss, *further = apply_many(
        LINEAR_CROSS_ENTROPY, whole, linear_weight, target, linear_bias, weight, scalar,
        options=parsed, wanted=wanted, chunk_tokens=chunk_tokens, compute_dtype=compute_dtype,
        vocab_start=vocab_start, vocab_size=vocab_size, shards=shard.shards, gather=VocabGather((group,)),
    )  # fmt: skip
    if gather.on_gpu(input):  # adds 0, or NaN if the ranks' sizes differ; on a CPU the host has checked the sizes
        loss = loss + disagreement
    return (loss, *further) if further else loss


def _whole(input: Tensor, target: Tensor, group: str, sequence_parallel: bool, disagreement: Tensor) -> Tensor:
    """The input of all tokens. The input's gradient arrives Partial(sum) over the group, and is summed in backward.

    disagreement: the scalar from `compare_sizes`; a compiled graph must compute this scalar before the all-gather.
    """
    whole: Tensor
    if sequence_parallel:
        whole = GatheredInput.apply(input, target.shape[0], group, disagreement)  # type: ignore[no-untyped-call]
    else:
        whole = SharedInput.apply(input, group)  # type: ignore[no-untyped-call]
    return whole


def _wanted(*tensors: Tensor | None) -> Wanted:
    """The dtypes of the gradients; None for tensors that require none."""
    if not torch.is_grad_enabled():
        return (None,) * len(tensors)
    return tuple(None if tensor is None or not tensor.requires_grad else _grad_dtype(tensor) for tensor in tensors)


def _grad_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype which autograd wants for the gradient of a tensor."""
    if is_compiling() or not tensor.is_leaf:  # only leaves have a grad_dtype
        return tensor.dtype
    return tensor.grad_dtype or tensor.dtype  # grad_dtype None allows any dtype


class SharedInput(torch.autograd.Function):
    """Replicate -> Replicate: forward does nothing. The dual sums the gradients of all ranks by an all-reduce."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: str) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        run = _traced_all_reduce if is_compiling() else _all_reduce
        # In place: the only op to use the output has just computed this gradient, and nothing else reads it.
        run(grad, ctx.group)
        return grad, None


class GatheredInput(torch.autograd.Function):
    """Shard(0) -> Replicate: an all-gather. The dual is a reduce-scatter. Dim 0 is padded to equal parts for both.

    tokens: the size of dim 0 over all ranks.
    after: the scalar by which the ranks have compared their sizes. The gather does not read it; as an argument it makes
        a compiled graph finish the comparison before the gather.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, tokens: int, group: str, after: Tensor) -> Tensor:
        ctx.group, ctx.rows = group, input.shape[0]
        run = _traced_all_gather if is_compiling() else _all_gather
        return run(input, tokens, group, after)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        if is_compiling():
            return _traced_reduce_scatter(grad, ctx.rows, ctx.group), None, None, None
        with torch.no_grad():
            part = _reduce_scatter(grad, ctx.rows, ctx.group)
        gradients = refuse_second_derivative((part,), grad) if torch.is_grad_enabled() else (part,)
        return *gradients, None, None, None


def _all_reduce(whole: Tensor, group: str) -> None:
    """Sum a tensor over the group, in place."""
    wait_for(dist.all_reduce(whole, group=group_named(group), async_op=True))


def _all_gather(part: Tensor, tokens: int, group: str, after: Tensor) -> Tensor:
    """All ranks' parts of dim 0, of `tokens` in all. after: not read, see `GatheredInput`."""
    ranks = group_named(group)
    share = largest_part(tokens, ranks.size())
    whole = part.new_empty(share * ranks.size(), *part.shape[1:])
    wait_for(start_all_gather(whole, _pad(part, share), ranks))
    return whole[:tokens]


def _reduce_scatter(whole: Tensor, rows: int, group: str) -> Tensor:
    """This rank's part of dim 0, of `rows` rows, of the sum over the group."""
    ranks = group_named(group)
    share = largest_part(whole.shape[0], ranks.size())
    stacked = _pad(whole, share * ranks.size())
    part = Pending(reduce_scatter(stacked, "sum", [(ranks, range(ranks.size()))])).wait()
    return part.view(share, *whole.shape[1:])[:rows]


def _pad(x: Tensor, rows: int) -> Tensor:
    """x contiguous, with zeros appended along dim 0 up to `rows`."""
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:]))) if len(x) < rows else x.contiguous()


# Called only while tracing: in eager mode custom ops would hide their collectives from modes that count them.
_traced_all_reduce = library.custom_op("weft::all_reduce_", _all_reduce, mutates_args=("whole",))
_traced_all_gather = library.custom_op("weft::all_gather_tokens", _all_gather, mutates_args=())
_traced_reduce_scatter = library.custom_op("weft::reduce_scatter_tokens", _reduce_scatter, mutates_args=())


@_traced_all_gather.register_fake
def _(part: Tensor, tokens: int, group: str, after: Tensor) -> Tensor:
    return part.new_empty(tokens, *part.shape[1:])


@_traced_reduce_scatter.register_fake
def _(whole: Tensor, rows: int, group: str) -> Tensor:
    return whole.new_empty(rows, *whole.shape[1:])
