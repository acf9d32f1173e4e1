"""Models compute with Weft's ops alone: besides, torch's dispatcher sees only the few ops listed here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from weft import kernels
from weft.mesh import derive_key
from weft.models import GPTConfig, LlamaConfig, QwenConfig, initialize
from weft.models.blocks import GatedMLP
from weft.models.config import ModelConfig
from weft.models.families import make_model

KERNELS = str(Path(kernels.__file__).parent)
SIZES: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 32}
GATED: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_kv_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**GATED),
    "llama-biases": LlamaConfig(**GATED, attention_bias=True, mlp_bias=True, tie_embeddings=True),
    "llama-dropout": LlamaConfig(**GATED, dropout=0.2, attention_dropout=0.1),
    "qwen2": QwenConfig(**GATED, version=2, sliding_window=3, sliding_layers=(1,)),
    "qwen3": QwenConfig(**GATED),
    "gpt": GPTConfig(**SIZES),
    "gpt-dropout": GPTConfig(**SIZES, activation="gelu", dropout=0.2, attention_dropout=0.1, embedding_dropout=0.1),
}


class Outside(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of ops that no function of weft.kernels called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(KERNELS):
            frame = frame.f_back
        if frame is None:
            self.seen.add(func.overloadpacket._qualified_op_name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


# The allowed ops by torch's names, with the reason for each.
FORWARD = {"slice": "rope's tables of as many tokens as there are", "arange": "the positions of a GPT"}
BACKWARD = {
    "ones_like": "the gradient of the loss",
    "detach": "autograd's",
    "add": "gradients of one tensor that come from several ops",
    **dict.fromkeys(
        ("view", "transpose", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        "attention's: torch differentiates it",
    ),
    **dict.fromkeys(
        ("embedding_dense_backward", "native_layer_norm_backward", "gelu_backward", "mm", "t", "sum"),
        "of Weft's ops that torch's own functions compute on a CPU",
    ),
}
OF_BIASED_GATES = dict.fromkeys(("mul", "silu_backward"), "the same, of swiglu, where the products before it are apart")
WITH_DROPPED_WEIGHTS = dict.fromkeys(
    ("clone", "_unsafe_view", "bmm", "sum", "squeeze", "mul", "masked_fill", "_softmax_backward_data"),
    "the same, of attention whose weights are dropped",
)


def outside(config: ModelConfig) -> tuple[set[str], set[str]]:
    """The names of a step's ops outside weft.kernels, in forward and in backward."""
    model = make_model(config)
    initialize(model, seed=0)
    tokens = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.eval()(tokens[:, :-1])  # rope's tables are made, and kept
    model.train()
    with Outside() as forward:
        logits = model(tokens[:, :-1], dropout_key=derive_key(0, "dropout", 0))
        loss = kernels.cross_entropy(logits, tokens[:, 1:])
    with Outside() as backward:
        loss.backward()
    return forward.seen, backward.seen


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_computes_by_no_op_of_torchs(name: str) -> None:
    forward, backward = outside(CONFIGS[name])
    assert not forward - FORWARD.keys()
    more = WITH_DROPPED_WEIGHTS if "dropout" in name else OF_BIASED_GATES if name == "llama-biases" else {}
    assert not backward - (BACKWARD | more).keys()


def test_an_op_of_torchs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: GatedMLP, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output

    monkeypatch.setattr(GatedMLP, "forward", forward)
    found = outside(CONFIGS["llama"])
    assert [each - allowed.keys() for each, allowed in zip(found, (FORWARD, BACKWARD), strict=True)] == [
        {"silu", "mul"}, {"silu_backward", "mul"}
    ]  # fmt: skip
