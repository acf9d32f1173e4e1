"""The least communication known for a training step, by formula, beside the communication recorded from the model.

To add a family, add a config to FAMILIES; to add a plan, add a row to ROWS. The formulas use sizes only, and no
layouts, modules or reshard plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from weft.mesh import ProcessMesh
from weft.models import Communication, GPTConfig, LlamaConfig, QwenConfig, lora, record
from weft.models.families import make_model
from weft.models.step.communication import Phase

# Rows, tokens of a row, and bytes of an element of the parameters, gradients and residual stream, which are float32.
B, T, ITEM = 8, 32, 4
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_layers": 1, "num_heads": 8, "max_seq_len": 64, "intermediate_size": 96
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "Llama": LlamaConfig(**SIZES, num_kv_heads=4),
    "Qwen 2": QwenConfig(**SIZES, num_kv_heads=4, version=2),
    "Qwen 3": QwenConfig(**SIZES, num_kv_heads=4),
    "GPT-2": GPTConfig(**SIZES),
}
PARTS = ("block, forward", "block, backward", "ends, forward", "ends, backward", "gradients")  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan on a mesh."""

    name: str
    mesh: dict[str, int]
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)  # the fields which differ from the model's own plan
    lower: bool = False  # whether layers compute in bfloat16, by autocast
    # The rank of adapters beside the query and output projections, or 0. With adapters only the adapters are trained.
    adapters: int = 0

    def size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 if the mesh has no such axis."""
        return self.mesh.get(axis, 1)

    @property
    def item(self) -> int:
        """Bytes of an element of the products' inputs, outputs, and their gradients."""
        return ITEM // 2 if self.lower else ITEM

    @property
    def where(self) -> str:
        """The mesh as text: "dp2 x tp4"."""
        return " x ".join(f"{axis}{size}" for axis, size in self.mesh.items())


ROWS = [
    Row(name="tensor", mesh={"tp": 2}),
    Row(name="tensor", mesh={"dp": 2, "tp": 4}),
    Row(name="tensor, sequence", mesh={"tp": 2}, plan={"sequence": True}),
    Row(name="tensor, sequence", mesh={"dp": 2, "tp": 4}, plan={"sequence": True}),
    Row(name="data", mesh={"dp": 4}),
    Row(name="context by all-gather", mesh={"cp": 4}, plan={"context": "all_gather"}),
    Row(name="context by all-gather, tensor", mesh={"dp": 2, "cp": 2, "tp": 2}, plan={"context": "all_gather"}),
    Row(name="ulysses", mesh={"cp": 4}, plan={"context": "ulysses"}),
    Row(name="ulysses, sequence", mesh={"cp": 2, "tp": 2}, plan={"context": "ulysses", "sequence": True}),
    Row(name="selective recompute", mesh={"tp": 2}, plan={"sequence": True, "recompute": "selective"}),
    Row(name="full recompute", mesh={"tp": 2}, plan={"recompute": "full"}),
    Row(name="full recompute, sequence", mesh={"tp": 2}, plan={"sequence": True, "recompute": "full"}),
    Row(name="full recompute, context", mesh={"cp": 4}, plan={"context": "all_gather", "recompute": "full"}),
    Row(name="adapters", mesh={"dp": 2, "tp": 2}, adapters=4),
    Row(name="adapters, sequence", mesh={"dp": 2, "tp": 2}, plan={"sequence": True}, adapters=4),
    Row(name="bfloat16, tensor", mesh={"dp": 2, "tp": 4}, lower=True),
    Row(name="bfloat16, sequence", mesh={"tp": 2}, plan={"sequence": True, "recompute": "selective"}, lower=True),
    Row(name="bfloat16, all-gather", mesh={"cp": 4}, plan={"context": "all_gather", "recompute": "full"}, lower=True),
    Row(name="bfloat16, ulysses", mesh={"cp": 2, "tp": 2}, plan={"context": "ulysses", "sequence": True}, lower=True),
]


