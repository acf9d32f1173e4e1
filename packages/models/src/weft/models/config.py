"""The config classes shared by the model families, mixtures of experts included. Making a config checks its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .checks import (
    check_coefficients,
    check_counts,
    check_kinds,
    check_positive,
    check_probabilities,
    check_sizes,
    check_table,
)
from .rope_scaling import DynamicRopeScaling, RopeScaling, Rotary

MOST_POSITIONS = 2**24  # of a rotary model: float32 holds no further whole numbers, in which angles are computed
RouterScore = Literal["softmax", "sigmoid"]  # the function that makes scores of a router's logits


def shown(metavar: str, default: str, name: str | None = None) -> Any:
    """Metadata by which `weft train --help` shows an option's default in words; None without tyro.

    metavar: the option's value in the help, as "INT". default: the default in words, as "no layer".
    name: the option's name where it differs from the field's, as for a Python keyword.
    """
    try:
        from tyro.conf import arg
    except ModuleNotFoundError:
        return None
    return arg(name=name, metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of every model family."""

    vocab_size: int
    """Size of the vocabulary."""
    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Transformer blocks."""
    num_heads: int
    """Query heads."""
    max_seq_len: int = 2048
    """Tokens in the longest sequence used in training."""
    tie_embeddings: bool = False
    """Share one table between the embedding and the output."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        check_kinds(None, self)
        check_sizes(self, "vocab_size", "hidden_size", "max_seq_len")
        check_counts(self, "num_layers", "num_heads")
        check_table(self, "vocab_size", "hidden_size")
        if self.initializer_range != 0:
            check_positive(self, "initializer_range")

    @property
    def title(self) -> str:
        """The family's name in messages."""
        return type(self).__name__.removesuffix("Config")

    @property
    def is_length_independent(self) -> bool:
        """Whether raising max_seq_len keeps the model's function. False, unless a family overrides this property."""
        return False

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied table counts once."""
        raise NotImplementedError

    @property
    def num_looked_up(self) -> int:
        """Parameters in tables that no product reads: the embedding's, unless the head shares the table."""
        return 0 if self.tie_embeddings else self.vocab_size * self.hidden_size

    @property
    def num_multiplied(self) -> int:
        """Parameters in the matrix products of a token. Estimates of a step's operations count these."""
        return self.num_parameters - self.num_looked_up

    @property
    def num_in_tables(self) -> int:
        """Parameters in the tables of the embedding and the output; a tied table counts once."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    @property
    def attention_width(self) -> int:
        """Features of all query heads together."""
        return self.hidden_size

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Name -> size, of the sizes divided by tensor parallelism, which must be divisible."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """The sizes of a mixture of experts, and how its router chooses and weights experts.

    A token's experts are the `experts_per_token` with the highest scores. Raises ValueError for options that do not
    fit together.
    """

    intermediate_size: int  # width inside an expert
    num_experts: int
    experts_per_token: int
    score: RouterScore = "softmax"  # of the router's logits
    softmax_after: bool = False  # weights: a softmax of the chosen experts' logits alone
    normalize: bool = True  # divide a token's weights by their sum
    scale: float = 1.0  # multiplies the weights
    correction_bias: bool = False  # a number for each expert, added to the scores for the choice, not in the weights
    groups: tuple[int, int] | None = None  # (groups of experts, groups of which a token's experts are chosen)
    shared_size: int = 0  # width inside an expert that every token passes; 0: none
    shared_gate: bool = False  # multiply the shared expert's output by sigmoid of a product of the token

    def __post_init__(self) -> None:
        check_kinds(None, self)
        check_sizes(self, "intermediate_size")
        check_counts(self, "num_experts", "experts_per_token")
        check_table(self, "num_experts", "intermediate_size")
        check_positive(self, "scale")
        where, E, k = type(self).__name__, self.num_experts, self.experts_per_token
        if k > E:
            raise ValueError(
                f"{where}: experts_per_token {k} is above num_experts {E}; a token's experts are distinct: give at "
                f"most {E}"
            )
        if self.softmax_after and self.score != "softmax":
            raise ValueError(
                f"{where}: softmax_after is an option of score 'softmax', not of {self.score!r}; leave it out"
            )
        if self.groups is not None:
            _check_groups(where, self.groups, E, k)
        if self.shared_size != 0:
            check_sizes(self, "shared_size")
        elif self.shared_gate:
            raise ValueError(
                f"{where}: shared_gate is on without a shared expert; give shared_size, or leave the gate out"
            )

    def num_parameters(self, hidden_size: int, *, experts: int | None = None) -> int:
        """Parameters of the mixture, its router included. experts: how many experts count; None: all."""
        experts = self.num_experts if experts is None else experts
        shared = 3 * hidden_size * self.shared_size + self.shared_gate * hidden_size
        router = self.num_experts * (hidden_size + self.correction_bias)
        return router + 3 * hidden_size * self.intermediate_size * experts + shared


def _check_groups(where: str, groups: tuple[int, int], E: int, k: int) -> None:
    """Raises ValueError unless E experts divide into the groups, and the chosen groups hold k experts."""
    count, chosen = groups
    degrees = [n for n in range(1, E // 2 + 1) if E % n == 0]
    if count < 1 or E % count or E // count < 2:
        raise ValueError(
            f"{where}: groups {count} do not divide num_experts {E} into groups of two or more; use one of {degrees}"
        )
    if not 1 <= chosen <= count or chosen * (E // count) < k:
        least = -(-k // (E // count))
        raise ValueError(
            f"{where}: {chosen} of {count} groups of {E // count} experts are chosen, for experts_per_token {k}; "
            f"choose {least} to {count}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """The options in which blocks of the rotary families differ."""

    qkv_bias: bool = False  # in the query, key and value projections
    output_bias: bool = False  # in the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # norms of query and key heads
    window: int | None = None  # the number of most recent keys visible to a query; None: all
    experts: ExpertOptions | None = None  # of the mixture in the MLP's place; None: a dense MLP


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig(ModelConfig):
    """Sizes and constants of the families with rotary positions, RMS norms and gated MLPs."""

    intermediate_size: int
    """Width inside the MLPs."""
    num_kv_heads: int = 0
    """Key and value heads, each shared by a group of query heads; 0: as many as query heads."""
    head_dim: int = 0
    """Width of a head; 0: hidden_size / num_heads."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary wavelengths for longer contexts."""
    norm_eps: float = 1e-6
    """Epsilon added to the mean square in norms."""
    attention_dropout: float = 0.0
    """Probability of zeroing an attention weight."""
    dropout: float = 0.0
    """Probability of zeroing an element of the embedding's output and of each block's residual additions."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        where = type(self).__name__
        check_sizes(self, "intermediate_size")
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"{where}: hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; "
                    f"change one, or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        check_counts(self, "num_kv_heads")
        check_sizes(self, "head_dim")
        check_table(self, "hidden_size", "num_heads", "head_dim")
        check_table(self, "hidden_size", "intermediate_size")
        if self.num_heads % self.num_kv_heads:
            degrees = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"{where}: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                f"use one of {degrees}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"{where}: head_dim {self.head_dim} is odd, but rotary embedding rotates pairs of elements; make it "
                f"even"
            )
        check_positive(self, "rope_theta", "norm_eps")
        check_probabilities(self, "attention_dropout", "dropout")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(
                f"{where}: rope_scaling is {self.rope_scaling!r}; give a Llama3RopeScaling or another scaling of "
                f"weft.models, or None"
            )
        if isinstance(self.rope_scaling, DynamicRopeScaling) and self.head_dim < 4:
            raise ValueError(
                f"{where}: head_dim {self.head_dim} is too small for dynamic rope scaling; make it 4 or more"
            )

        if (longest := self.rotary.longest) > MOST_POSITIONS:
            raise ValueError(
                f"{where}: the longest context is {longest:,} tokens, by max_seq_len and rope_scaling; it may be "
                f"{MOST_POSITIONS:,} at most: beyond, float32 angles cannot tell positions apart"
            )

    @property
    def is_length_independent(self) -> bool:
        """Whether raising max_seq_len keeps the model's function: not with dynamic scaling of its wavelengths."""
        return not isinstance(self.rope_scaling, DynamicRopeScaling)

    @property
    def rotary(self) -> Rotary:
        """The settings of the rotary tables."""
        return Rotary(
            head_dim=self.head_dim, theta=self.rope_theta, max_seq_len=self.max_seq_len, scaling=self.rope_scaling
        )

    def block(self, index: int) -> BlockOptions:
        """The options of block `index`."""
        raise NotImplementedError

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied table counts once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return tables + sum(self._block_parameters(i) for i in range(self.num_layers)) + self.hidden_size

    def _block_parameters(self, index: int) -> int:
        options, H = self.block(index), self.hidden_size
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mlp = 3 * H * self.intermediate_size if options.experts is None else options.experts.num_parameters(H)
        weights = 2 * H * (width + kv_width) + mlp
        biases = options.qkv_bias * (width + 2 * kv_width) + options.output_bias * H
        biases += options.mlp_bias * (2 * self.intermediate_size + H)
        return weights + biases + 2 * H + options.qk_norm * 2 * self.head_dim

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Name -> size, of the sizes divided by tensor parallelism."""
        names = ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size")
        return {name: getattr(self, name) for name in names}


def longest_context(config: Any) -> int:
    """The most tokens of a context: `Rotary.longest`, or max_seq_len of a model without rotary positions.

    config: a `ModelConfig`, or a config of the user's own with the field max_seq_len, and `rotary` if it has one.
    """
    rotary = getattr(config, "rotary", None)
    longest: int = config.max_seq_len if rotary is None else rotary.longest
    return longest


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig(RotaryConfig):
    """Sizes and constants of the families with mixtures of experts, and the coefficients of their routers' losses."""

    num_experts: int
    """Experts of a layer."""
    experts_per_token: int
    """Experts that each token is sent to."""
    router_aux_loss_coef: float = 0.001
    """Coefficient of the balance loss, which is experts_per_token at an even load, and usually more otherwise."""
    seq_aux: bool = False
    """The balance loss is the mean of each sequence's own, as in DeepSeek-V3, and not of the batch's experts."""
    router_z_loss_coef: float = 0.0
    """Coefficient of the mean squared logsumexp of the routers' logits."""

    def __post_init__(self) -> None:
        RotaryConfig.__post_init__(self)
        where = type(self).__name__
        check_counts(self, "num_experts", "experts_per_token")
        check_table(self, "num_experts", "hidden_size", "intermediate_size")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"{where}: experts_per_token {self.experts_per_token} is above num_experts {self.num_experts}; a "
                f"token's experts are distinct: give at most {self.num_experts}"
            )
        check_coefficients(where, self, "router_aux_loss_coef", "router_z_loss_coef")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a mixture of experts, ascending; the rest are dense."""
        return tuple(range(self.num_layers))

    @property
    def bias_rate(self) -> float:
        """The change of a router's correction bias after each step; 0 without correction biases."""
        return 0.0

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters used for a token: `experts_per_token` experts of each sparse layer, and the rest."""
        unused = 0
        for index in self.sparse_layers:
            options = self.block(index).experts
            assert options is not None, "a sparse layer has experts"
            unused += (
                3 * self.hidden_size * options.intermediate_size * (options.num_experts - options.experts_per_token)
            )
        return self.num_parameters - unused

    @property
    def num_multiplied(self) -> int:
        """The number of parameters in matrix products for a token: `num_active_parameters` without looked-up tables."""
        return self.num_active_parameters - self.num_looked_up
