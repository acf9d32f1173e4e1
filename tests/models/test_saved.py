"""The tensors that a block keeps for backward, counted by saved-tensor hooks in units of its tokens x H."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from weft.mesh import Layout, ProcessMesh
from weft.models import GPT, GPTConfig, Llama, LlamaConfig, parallelize
from weft.reshard import distribute

from tests.models.cases import theirs
from tests.support.pool import Pool

TOKENS, HIDDEN = (2, 32), 256
LLAMA: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": HIDDEN, "intermediate_size": 704, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "max_seq_len": 64,
}  # fmt: skip


def kept(model: nn.Module, block: nn.Module, tokens: Any) -> float:
    """Units saved by the forward of `block` within `model`: each storage once, without parameters and tables."""
    held = {each.untyped_storage().data_ptr() for each in map(local, model.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in held and tensor.numel() >= tokens_here:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        beside = map(local, tree_leaves((args[1:], kwargs)))
        held.update(each.untyped_storage().data_ptr() for each in beside if isinstance(each, Tensor))
        hooks.__enter__()

    tokens_here = local(tokens).numel()
    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None))
    output = model(tokens)
    output = getattr(output, "logits", output)
    output.sum().backward()
    return sum(saved.values()) / (tokens_here * HIDDEN * output.element_size())


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def filled(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model.to(torch.bfloat16)


def test_a_llama_block_keeps_its_input_and_what_is_between_its_products() -> None:
    model = filled(Llama(LlamaConfig(**LLAMA)))
    units = kept(model, model.layers[1], torch.zeros(TOKENS, dtype=torch.int64))
    # The residual streams before each norm; q, k, v and attention's output; gate and up; a few numbers a row.
    assert units == pytest.approx(2 + 1 + 0.5 + 0.5 + 1 + 2 * 2.75, abs=0.1)
    assert units <= 12


def test_a_llama_block_keeps_less_than_transformers() -> None:
    model = filled(Llama(LlamaConfig(**LLAMA)))
    other = theirs(model).to(torch.bfloat16)
    other.set_attn_implementation("sdpa")
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    found = {
        "Weft": kept(model, model.layers[1], tokens),
        "transformers": kept(other, other.model.layers[1], tokens),
    }
    print(f"tensors of H a token that a Llama block keeps: {found}")
    assert found["Weft"] <= 12 and found["Weft"] < found["transformers"]


def test_a_gpt_block_keeps_its_input_and_what_is_between_its_products() -> None:
    config = GPTConfig(
        vocab_size=61, hidden_size=HIDDEN, intermediate_size=1024, num_layers=2, num_heads=4, max_seq_len=64
    )
    model = filled(GPT(config))
    units = kept(model, model.h[1], torch.zeros(TOKENS, dtype=torch.int64))
    assert units == pytest.approx(2 + 3 + 1 + 4, abs=0.1)


def on_a_mesh() -> float:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    torch.manual_seed(0)
    model: Any = filled(Llama(LlamaConfig(**LLAMA)))
    parallelize(model, mesh, model.parallel_plan())
    tokens = distribute(torch.zeros(TOKENS, dtype=torch.int64), Layout(mesh, "dp: S(0)"))
    return kept(model, model.layers[1], tokens)


@pytest.mark.exhaustive
def test_a_rank_keeps_the_streams_and_its_part_of_what_is_between_products(pool: Pool) -> None:
    for units in pool.run(on_a_mesh, ranks=4):
        assert units == pytest.approx(2 + (1 + 0.5 + 0.5 + 1 + 2 * 2.75) / 2, abs=0.1)
