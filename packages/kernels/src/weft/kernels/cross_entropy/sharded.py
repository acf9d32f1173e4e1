"""cross_entropy on plain tensors and DTensors; vocab-parallel where the logits are sharded on the vocabulary."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weft.mesh import Layout, LayoutError, Partial, Shard
from weft.reshard import layout_of, reshard
from weft.reshard.collectives import all_gather_single
from weft.reshard.dtensor import wrap
from weft.reshard.groups import axis_group

from ..op import Op
from ..sharded import Shapes, Sharding, apply, independent
from . import function

Reduction = Literal["none", "mean", "sum"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    denominator: float | None = None,
) -> Tensor:
    """Cross-entropy of `logits` against class ids, with the meaning of `torch.nn.functional.cross_entropy`.

    logits: [..., V], the classes last. target: [...] of int32 or int64. Returns float32 (float64 for float64 logits):
    [...] for "none", a scalar otherwise. denominator: what "mean" divides by, in place of the count of tokens that
    are not ignored; give the global count where tokens are sharded, and nothing needs to be counted.
    Layouts: logits sharded on the vocabulary make it vocab-parallel, uneven and empty shards included; tokens sharded as
    the target is shard the loss ("none") or leave it Partial(sum).
    Communication: for each axis that shards the vocabulary, one all-gather of 12 bytes per token and rank in forward,
    none in backward; for "mean" without a denominator, one all-reduce of a number over the axes that shard the tokens.
    Raises ValueError for shapes, dtypes and targets that do not fit; LayoutError for layouts that do not.
    """
    if logits.ndim < 1 or target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy takes logits [..., V] and target [...], got {tuple(logits.shape)} and {tuple(target.shape)}"
        )
    if reduction == "mean" and denominator is None and isinstance(target, DTensor):
        denominator = _count(target, ignore_index)
    return apply(CROSS_ENTROPY, logits, target, ignore_index=ignore_index, reduction=reduction, denominator=denominator)


def _count(target: DTensor, ignore_index: int) -> float:
    """Tokens of the global target that are not ignored."""
    layout = layout_of(target)
    local = (target.to_local() != ignore_index).sum()
    over_tokens = layout.replace(**{axis: Partial("sum") for axes in layout.shard_order.values() for axis in axes})
    return float(reshard(wrap(local, over_tokens, ())).to_local())


def _rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    logits, target = layouts
    shape, _ = shapes
    assert logits is not None and target is not None and shape, "both are given"
    vocab_dim = len(shape) - 1
    vocab_axes = logits.shard_order.get(vocab_dim, ())
    tokens = logits.replace(**dict.fromkeys(vocab_axes, "R"))
    if logits.is_partial():
        raise LayoutError(f"cross_entropy is not linear in its logits, which are ({logits}); reshard them first")
    if target != tokens:
        raise LayoutError(
            f"cross_entropy has logits ({logits}) and a target ({target}); reshard the target to ({tokens})"
        )
    output = tokens
    if options["reduction"] != "none":
        output = Layout(
            logits.mesh,
            {
                axis: Partial("sum") if isinstance(placement, Shard) else placement
                for axis, placement in zip(tokens.mesh.axis_names, tokens.placements, strict=True)
            },
        )

    def local(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
        return {
            "vocab_start": logits.local_slices(shape, rank)[vocab_dim].start,
            "vocab_size": shape[vocab_dim],
            "gather": partial(_gather, [axis_group(mesh, axis) for axis in reversed(vocab_axes)]),
        }

    return Sharding(output, shape[:-1] if options["reduction"] == "none" else (), independent(output, layouts), local)


def _gather(groups: list[dist.ProcessGroup], statistics: Tensor) -> Tensor:
    """[N, 3] of this rank -> [shards, N, 3]: one all-gather for each axis that shards the vocabulary, minor first."""
    gathered = statistics.unsqueeze(0)
    for group in groups:
        size = dist.get_world_size(group)
        if size > 1:
            everyone = gathered.new_empty((size * gathered.shape[0], *gathered.shape[1:]))
            all_gather_single(everyone, gathered.contiguous(), group)
            gathered = everyone
    return gathered


CROSS_ENTROPY = Op(
    "cross_entropy", function.forward, function.backward, _rule, lambda dtype: torch.promote_types(dtype, torch.float32)
)
