"""`route`, `sequence_load` and `router_statistics` on plain tensors and DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from weft.mesh import Layout, LayoutError, Partial, Shard, infer

from ...dispatch.arguments import check_choice, check_flag, check_number, check_tensors, described, is_int
from ...dispatch.backend import check_floats
from ...dispatch.op import Op
from ...dispatch.sharded import Shapes, Sharding, apply, apply_many, autocasts, check_operands
from .. import function
from ..reference import wide_dtype
from .tokens import check_experts, check_num_experts

SCORE_FUNCTIONS = ("softmax", "sigmoid")  # values of `route`'s option `score`


@autocasts("route")
def route(
    scores: Tensor,
    k: int,
    *,
    score: str = "softmax",
    softmax_after: bool = False,
    normalize: bool = True,
    bias: Tensor | None = None,
    scale: float = 1.0,
    groups: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the k experts with the highest logits for each token, and the weights of these experts.

    scores: the router's logits, [..., E], in bfloat16, float16, float32 or float64.
    Returns the experts, int32 [..., k], and the weights [..., k], in float32; in float64 for float64 scores. Experts
    are in descending order of the numbers that decide the choice, bias included. The lower of two experts with equal
    numbers comes first, on every device.
    score: the function from logits to weights: "softmax" over all experts, or "sigmoid" of each logit.
    softmax_after: the softmax is over the chosen logits alone. The weights then sum to 1 before `scale`, for either
    value of `normalize`.
    normalize: divide a token's weights by their sum (Mixtral; Qwen3-MoE's norm_topk_prob).
    bias: [E], added to the softmax or sigmoid for the choice alone, not in the weights; with softmax_after added to
    the logits. The bias has no gradient: a training loop corrects the bias (DeepSeek-V3, arXiv:2412.19437). None: 0.
    scale: a factor of the weights (DeepSeek-V3's routed_scaling_factor).
    groups: (n, m): the experts are n equal groups, and a token chooses from the m best groups. A group is judged by the
    sum of the group's two highest scores, bias included (DeepSeek-V3's n_group and topk_group). None: from all experts.

    All arithmetic is in float32 at least. Without bias and groups the logits themselves decide the choice. A NaN counts
    as the highest score, as in torch.topk: the NaN's expert is chosen. All weights of the token are then NaN; under
    "sigmoid" without normalize, only the weight of the NaN's expert.
    Gradient: of the scores, through the weights alone. Saved for backward: the scores and the experts.

    Layouts: the scores are sharded on any dims of tokens; experts and weights are sharded alike. The bias is
    replicated.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for k above E or below 1, values of options that are not
    listed here, other dtypes or shapes, and tensors on two devices.
    """
    check_operands("route", ("scores", "bias"), 1, scores, bias)
    check_flag("route", "normalize", normalize)
    check_number("route", "scale", scale)
    check_floats("route", ("scores", "the bias"), scores, bias)
    if scores.ndim < 1:
        raise ValueError("route takes scores of shape [..., E], got a number; give the router's logits")
    _check_router(scores.shape[-1], k, score, softmax_after, groups)
    if bias is not None and bias.shape != scores.shape[-1:]:
        raise ValueError(
            f"route: the bias has shape {tuple(bias.shape)}, but the scores are of {scores.shape[-1]} experts; "
            f"give a number for each expert"
        )
    weights, experts = apply_many(
        ROUTE, scores, bias,
        k=k, score=score, softmax_after=softmax_after, normalize=normalize, scale=float(scale),
        groups=() if groups is None or groups[0] == 1 else (groups[0], groups[1]),
    )  # fmt: skip
    return experts, weights