@dataclass(frozen=True, slots=True)
class Amount:
    """The number of collectives by kind, and the bytes which a rank receives in all these collectives."""

    kinds: Counter[str]
    nbytes: float

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())) or "none"
        return f"{kinds}, {self.nbytes:,.0f} B"


def least_of_a_block(config: Any, row: Row, phase: Phase) -> Amount:
    """The least communication of a decoder block, in forward or in backward, which is the dual of forward.

    With full recompute, backward also repeats the communication of forward, except the reduction at the block's end,
    whose result nothing reads again. With selective recompute, products and received tensors are kept, so nothing is
    repeated.

    tp: an all-reduce at the end of the attention and another at the end of the MLP (Shoeybi et al. 2019, figure 4).
    Under sequence parallelism an all-gather and a reduce-scatter, of as many bytes in all, replace each all-reduce
    (Korthikanti et al. 2022, section 4.2.2).
    cp, all-gather: keys and values are gathered together, and their gradients are scattered together.
    cp, ulysses: an all-to-all of queries, keys and values from tokens to heads, and another all-to-all of the output
    back (Jacobs et al. 2023, section 3.2).
    """
    dp, cp, tp = (row.size(axis) for axis in ("dp", "cp", "tp"))
    tokens = B / dp * T / cp  # on a rank
    kinds: Counter[str] = Counter()
    stream, nbytes = tokens * config.hidden_size * row.item, 0.0
    if tp > 1:
        kinds += Counter({"all-gather": 2, "reduce-scatter": 2} if row.plan.get("sequence") else {"all-reduce": 2})
        nbytes += 2 * 2 * (tp - 1) / tp * stream
    width = config.num_heads * config.head_dim / tp
    keys = getattr(config, "num_kv_heads", config.num_heads) * config.head_dim / tp
    if cp > 1 and row.plan["context"] == "all_gather":
        kinds["all-gather" if phase == "forward" else "reduce-scatter"] += 1
        nbytes += (cp - 1) * tokens * 2 * keys * row.item
    elif cp > 1:
        kinds["all-to-all"] += 2
        nbytes += (cp - 1) / cp * tokens * (2 * width + 2 * keys) * row.item
    if row.plan.get("recompute") == "full" and phase == "backward":
        again = least_of_a_block(config, row, "forward")
        kinds, nbytes = kinds + again.kinds, nbytes + again.nbytes
        if tp > 1:
            kinds["reduce-scatter" if row.plan.get("sequence") else "all-reduce"] -= 1
            nbytes -= (1 if row.plan.get("sequence") else 2) * (tp - 1) / tp * stream
    return Amount(kinds, nbytes)


def least_of_the_ends(config: Any, row: Row, phase: Phase) -> Amount:
    """The least communication of a step outside the blocks: in the embedding, the head and the loss.

    tp: the rows which the ranks look up in the embedding are summed once, as at the end of a block. The head's
    backward sums the gradients of the head's input (Shoeybi et al. 2019, section 3). The loss of sharded logits
    gathers 12 bytes, three numbers, for each token and rank.
    Sharded tokens: the loss is summed over the n ranks with different tokens, a single number: 2 (n - 1) / n of its
    bytes, rounded up.
    adapters: backward ends at the adapters of the first block. No gradient of this block's input or of the embedding is
    needed.
    """
    dp, cp, tp = (row.size(axis) for axis in ("dp", "cp", "tp"))
    tokens = B / dp * T / cp  # on a rank
    kinds: Counter[str] = Counter()
    nbytes = 0.0
    part, sequence = (tp - 1) / tp * tokens * config.hidden_size, row.plan.get("sequence")
    if tp > 1 and phase == "forward":
        kinds += Counter({"reduce-scatter": 1, "all-gather": 2} if sequence else {"all-reduce": 1, "all-gather": 1})
        nbytes += part * ITEM + (part * row.item if sequence else part * ITEM) + (tp - 1) * tokens * 12
    elif tp > 1 and not row.adapters:
        kinds += Counter({"reduce-scatter": 1, "all-gather": 1} if sequence else {"all-reduce": 1})
        nbytes += part * row.item + part * (ITEM if sequence else row.item)
    if dp * cp > 1 and phase == "forward":
        kinds["all-reduce"] += 1
        nbytes += math.ceil(2 * (dp * cp - 1) / (dp * cp)) * ITEM
    return Amount(kinds, nbytes)


