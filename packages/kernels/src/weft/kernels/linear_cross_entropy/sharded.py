"""linear_cross_entropy on plain tensors, DTensors and process groups; vocab-parallel where the weight is sharded on its rows."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError
from weft.mesh.extents import chunk, largest_part
from weft.reshard.collectives import all_gather_single, reduce_scatter_single

from ..cross_entropy import agreement
from ..cross_entropy.agreement import Classes
from ..cross_entropy.options import Asked, Form, Options, check, form_of
from ..cross_entropy.sharded import (
    CROSS_ENTROPY,
    Reduction,
    as_denominator,
    divisor,
    look_once,
    starting,
    starting_checked,
)
from ..matmul.sharded import LINEAR
from ..op import Op
from ..sharded import Shapes, Sharding, apply_many
from . import function
from .agreement import Sizes, check_sizes, sizes_of
from .custom_ops import compiled
from .gradients import Wanted


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    chunk_tokens: int | None = None,
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
) -> Any:
    """`cross_entropy` of the logits `input @ linear_weight.T + linear_bias`, which never exist all at once.

    input: [..., H]. linear_weight: [V, H]. linear_bias: [V]. target: [...] of int32 or int64. The rest as of `cross_entropy`, also
    what is returned; as `torch.nn.functional.linear_cross_entropy`.
    chunk_tokens: how many tokens' logits are held at once; without it, as many as fit in 1 GiB (64 MiB on a CPU), if the
    vocabulary is shared evenly.
    inplace_backward: the gradients that forward made are given away and not copied; a second backward gets autograd's error.
    The gradients of weight and bias have the dtype their `grad_dtype` names, as torch has it for leaves: float32 is the
    sum as it was made. Under torch.compile they are rounded to the weight's dtype first.
    Memory above inputs and gradients: the logits of a chunk, two chunks' where they are vocab-parallel; with more than one
    chunk also the weight's gradient in float32, so that the number of chunks does not change its error, unless that is the
    gradient asked for; and in backward, where they are not given away, the gradients that forward made beside those returned.
    Work: three GEMMs, 6 N H V flop; four for "none", with return_lse and in float16, where backward computes the logits
    again. Only the gradients that are required are computed.
    Layouts: input and linear_weight as of the einsum "...h,vh->...v", and those logits as of `cross_entropy`: a weight
    sharded on V makes it vocab-parallel, and the input's gradient Partial(sum) over those axes.
    Communication: as of `cross_entropy`, in a gather a chunk while the next chunk's GEMM runs; none in backward.
    torch.compile(fullgraph=True) takes plain tensors alone.
    Raises ValueError for shapes, dtypes, options and targets that do not fit; LayoutError for layouts that do not.
    """
    _check(form_of(input), linear_weight, linear_bias, chunk_tokens)
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"linear_cross_entropy takes input [..., H] and target [...], got {tuple(input.shape)} and {tuple(target.shape)}"
        )
    options = Options(
        ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
        logit_scale=logit_scale, inplace_backward=inplace_backward, return_lse=return_lse,
    )  # fmt: skip
    scalar = divisor(denominator, target, weight, input, options)
    operands = (input, linear_weight, target, linear_bias, weight, scalar)
    asked: dict[str, Any] = {
        "options": options,
        "wanted": _wanted(input, linear_weight, linear_bias),
        "chunk_tokens": chunk_tokens,
    }
    if torch.compiler.is_compiling() and not any(isinstance(each, DTensor) for each in operands):
        outputs = compiled(*operands, **asked)
    else:
        outputs = apply_many(LINEAR_CROSS_ENTROPY, *operands, **asked)
    return outputs if return_lse else outputs[0]


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
    weight: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **options: Unpack[Asked],
) -> Any:
    """`linear_cross_entropy` of local tensors, for programs that hold process groups and no layouts.

    input: [..., H], the same on every rank; with sequence_parallel this rank's part of dim 0, cut as torch.chunk cuts.
    linear_weight: [V, H], linear_bias: [V], of the classes vocab_start to vocab_start + V of vocab_size; V may differ between
    ranks and be 0. target, weight: of all tokens, of all classes; they, chunk_tokens and the options are the same on every rank.
    Every rank gets the loss, bitwise the same, the gradient of its own weight and bias, and the whole gradient of its input.
    Communication: in forward one all-gather of 36 bytes in which the ranks agree, and one a chunk of 12 bytes per token and
    rank (16 with label smoothing), while the next chunk's GEMM runs; in backward one all-reduce of the input's gradient. With
    sequence_parallel an all-gather of the input before, and a reduce-scatter in place of the all-reduce.
    torch.compile(fullgraph=True) cannot take it.
    Raises ValueError as `linear_cross_entropy` does, on every rank of the group where one cannot go on, or where the ranks'
    classes are not each of the vocabulary once, or their tokens, chunks or bytes a token differ. On a GPU that is compared when
    a group and sizes are first met, and the host waits for no device afterwards: a rank that cannot go on later raises alone,
    and at once; the others cannot learn of it, and wait for its next gather until the launcher or the group's timeout ends them.
    """
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group; call this on its ranks alone")
    V, sizes, asked, scalar, failed = 0, Sizes(), None, None, None
    try:
        if any(isinstance(tensor, DTensor) for tensor in (input, linear_weight, target)):
            raise ValueError(
                "vocab_parallel_linear_cross_entropy takes local tensors; give DTensors to linear_cross_entropy"
            )
        V = len(linear_weight) if linear_weight.ndim else 0
        asked, scalar = Options(**options), as_denominator(denominator, weight, input)
        _check_part(input, target, group, sequence_parallel)
        _check(
            Form((*target.shape, *input.shape[-1:]), input.dtype, input.device),
            linear_weight,
            linear_bias,
            chunk_tokens,
        )
        form = Form((*target.shape, V), input.dtype, input.device)
        check(form, target, weight, scalar, asked, vocab_start, vocab_size)
        sizes = sizes_of(input, target, chunk_tokens, vocab_size, dist.get_world_size(group), asked)
    except Exception as error:  # of any kind: it is gathered, so that the others learn of it
        failed = error
    agreed = _agreed(group, Classes(vocab_start, V, vocab_size), sizes, failed, input.device)
    assert asked is not None, "otherwise it failed, and that was raised"
    whole = _Gathered.apply(input, len(target), group) if sequence_parallel else _Shared.apply(input, group)  # type: ignore[no-untyped-call]
    loss, *lse = apply_many(
        LINEAR_CROSS_ENTROPY, whole, linear_weight, target, linear_bias, weight, scalar,
        options=asked, wanted=_wanted(input, linear_weight, linear_bias), chunk_tokens=chunk_tokens,
        vocab_start=vocab_start, vocab_size=vocab_size, shards=dist.get_world_size(group), gather=starting([group]),
    )  # fmt: skip
    if agreement.on_gpu(input):  # elsewhere the host has looked
        loss = loss + agreed
    return (loss, *lse) if asked.return_lse else loss


def _agreed(
    group: dist.ProcessGroup, held: Classes, sizes: Sizes, failed: Exception | None, device: torch.device
) -> Tensor:
    """0 where the ranks agree, otherwise NaN, by one gather of 36 bytes whatever is wrong with a rank.

    Raises as `starting_checked`, and ValueError where the sizes differ; see `look_once`.
    """
    row = torch.cat([torch.full((1,), size, dtype=torch.float32, device=device) for size in sizes])  # by no copy
    told = starting_checked(group, held, failed)(row.unsqueeze(0))()[:, 0]  # [ranks, 3]
    ranks = dist.get_process_group_ranks(group)
    look_once((group, held, sizes), told, lambda: check_sizes(ranks, told.tolist()))
    return torch.where((told == told[0]).all(), 0.0, torch.nan)


def _wanted(*tensors: Tensor | None) -> Wanted:
    """Of each the dtype its gradient shall have; None where none is needed."""
    if not torch.is_grad_enabled():
        return (None,) * len(tensors)
    return tuple(None if tensor is None or not tensor.requires_grad else _grad_dtype(tensor) for tensor in tensors)


def _grad_dtype(tensor: Tensor) -> torch.dtype:
    if torch.compiler.is_compiling() or not tensor.is_leaf:  # torch has it of leaves alone
        return tensor.dtype
    return tensor.grad_dtype or tensor.dtype  # None: any will do


def _check(input: Form, linear_weight: Tensor, linear_bias: Tensor | None, chunk_tokens: int | None) -> None:
    if linear_weight.ndim != 2 or not input.shape or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"linear_cross_entropy takes input [..., H] and linear_weight [V, H], got {input.shape} and "
            f"{tuple(linear_weight.shape)}"
        )
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy takes a linear_bias of shape {tuple(linear_weight.shape[:1])}, got {tuple(linear_bias.shape)}"
        )
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is not None and (tensor.dtype, tensor.device) != (input.dtype, input.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, input {input.dtype} on {input.device}; convert one of them"
            )
    if chunk_tokens is not None and (
        not isinstance(chunk_tokens, int) or isinstance(chunk_tokens, bool) or chunk_tokens < 1
    ):
        raise ValueError(
            f"chunk_tokens is {chunk_tokens!r}; give a number of tokens, 1 or more, or None to have it chosen"
        )


def _check_part(input: Tensor, target: Tensor, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
    expected = list(target.shape)
    if sequence_parallel:
        if target.ndim == 0:
            raise ValueError("sequence_parallel cuts dim 0 of the tokens; target has no dims")
        start, stop = chunk(target.shape[0], dist.get_world_size(group), dist.get_rank(group))
        expected[0] = stop - start
    if list(input.shape[:-1]) != expected:
        part = ", this rank's part of dim 0" if sequence_parallel else ""
        raise ValueError(
            f"input of shape {tuple(input.shape)} for a target of shape {tuple(target.shape)}; give "
            f"[{', '.join(map(str, expected))}, H]{part}"
        )


class _Shared(torch.autograd.Function):
    """Replicate -> the same; its dual adds the gradients of all ranks: one all-reduce."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)  # in place: the one op that used the output has just made it
        return grad, None


