"""Mixtures of experts: a layer where a router sends each token to a few gated MLPs, and the block with this layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache

from .blocks import Block, GatedMLP, add_and_norm
from .config import ExpertOptions, RouterScore
from .layers import Linear
from .low_rank import LowRankExperts


class Experts(nn.Module):
    """The experts of a mixture, as stacked matrices: each expert is a gated MLP, down(silu(gate(x)) * up(x)).

    The parameters start unset, as `Linear`'s.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        E, H, I = num_experts, hidden_size, intermediate_size
        self.gate_proj, self.up_proj = (nn.Parameter(torch.empty(E, I, H)) for _ in range(2))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))
        self.lora: LowRankExperts | None = None  # set by `lora`

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, rows: int | None = None) -> Tensor:
        """x [B, T, H], experts [B, T, k] int32, weights [B, T, k] -> [B, T, H].

        A token's output is the weighted sum of the outputs of the token's k experts. No token is dropped.
        rows: under expert parallelism, for how many choices `kernels.experts` allocates memory: at least the choices in
            `experts` that are experts of this module. None: all choices may be.
        """
        projections = self.gate_proj, self.up_proj, self.down_proj
        if self.lora is not None and self.lora.active:
            adapted: Tensor = self.lora(x, experts, weights, *projections, rows)
            return adapted
        output: Tensor = kernels.experts(x, experts, weights, *projections, rows=rows)
        return output

    def announce_choices(self, x: Tensor, experts: Tensor) -> None:
        """Called by `MixtureOfExperts` as soon as the router has chosen. Does nothing here.

        `parallelize` replaces this method for experts sharded over "ep": the ranks then start to exchange how many
        tokens each will send. x [B, T, H], experts [B, T, k].
        """

    def extra_repr(self) -> str:
        E, I, H = self.gate_proj.shape
        return f"{E} experts, {H} -> {I} -> {H}"


class SequenceLoad(nn.Module):
    """Counts each sequence's choices of each expert, for the balance loss of each sequence: `kernels.sequence_load`.

    A module, so that a plan can sum the counts over the ranks that share a sequence.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, experts: Tensor) -> Tensor:
        """experts [B, T, k] -> [B, E] in float32."""
        return kernels.sequence_load(experts, self.num_experts)


class MixtureOfExperts(nn.Module):
    """A mixture of experts in the place of an MLP: a router chooses `experts_per_token` experts for each token.

    hidden_size: width of the tokens. intermediate_size to experts_per_token, and score to shared_gate: see
        `ExpertOptions`, which checks the values.
    layer, layers: this layer's row in the router's statistics, and the number of rows; see `forward`.
    seq_aux: count each sequence's load for the router's statistics, which then have a further column.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        *,
        score: RouterScore = "softmax",
        softmax_after: bool = False,
        normalize: bool = True,
        scale: float = 1.0,
        correction_bias: bool = False,
        groups: tuple[int, int] | None = None,
        shared_size: int = 0,
        shared_gate: bool = False,
        layer: int = 0,
        layers: int = 1,
        seq_aux: bool = False,
    ) -> None:
        super().__init__()
        self.options = options = ExpertOptions(
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            score=score,
            softmax_after=softmax_after,
            normalize=normalize,
            scale=scale,
            correction_bias=correction_bias,
            groups=groups,
            shared_size=shared_size,
            shared_gate=shared_gate,
        )
        self.layer, self.layers = layer, layers
        self.gate = Linear(hidden_size, num_experts, bias=False)
        self.sequence_load = SequenceLoad(num_experts) if seq_aux else None
        self.correction_bias = None
        if options.correction_bias:  # not trained by gradients: see `update_correction_biases`
            self.correction_bias = nn.Parameter(torch.empty(num_experts), requires_grad=False)
        self.experts = Experts(hidden_size, intermediate_size, num_experts)
        self.shared_expert = GatedMLP(hidden_size, shared_size, bias=False) if shared_size else None
        self.shared_expert_gate = Linear(hidden_size, 1, bias=False) if shared_gate else None

    def forward(
        self, x: Tensor, statistics: Tensor | None = None, router: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, H] -> ([B, T, H], statistics).

        statistics: [layers, 2 * E + 1], with `seq_aux` [layers, 2 * E + 2], of the layers before; None: zeros.
        router: whether to return `statistics` with row `layer` added, see `kernels.router_statistics`. False:
            `statistics` is returned unchanged.
        """
        options = self.options
        logits = self.gate(x)  # [B, T, E]
        experts, weights = kernels.route(
            logits,
            options.experts_per_token,
            score=options.score,
            softmax_after=options.softmax_after,
            normalize=options.normalize,
            bias=self.correction_bias,
            scale=options.scale,
            groups=options.groups,
        )  # [B, T, k]
        if router:
            load = None if self.sequence_load is None else self.sequence_load(experts)
            statistics = kernels.router_statistics(
                logits, experts, statistics, load, layer=self.layer, layers=self.layers
            )
        self.experts.announce_choices(x, experts)
        shared = None if self.shared_expert is None else self.shared_expert(x)
        if shared is not None and self.shared_expert_gate is not None:
            shared = kernels.sigmoid_gate(shared, self.shared_expert_gate(x))
        output = self.experts(x, experts, weights)
        return (output if shared is None else kernels.add(output, shared)), statistics

    def extra_repr(self) -> str:
        return f"{self.options.experts_per_token} experts per token, score={self.options.score}"


class MixtureBlock(Block):
    """A transformer block of a model with mixtures of experts: the MLP is a mixture, or a dense `GatedMLP`.

    Router statistics pass through the block beside the residual stream: stages of a pipeline then hand on both.
    """

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        statistics: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        dropout_key: int | Tensor | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        router: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(x [B, T, H], statistics) -> (x, statistics).

        statistics, router: as for `MixtureOfExperts.forward`; a dense layer returns `statistics` unchanged.
        Further arguments: as for `Attention`.
        """
        mixed = self.self_attn(self.input_layernorm(x), cos, sin, dropout_key, documents, cache)
        x, normed = add_and_norm(self.self_attn_dropout, self.post_attention_layernorm, mixed, x, dropout_key)
        mlp: Any = self.mlp
        if isinstance(mlp, MixtureOfExperts):
            output, statistics = mlp(normed, statistics, router)
        else:
            output = mlp(normed)
        return self.mlp_dropout(output, dropout_key, residual=x), statistics
