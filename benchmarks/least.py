"""The least that is known to do for a training step's communication, by formula, beside what the model itself records.

A family is one more config, a plan one more row. The formulas know sizes alone: no layout, no module, no plan of a reshard.
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

B, T, ITEM = (
    8,
    32,
    4,
)  # rows, tokens in a row, bytes of a float32, in which parameters, their gradients and the residual stream are
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
    """A plan on a mesh. plan: what differs from the model's own. lower: whether layers compute in bfloat16, by autocast.

    adapters: the rank of those that are trained alone, beside the queries' projection and the one that ends the attention.
    """

    name: str
    mesh: dict[str, int]
    plan: dict[str, Any] = dataclasses.field(default_factory=dict)
    lower: bool = False
    adapters: int = 0

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 where there is none."""
        return self.mesh.get(axis, 1)

    @property
    def item(self) -> int:
        """Bytes of an activation that products take or give, and of its gradient."""
        return ITEM // 2 if self.lower else ITEM

    @property
    def where(self) -> str:
        """As "dp2 x tp4"."""
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
    """Collectives by kind, and the bytes that a rank receives by them."""

    kinds: Counter[str]
    nbytes: float

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())) or "none"
        return f"{kinds}, {self.nbytes:,.0f} B"


def least_of_a_block(config: Any, row: Row, phase: Phase) -> Amount:
    """What one decoder block needs in forward or in backward: each is the other's dual, so both need the same.

    Where all of it is computed again, backward needs the forward's too, but for the reduction that ends the block: nothing reads
    that result again. Where products and what was received are kept, it needs none of them.

    tp: Shoeybi et al. 2019, figure 4: an all-reduce where the attention ends and one where the MLP does; under sequence
    parallelism (Korthikanti et al. 2022, section 4.2.2) a gather and a scatter in place of each, of as many bytes.
    cp: keys and values gathered together, their gradients scattered together; or (Jacobs et al. 2023, section 3.2) queries, keys
    and values from tokens to heads in one all-to-all, and the output back in another.
    """
    dp, cp, tp = (row.size(axis) for axis in ("dp", "cp", "tp"))
    tokens = B / dp * T / cp  # of a rank
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
    """What a step needs beside its blocks' communication: the embedding, the head and the loss.

    tp: the rows that a rank looks up are added up, once, as a block's results are; the head's dual adds up the gradients of what it is
    given (Shoeybi et al. 2019, section 3). The loss of sharded logits needs 12 bytes a token of every rank, three numbers, and of tokens
    that are sharded the sum of one number over the n ranks that have others, 2 (n - 1) / n of it, in whole numbers.
    adapters: backward ends at those of the first block. It needs no gradient of what enters that block, nor of the embedding.
    """
    dp, cp, tp = (row.size(axis) for axis in ("dp", "cp", "tp"))
    tokens = B / dp * T / cp  # of a rank
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
    """An all-reduce of what is trained over the n ranks whose gradients are addends, 2 (n - 1) / n of a rank's bytes.

    Patarasuk and Yuan 2009, theorem 1. Of what tp shards, and of what does the same on each of its ranks, these are the ranks that see
    other tokens. Of what tp leaves whole and applies to shards of tokens or to heads, they are those of tp too. Each of the two in one
    bucket, as so small a model's gradients travel.
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
    """Elements of the parameters that tp does not shard, by what they are applied to; of tokens, those that sequence parallelism shards.

    The bias of a layer whose results are added up has the gradient of all tokens on every rank, as the layer's product needs it whole.
    """
    H, layers = config.hidden_size, config.num_layers
    norms = (2 * layers + 1) * H
    if isinstance(config, GPTConfig):  # whose norms have biases
        return {"shards of tokens": 2 * norms + config.max_seq_len * H, "all tokens": 2 * layers * H, "heads": 0}
    has_head_norms = isinstance(config, QwenConfig) and config.version == 3
    return {"shards of tokens": norms, "heads": 2 * layers * config.head_dim if has_head_norms else 0}


def recorded(config: Any, row: Row) -> Communication:
    """What rank 0 communicates in a step; see `weft.models.record`."""
    with torch.device("meta"):
        model = make_model(config)
    if row.adapters:
        lora(model, row.adapters, 1.0, ["*attn.[qoc]_proj"])
    plan = dataclasses.replace(model.parallel_plan(), **row.plan)  # type: ignore[operator]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=row.lower):
        return record(model, ProcessMesh.grid(**row.mesh), plan, batch=(B, T))


def compared(name: str, row: Row) -> dict[str, tuple[Amount, Amount]]:
    """Recorded and least, of a family under a plan: a block, what is beside the blocks, and the gradients of a model of one block."""
    config = FAMILIES[name]
    one, two = (recorded(dataclasses.replace(config, num_layers=count), row) for count in (1, 2))
    found: dict[str, tuple[Amount, Amount]] = {}
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        less, more = (each.select(phase=phase) for each in (one, two))
        second = Amount(more.counts - less.counts, more.nbytes - less.nbytes)  # what a second block adds
        rest = Amount(less.counts - second.kinds, less.nbytes - second.nbytes)
        found[f"block, {phase}"] = second, least_of_a_block(config, row, phase)
        found[f"ends, {phase}"] = rest, least_of_the_ends(config, row, phase)
    gradients = one.select(phase="gradients")
    found["gradients"] = Amount(gradients.counts, gradients.nbytes), least_of_gradients(config, row)
    assert found.keys() == set(PARTS), "a part more is one of the table"
    return found
