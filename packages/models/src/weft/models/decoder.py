"""The shared body of decoder-only models, and the decoder of the families with rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Generic, Self, TypeVar

from torch import Tensor, nn
from weft import kernels
from weft.kernels import KeyValueCache
from weft.kernels.extension import has_data, is_compiling

from .blocks import Attention, Block, GatedMLP
from .config import MixtureConfig, ModelConfig, RotaryConfig
from .experts import MixtureBlock, MixtureOfExperts
from .initialization import Constant, Initial, Normal
from .layers import DotProductAttention, Dropout, Embedding, Head, Linear, RMSNorm
from .parallel.plan import ParallelPlan
from .parallel.styles import (
    CONTEXT_AXIS,
    TENSOR_AXIS,
    ColwiseParallel,
    ExpertParallel,
    PrepareOutput,
    RowwiseParallel,
    Style,
    VocabParallel,
)
from .rope import compute_rotary_frequencies, compute_rotary_tables, length_of, rotary_frequencies, rotary_tables

TENSOR_STYLES: dict[str, Style] = {
    "embed_tokens": VocabParallel(),
    "layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(),
}

AnyConfig = TypeVar("AnyConfig", bound=ModelConfig)
AnyRotaryConfig = TypeVar("AnyRotaryConfig", bound=RotaryConfig)
AnyMixtureConfig = TypeVar("AnyMixtureConfig", bound=MixtureConfig)


class CausalModel(nn.Module, Generic[AnyConfig]):
    """Decoder-only model: tokens [B, T] int64 -> logits [B, T, V]. Base class of every family.

    Made of embeddings, blocks with key-value caches, a final norm and a head, which may share the embedding's table.
    """

    lm_head: Linear
    residual_outputs: tuple[str, ...]  # name endings of the weights that write into the residual stream

    def __init__(self, config: AnyConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def embedding(self) -> Embedding:
        """The token table, which the head may share."""
        raise NotImplementedError

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        raise NotImplementedError

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For `ParallelPlan.windows`: each layer's attention window, or None; () if no layer has a window."""
        attends = [each for each in self.modules() if isinstance(each, DotProductAttention)]
        windows = tuple([each.window for each in attends])
        return windows if any(windows) else ()

    @property
    def final_norm(self) -> nn.Module:
        """The norm before the head."""
        raise NotImplementedError

    def embed(
        self, tokens: Tensor, positions: Tensor | None, first: int, dropout_key: int | Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The input of the first block [B, T, H], and further arguments for every block.

        positions: as for `forward`; None: counted from `first`. dropout_key: as for `forward`.
        """
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        dropout_key: int | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Sequence[KeyValueCache] | None = None,
        last: bool = False,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Computes logits [B, T, V] of tokens [B, T]; with `targets`, the tokens' losses [B, T].

        dropout_key: of this step and microbatch, see `kernels.dropout`; None where nothing is dropped.
        positions: [B, T] ints, each token's position; None: counted from 0, or from the end of `cache`.
        documents: [B, T] ints; tokens attend only to tokens with the same number, as in packed rows. With a cache:
            [B, capacity], see `kernels.attention`. None: every row is one document.
        cache: from `make_cache`; extended by the tokens' keys and values. None: the call has all tokens.
        last: compute only the last position's logits, [B, 1, V]. Not for a model on a mesh.
        targets: [B, T] ints, the token to predict at each place, -100 at places without a target. The result is then
            the negative log-probability of each target, at least float32, and 0 at places without. The full logits
            are in memory only if `lm_head` has an adapter or a further forward hook, or is no `layers.Head`.
        On a mesh, tokens, targets, positions and documents have the same layout.
        """
        if isinstance(documents, Tensor) and not cache:
            documents = kernels.document_bounds(documents)  # once, for the attention of all blocks
        x, block_inputs = self.embed(tokens, positions, cache[0].length if cache else 0, dropout_key)
        for i, block in enumerate(self.blocks):
            x = block(x, *block_inputs, dropout_key, documents, cache[i] if cache else None)
        return self._apply_head(x[:, -1:] if last else x, targets)

    def _apply_head(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """The logits of the last block's output x [B, T, H]; with targets, the tokens' losses [B, T]."""
        normed, head = self.final_norm(x), self.lm_head
        if targets is None:
            logits: Tensor = head(normed)  # [B, T, V]
            return logits
        if targets.shape != x.shape[:2]:
            raise ValueError(
                f"the targets have shape {tuple(targets.shape)}, but there are outputs for {tuple(x.shape[:2])}; give "
                f"a target for each token, -100 for tokens without one, and leave out last=True"
            )
        if isinstance(head, Head) and not head._forward_hooks:
            losses: Tensor = head(normed, targets)  # [B, T]
            return losses
        # A forward hook, such as an adapter's, changes the logits.
        return kernels.cross_entropy(head(normed), targets, reduction="none")

    def make_cache(self, capacity: int) -> list[KeyValueCache]:
        """One cache for each block, with room for `capacity` tokens a row."""
        return [KeyValueCache(capacity) for _ in self.blocks]

    def initial_value(self, name: str) -> Initial:
        """The initial value of parameter `name`: norms 1, biases 0, weights normal with initializer_range.

        The weights in `residual_outputs` are scaled by 1 / sqrt(2 * num_layers), so the variance of the residual
        stream does not grow with depth (Radford et al. 2019, section 2.3).
        """
        if name.endswith(".bias"):
            return Constant(0.0)
        if self.get_parameter(name).ndim == 1:
            return Constant(1.0)
        std = self.config.initializer_range
        if name.endswith(self.residual_outputs):
            std /= math.sqrt(2 * self.config.num_layers)
        return Normal(std)

    def _tie(self) -> None:
        """Shares the embedding's table with the head where the config says so. Called after both are made."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty() and to() replace a tied weight by two separate parameters; tie them again.
        tied = self.lm_head.weight is self.embedding.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if tied:
            self.lm_head.weight = self.embedding.weight
        return self


class Decoder(CausalModel[AnyRotaryConfig]):
    """Decoder with rotary positions, RMS pre-norms and gated MLPs: tokens [B, T] int64 -> logits [B, T, V]."""

    residual_outputs: tuple[str, ...] = ("o_proj.weight", "down_proj.weight")

    def __init__(self, config: AnyRotaryConfig) -> None:
        super().__init__(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.dropout = Dropout(config.dropout, "dropout")
        self.layers = nn.ModuleList(_block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self._tie()

    @property
    def reads_other_rows(self) -> bool:
        """Whether rows depend on each other, see `row_independent`: dynamic rope scaling reads the longest row."""
        return self.config.rotary.depends_on_length

    @property
    def embedding(self) -> Embedding:
        """The token table, which the head may share."""
        return self.embed_tokens

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks, in order."""
        return self.layers

    @property
    def final_norm(self) -> RMSNorm:
        """The norm before the head."""
        return self.norm

    def embed(
        self, tokens: Tensor, positions: Tensor | None, first: int, dropout_key: int | Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The tokens' embeddings [B, T, H], and for every block the cosine and sine of the rotary angles.

        Arguments: as for `CausalModel.embed`.
        """
        block_inputs = self._tables(tokens, positions, first)
        return self.dropout(self.embed_tokens(tokens), dropout_key), block_inputs

    def _tables(self, tokens: Tensor, positions: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the tokens' angles: [T, D // 2] or [B, T, D // 2]. first: the first token's position."""
        rotary = self.config.rotary
        use_cached = not is_compiling() and has_data(tokens)
        if positions is not None:
            if rotary.depends_on_length:
                frequencies = compute_rotary_frequencies(rotary, tokens.device, length_of(positions))
            else:
                frequencies = (rotary_frequencies if use_cached else compute_rotary_frequencies)(rotary, tokens.device)
            return kernels.rope_tables(positions, frequencies, scale=rotary.table_scale)
        stop = first + tokens.shape[-1]
        rows = 1 << max(0, stop - 1).bit_length()  # round up to a power of two, to cache few different tables
        length = stop if rotary.depends_on_length and stop > rotary.max_seq_len else None
        cos, sin = (rotary_tables if use_cached else compute_rotary_tables)(rotary, rows, tokens.device, length)
        return cos[first:stop], sin[first:stop]


class MixtureDecoder(Decoder[AnyMixtureConfig]):
    """Decoder whose MLPs are mixtures of experts, in all layers or some: tokens [B, T] int64 -> logits [B, T, V]."""

    residual_outputs = (*Decoder.residual_outputs, "experts.down_proj")

    def forward(
        self,
        tokens: Tensor,
        dropout_key: int | Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Sequence[KeyValueCache] | None = None,
        last: bool = False,
        targets: Tensor | None = None,
        router: bool = False,
    ) -> Any:
        """Computes logits [B, T, V] of tokens [B, T], or losses [B, T]; with `router`, the pair (these, statistics).

        statistics: float32 [layers with experts, 2 * E + 1], the sums over tokens that `RouterLosses` takes: for each
            expert, the number of its tokens and the sum of its softmax probabilities; the sum of squared logsumexps.
            On a mesh, Partial over the axes that shard the tokens. With `MixtureConfig.seq_aux`, a further column.
        Further arguments: as for `CausalModel.forward`.
        """
        if isinstance(documents, Tensor) and not cache:
            documents = kernels.document_bounds(documents)  # once, for the attention of all blocks
        x, block_inputs = self.embed(tokens, positions, cache[0].length if cache else 0, dropout_key)
        statistics: Tensor | None = None
        for i, block in enumerate(self.layers):
            x, statistics = block(
                x, statistics, *block_inputs, dropout_key, documents, cache[i] if cache else None, router
            )
        output = self._apply_head(x[:, -1:] if last else x, targets)
        return (output, statistics) if router else output

    def initial_value(self, name: str) -> Initial:
        """As `CausalModel.initial_value`; correction biases are 0."""
        return Constant(0.0) if name.endswith("correction_bias") else super().initial_value(name)

    def parallel_plan(self) -> ParallelPlan:
        """The default plan of `parallelize`."""
        config = self.config
        styles: dict[str, Style | PrepareOutput] = {
            pattern: style for pattern, style in TENSOR_STYLES.items() if ".mlp." not in pattern
        }
        mlps = {pattern: style for pattern, style in TENSOR_STYLES.items() if ".mlp." in pattern}
        if len(config.sparse_layers) < config.num_layers:
            styles |= mlps
        if config.sparse_layers:
            styles["layers.*.mlp.experts"] = ExpertParallel()
            if config.seq_aux:
                styles["layers.*.mlp.sequence_load"] = PrepareOutput({CONTEXT_AXIS: "R", TENSOR_AXIS: "R"})
            if any(isinstance(each, MixtureOfExperts) and each.shared_expert is not None for each in self.modules()):
                styles |= {pattern.replace(".mlp.", ".mlp.shared_expert."): style for pattern, style in mlps.items()}
        return ParallelPlan(tensor=styles)


def _block(config: RotaryConfig, index: int) -> Block:
    options, name = config.block(index), f"layers.{index}"
    attention = Attention(
        config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=options.qkv_bias,
        output_bias=options.output_bias,
        qk_norm_eps=config.norm_eps if options.qk_norm else None,
        window=options.window,
        dropout=config.attention_dropout,
        name=f"{name}.self_attn",
    )
    settings: dict[str, Any] = {"norm_eps": config.norm_eps, "dropout": config.dropout, "name": name}
    if options.experts is not None:
        assert isinstance(config, MixtureConfig), "a block with experts is of such a config"
        row: dict[str, Any] = {"layer": config.sparse_layers.index(index), "layers": len(config.sparse_layers)}
        experts: dict[str, Any] = asdict(options.experts)
        mixture = MixtureOfExperts(config.hidden_size, **experts, **row, seq_aux=config.seq_aux)
        return MixtureBlock(attention, mixture, **settings)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=options.mlp_bias)
    return (MixtureBlock if isinstance(config, MixtureConfig) else Block)(attention, mlp, **settings)