def least_of_gradients(config: Any, row: Row) -> Amount:
    """The least communication of gradients: an all-reduce over the n ranks which hold addends of the same gradient.

    An all-reduce receives 2 (n - 1) / n of a rank's bytes (Patarasuk and Yuan 2009, theorem 1).
    Parameters sharded by tp, or used alike on every rank of tp: the n ranks are the ranks with different tokens.
    Parameters replicated over tp but applied to shards of tokens or to heads: the n ranks include the ranks of tp.
    The gradients of so small a model fit in one bucket for each of the two kinds.
    """
    data, tp = row.size("dp") * row.size("cp"), row.size("tp")
    whole = _left_whole(config)
    if row.adapters:
        width = config.num_heads * config.head_dim
        each, over_tp = row.adapters * 2 * width / tp, row.adapters * 2 * config.hidden_size
    else:
        over_tp = whole["heads"] + (whole["shards of tokens"] if row.plan.get("sequence") else 0)
        left = sum(whole.values())
        each = (config.num_parameters - left) / tp + left - over_tp
    if tp == 1:
        each, over_tp = each + over_tp, 0
    summed = [(ranks, elements) for ranks, elements in ((data, each), (data * tp, over_tp)) if ranks > 1 and elements]
    nbytes = sum(2 * (ranks - 1) / ranks * elements * ITEM for ranks, elements in summed)
    return Amount(Counter({"all-reduce": len(summed)} if summed else {}), nbytes)


def _left_whole(config: Any) -> dict[str, int]:
    """The number of elements of parameters not sharded by tp, by the activations which the parameters are applied to.

    "shards of tokens": activations which sequence parallelism shards along the tokens.
    "all tokens": the biases of row-parallel layers, whose gradients have all tokens on every rank, because the layer's
    product needs the full upstream gradient.
    """
    H, layers = config.hidden_size, config.num_layers
    norms = (2 * layers + 1) * H
    if isinstance(config, GPTConfig):  # norms of GPT-2 have biases
        return {"shards of tokens": 2 * norms + config.max_seq_len * H, "all tokens": 2 * layers * H, "heads": 0}
    has_head_norms = isinstance(config, QwenConfig) and config.version == 3
    return {"shards of tokens": norms, "heads": 2 * layers * config.head_dim if has_head_norms else 0}


def recorded(config: Any, row: Row) -> Communication:
    """The communication of rank 0 in a step, by `weft.models.record`."""
    with torch.device("meta"):
        model = make_model(config)
    if row.adapters:
        lora(model, row.adapters, 1.0, ["*attn.[qoc]_proj"])
    plan = dataclasses.replace(model.parallel_plan(), **row.plan)  # type: ignore[operator]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=row.lower):
        return record(model, ProcessMesh.grid(**row.mesh), plan, batch=(B, T))


def compared(name: str, row: Row) -> dict[str, tuple[Amount, Amount]]:
    """The recorded and the least communication of a family under a plan, for each of PARTS.

    A block's communication is the difference between models of two blocks and of one block. Gradients are those of one
    block.
    """
    config = FAMILIES[name]
    one, two = (recorded(dataclasses.replace(config, num_layers=count), row) for count in (1, 2))
    found: dict[str, tuple[Amount, Amount]] = {}
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        less, more = (each.select(phase=phase) for each in (one, two))
        second = Amount(more.counts - less.counts, more.nbytes - less.nbytes)  # added by a second block
        rest = Amount(less.counts - second.kinds, less.nbytes - second.nbytes)
        found[f"block, {phase}"] = second, least_of_a_block(config, row, phase)
        found[f"ends, {phase}"] = rest, least_of_the_ends(config, row, phase)
    gradients = one.select(phase="gradients")
    found["gradients"] = Amount(gradients.counts, gradients.nbytes), least_of_gradients(config, row)
    assert found.keys() == set(PARTS), "PARTS names every compared part"
    return found