class _Gathered(torch.autograd.Function):
    """Shard(0) -> Replicate: an all-gather; its dual is the reduce-scatter. Dim 0 is padded to equal parts."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
        ranks = dist.get_world_size(group)
        ctx.group, ctx.part, ctx.padded = group, len(input), largest_part(tokens, ranks) * ranks
        whole = input.new_empty(ctx.padded, *input.shape[1:])
        all_gather_single(whole, _padded(input, ctx.padded // ranks), group)
        return whole[:tokens]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = _padded(grad, ctx.padded)
        part = grad.new_empty(ctx.padded // dist.get_world_size(ctx.group), *grad.shape[1:])
        reduce_scatter_single(part, grad, group=ctx.group)
        return part[: ctx.part], None, None


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:]))) if len(x) < rows else x.contiguous()


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, given: dict[str, Any]) -> Sharding:
    input, linear_weight, target, linear_bias, weight, _ = layouts
    input_shape, weight_shape, target_shape, bias_shape, _, _ = shapes
    assert input is not None and linear_weight is not None and input_shape and weight_shape, "both are given"
    product: Sharding = LINEAR.rule((input, linear_weight, linear_bias), (input_shape, weight_shape, bias_shape), {})
    if input.is_partial() or linear_weight.is_partial():
        raise LayoutError(
            f"linear_cross_entropy is not linear in input ({input}) and linear_weight ({linear_weight}); reshard what is Partial first"
        )
    if product.output.is_partial():
        raise LayoutError(
            f"linear_cross_entropy has input ({input}) and linear_weight ({linear_weight}), whose logits would be "
            f"({product.output}); reshard both so that H is whole"
        )
    logits = (product.output, target, weight, None)
    loss: Sharding = CROSS_ENTROPY.rule(logits, (product.shape, target_shape, None, None), given)

    def gradients(*grads: Layout | None) -> tuple[Layout | None, ...]:
        dlogits, *_ = loss.gradients(*grads)
        assert dlogits is not None, "one of the outputs has a gradient"
        dinput, dweight, dbias = product.gradients(dlogits)
        return dinput, dweight, None, dbias, None, None

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        axes = product.output.shard_order.get(len(product.shape) - 1, ())
        return {**loss.local(rank, mesh), "shards": product.output.mesh.axis_size(*axes)}

    return Sharding(loss.output, loss.shape, gradients, local, loss.more)


LINEAR_CROSS_ENTROPY = Op("linear_cross_entropy", function.forward, function.backward, _rule, CROSS_ENTROPY.dtype)