def _check_router(E: int, k: int, score: str, softmax_after: bool, groups: Sequence[int] | None) -> None:
    """Raise ValueError for options of `route` that do not fit E experts."""
    if not (is_int(k) and 1 <= k <= E):
        raise ValueError(f"route: k is {described(k)}, but there are {E} experts; give 1 to {E}")
    check_choice("route", "score", score, SCORE_FUNCTIONS)
    check_flag("route", "softmax_after", softmax_after)
    if softmax_after and score != "softmax":
        raise ValueError(f"route: softmax_after goes with score='softmax', got {score!r}; leave one of both out")
    if groups is None:
        return
    if not (isinstance(groups, tuple | list) and len(groups) == 2 and is_int(groups[0]) and is_int(groups[1])):
        raise ValueError(
            f"route: groups is {described(groups)}; give (number of groups, groups that a token chooses from)"
        )
    n, m = groups
    if n < 1 or E % n:
        degrees = [each for each in range(1, E + 1) if E % each == 0]
        raise ValueError(
            f"route: {E} experts cannot be cut into {n} equal groups; numbers that work: {', '.join(map(str, degrees))}"
        )
    if not 1 <= m <= n:
        raise ValueError(f"route: groups is {(n, m)}: a token chooses from {m} of {n} groups; give 1 to {n}")
    if k > m * (E // n):
        raise ValueError(
            f"route: k is {k}, but {m} groups of {E // n} experts have {m * (E // n)}; give a smaller k, or more "
            f"groups to choose from"
        )


def sequence_load(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen in each sequence of a batch: the load of `router_statistics`.

    experts: [B, T, k] of int32 or int64, from `route`. Returns [B, num_experts] in float32, exact below 2**24 times.
    Gradient: none.

    Layouts: the experts are sharded on B and T. The output is sharded on B alike, and Partial(sum) over the axes which
    shard T.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for other dtypes or shapes, and on a CPU for an expert outside
    0 to num_experts - 1.
    """
    check_tensors("sequence_load", ("experts",), experts)
    check_experts("sequence_load", experts)
    if experts.ndim != 3:
        raise ValueError(
            f"sequence_load takes experts [B, T, k], got {tuple(experts.shape)}; give the experts of whole sequences"
        )
    check_num_experts("sequence_load", num_experts)
    return apply(SEQUENCE_LOAD, experts, num_experts=num_experts)


@autocasts("router_statistics")
def router_statistics(
    logits: Tensor,
    experts: Tensor,
    statistics: Tensor | None = None,
    load: Tensor | None = None,
    *,
    layer: int = 0,
    layers: int = 1,
) -> Tensor:
    """Sums over tokens for a router's balance loss and z-loss, added to row `layer` of `statistics`.

    logits: [..., E], the scores given to `route`. experts: [..., k] of int32 or int64, from `route`.
    statistics: the result of the preceding layer with experts, [layers, S]; None means zeros. The tensor is not
        written.
    load: [B, E] from `sequence_load`, for logits [B, T, E]. None: no load.
    layer, layers: this layer's row, and the number of rows: one for each layer with experts.
    Returns [layers, S] in float32; in float64 for float64 logits. S is 2 * E + 1; 2 * E + 2 with `load`. The row has
    [0 : E], how often each expert was chosen, exact below 2**24 times;
    [E : 2 * E], the sum over tokens of softmax(logits) (Fedus et al. 2021);
    [2 * E], the sum over tokens of logsumexp(logits)**2 (z-loss, Zoph et al. 2022);
    [2 * E + 1], with `load`, the sum over tokens and experts of softmax(logits) * load / T, where the load is of the
    token's sequence (the sequence-wise loss of DeepSeek-V3, arXiv:2412.19437).
    A model passes the result of a layer to the next: autograd then leads from the last result to every layer's logits.
    Gradients: of the logits, through all sums but the first; of `statistics`. Saved for backward: the logits and the
    load.

    Layouts: logits and experts are sharded on the same dims of tokens. The output and `statistics` are Partial(sum)
    over the axes which shard tokens, and replicated over the remaining axes. The load is sharded on B as the logits,
    and replicated over the remaining axes: reshard the Partial result of `sequence_load`.
    Communication: none.
    Raises LayoutError for any other layouts; ValueError for mismatched shapes, other dtypes, a layer outside 0 to
    layers - 1, tensors on two devices, and on a CPU for an expert outside 0 to E - 1.
    """
    names = ("logits", "experts", "statistics", "load")
    check_operands("router_statistics", names, 2, logits, experts, statistics, load)
    check_floats("router_statistics", ("logits", "load"), logits, load)
    check_experts("router_statistics", experts)
    if logits.ndim < 1 or logits.shape[:-1] != experts.shape[:-1]:
        raise ValueError(
            f"router_statistics takes logits [..., E] and experts [..., k] of the same tokens, got "
            f"{tuple(logits.shape)} and {tuple(experts.shape)}; reshape one"
        )
    if load is not None and (logits.ndim != 3 or load.shape != (logits.shape[0], logits.shape[2])):
        raise ValueError(
            f"router_statistics takes a load [B, E] for logits [B, T, E], got {tuple(load.shape)} and "
            f"{tuple(logits.shape)}; give the result of sequence_load for the same sequences"
        )
    if not (is_int(layers) and layers >= 1):
        raise ValueError(f"router_statistics: layers is {described(layers)}; give the number of layers, 1 or more")
    if not (is_int(layer) and 0 <= layer < layers):
        raise ValueError(f"router_statistics: layer is {described(layer)} of {layers} layers; give 0 to {layers - 1}")
    if statistics is not None:
        wanted, dtype = (layers, 2 * logits.shape[-1] + 1 + (load is not None)), wide_dtype(logits)
        if statistics.shape != wanted or statistics.dtype != dtype:
            raise ValueError(
                f"router_statistics: the statistics are {tuple(statistics.shape)} of {statistics.dtype}; give {wanted} "
                f"of {dtype}, for {layers} layers of {logits.shape[-1]} experts"
            )
    length = 0 if load is None else logits.shape[1]
    return apply(STATISTICS, logits, experts, statistics, load, layer=layer, layers=layers, length=length)


def _route_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `ROUTE`. layouts, shapes: of scores and bias."""
    scores, bias = layouts
    shape = shapes[0]
    assert scores is not None and shape is not None, "the scores are given"
    output = infer.whole("route", "the scores", scores, len(shape) - 1)
    if bias is not None and bias != Layout(bias.mesh):
        wanted = Layout(bias.mesh)
        raise LayoutError(f"route: the bias is ({bias}), but each token needs all of it; reshard it to ({wanted})")
    chosen = (*shape[:-1], options["k"])

    def gradient_layouts(grad: Layout, of_experts: None) -> tuple[Layout | None, ...]:
        return infer.gradient(output, grad, scores, (scores,)), None

    return Sharding(output, chosen, gradient_layouts, further_outputs=((output, chosen),))


def _load_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `SEQUENCE_LOAD`. layouts, shapes: of the experts."""
    experts, shape = layouts[0], shapes[0]
    assert experts is not None and shape is not None, "the experts are given"
    infer.whole("sequence_load", "the experts", experts, 2)
    rows, tokens = (experts.shard_order.get(dim, ()) for dim in (0, 1))
    output = Layout.in_order(experts.mesh, dict.fromkeys(rows, Shard(0)) | dict.fromkeys(tokens, Partial("sum")))
    return Sharding(output, (shape[0], options["num_experts"]), lambda grad: (None,))


def _statistics_rule(layouts: tuple[Layout | None, ...], shapes: Shapes, options: dict[str, Any]) -> Sharding:
    """The layout rule of `STATISTICS`. layouts, shapes: of logits, experts, the layers before, and the load."""
    logits, experts, statistics, load = layouts
    shape = shapes[0]
    assert logits is not None and experts is not None and shape is not None, "logits and experts are given"
    tokens = len(shape) - 1
    infer.whole("router_statistics", "the logits", logits, tokens)
    infer.elementwise("router_statistics", False, logits, experts, operands=("the logits", "the experts"))
    sharded = [axis for axes in logits.shard_order.values() for axis in axes]
    output = Layout(logits.mesh, dict.fromkeys(sharded, Partial("sum")))
    if statistics is not None and statistics != output:
        raise LayoutError(
            f"router_statistics: the statistics are ({statistics}), but the sums of logits ({logits}) are ({output}); "
            f"give the statistics of the preceding layer, or reshard them to ({output})",
            (logits, experts, output),
        )
    if load is not None:
        wanted = Layout.in_order(logits.mesh, dict.fromkeys(logits.shard_order.get(0, ()), Shard(0)))
        if load != wanted:
            raise LayoutError(
                f"router_statistics: the load is ({load}), but each rank needs the load over all tokens of its "
                f"sequences; the logits are ({logits}); reshard the load to ({wanted})",
                (wanted,),
            )
    operands = (logits,) if statistics is None else (logits, statistics)

    def gradient_layouts(grad: Layout) -> tuple[Layout | None, ...]:
        return (
            infer.gradient(output, grad, logits, operands),
            None,
            None if statistics is None else infer.gradient(output, grad, statistics, operands),
            None,
        )

    return Sharding(output, (options["layers"], 2 * shape[-1] + 1 + (load is not None)), gradient_layouts)


ROUTE = Op(
    "route",
    function.route,
    function.route_backward,
    _route_rule,
    lambda dtype, options: (torch.promote_types(dtype, torch.float32), torch.int32),
    num_constants=lambda options: 1,
)
SEQUENCE_LOAD = Op(
    "sequence_load",
    function.sequence_load,
    function.sequence_load_backward,
    _load_rule,
    lambda dtype, options: torch.float32,
    num_constants=lambda options: 1,
)
STATISTICS = Op(
    "router_statistics",
    function.statistics,
    function.statistics_backward,
    _statistics_rule,
    lambda dtype, options: torch.promote_types(dtype, torch.float32),
)
