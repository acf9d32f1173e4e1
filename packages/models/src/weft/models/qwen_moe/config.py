"""The config of a Qwen 3 with mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..checks import check_coefficients, check_sizes
from ..config import BlockOptions, ExpertOptions, MixtureConfig, RouterScore, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenMoeConfig(MixtureConfig):
    """Sizes and constants of a Qwen 3 with experts. Raises ValueError where sizes or options do not fit together.

    The options from `router_score` on go beyond Hugging Face's Qwen3Moe: a model with any of these options is saved
    with model_type weft_moe, which Weft alone reads.
    """

    moe_intermediate_size: int
    """Width inside an expert; intermediate_size is the width inside the MLPs of dense layers."""
    decoder_sparse_step: int = 1
    """A layer has experts where its number, counted from 1, is a multiple of this step."""
    mlp_only_layers: Annotated[tuple[int, ...], shown("INT", "no layer")] = ()
    """Further layers with a dense MLP, counted from 0."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum."""
    attention_bias: bool = False
    """Biases in all of the attention's projections."""
    sliding_window: int = 0
    """In all layers, the number of most recent keys visible to a query; 0: every key up to the query's own."""
    router_score: RouterScore = "softmax"
    """The function that makes scores of the router's logits."""
    softmax_after: bool = False
    """Weights of experts: a softmax over the logits of a token's chosen experts alone."""
    router_scale: float = 1.0
    """Multiplies the weights of experts."""
    router_bias_rate: float = 0.0
    """Above 0: balance experts by a bias in the choice, changed by this rate after each step, as in DeepSeek-V3."""
    expert_groups: Annotated[tuple[int, int] | None, shown("GROUPS CHOSEN", "no groups")] = None
    """The number of groups of experts, and of groups from which a token's experts are chosen; None: no groups."""
    shared_expert_size: int = 0
    """Width inside a further expert that every token passes; 0: none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by a sigmoid of a product of the token, as in Qwen 2."""

    def __post_init__(self) -> None:
        MixtureConfig.__post_init__(self)
        check_sizes(self, "moe_intermediate_size", "decoder_sparse_step")
        if self.sliding_window != 0:
            check_sizes(self, "sliding_window")
        layers = self.mlp_only_layers
        if [*layers] != sorted(set(layers)) or any(layer not in range(self.num_layers) for layer in layers):
            raise ValueError(
                f"QwenMoeConfig: mlp_only_layers is {layers}; give each layer once, in order, of 0 to "
                f"{self.num_layers - 1}"
            )
        if not self.sparse_layers:
            raise ValueError(
                f"QwenMoeConfig: decoder_sparse_step {self.decoder_sparse_step} and mlp_only_layers {layers} leave no "
                f"layer with experts, of {self.num_layers} layers; lower the step, shorten the list, or make a Qwen"
            )
        check_coefficients("QwenMoeConfig", self, "router_bias_rate")
        try:
            self._experts()
        except ValueError as error:
            raise ValueError(f"QwenMoeConfig: {error}") from None

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return "Qwen 3 MoE"

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a mixture of experts, ascending; the rest are dense."""
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return tuple(i for i in range(self.num_layers) if (i + 1) % step == 0 and i not in dense)

    @property
    def bias_rate(self) -> float:
        """How much a correction bias changes after each step; 0 without correction biases."""
        return self.router_bias_rate

    @property
    def is_hugging_face(self) -> bool:
        """Whether Hugging Face's Qwen3Moe has the options in use."""
        plain = ExpertOptions(
            intermediate_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            normalize=self.norm_topk_prob,
        )
        return self._experts() == plain

    def block(self, index: int) -> BlockOptions:
        """The options of block `index`."""
        return BlockOptions(
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            qk_norm=True,
            window=self.sliding_window or None,
            experts=self._experts() if index in self.sparse_layers else None,
        )

    def _experts(self) -> ExpertOptions:
        return ExpertOptions(
            intermediate_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            score=self.router_score,
            softmax_after=self.softmax_after,
            normalize=self.norm_topk_prob,
            scale=self.router_scale,
            correction_bias=self.router_bias_rate > 0,
            groups=self.expert_groups,
            shared_size=self.shared_expert_size,
            shared_gate=self.shared_expert_gate,
        )

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Name -> size, of the sizes divided by tensor parallelism."""
        names = ["num_heads", "num_kv_heads", "hidden_size", "moe_intermediate_size"]
        if len(self.sparse_layers) < self.num_layers:
            names.append("intermediate_size")
        if self.shared_expert_size:
            names.append("shared_expert_size")
        return {name: getattr(self, name) for name in names}
