"""Times a Llama's forward and backward beside transformers, with the same weights, in turn on one CPU thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy
from weft.models import Llama, LlamaConfig, initialize

from benchmarks.conftest import Tell
from benchmarks.timing import Host, in_turn

SMALL = LlamaConfig(
    vocab_size=257, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=8, num_kv_heads=4, max_seq_len=256
)
LARGE = LlamaConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_layers=4, num_heads=8, num_kv_heads=4, max_seq_len=256
)


def both(config: LlamaConfig, folder: Path) -> tuple[Llama, Any]:
    """Weft's Llama and transformers' Llama, with the same weights. Without transformers the test is skipped."""
    transformers = pytest.importorskip("transformers")
    from weft.models import save_pretrained  # imported here, as safetensors may be absent

    model = Llama(config)
    initialize(model, seed=0)
    save_pretrained(model, folder / "model")
    return model, transformers.LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "batch", "length", "rounds"),
    [pytest.param(SMALL, 8, 64, 40, id="H128-V257"), pytest.param(LARGE, 2, 256, 30, id="H512-V8192")],
)
def test_llama_beside_transformers(
    config: LlamaConfig, batch: int, length: int, rounds: int, tmp_path: Path, tell: Tell
) -> None:
    model, theirs = both(config, tmp_path)
    ids = torch.randint(0, config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    tokens, target = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def weft() -> Tensor:
        model.zero_grad()
        loss: Tensor = cross_entropy(model(tokens), target)
        loss.backward()
        return loss

    def other() -> Tensor:
        theirs.zero_grad()
        logits = theirs(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
        return loss

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.testing.assert_close(weft(), other())
        found = tell.measuring(in_turn, {"Weft": weft, "transformers": other}, Host(), rounds=rounds)
    finally:
        torch.set_num_threads(threads)
    name = f"Llama on a CPU, H={config.hidden_size}, V={config.vocab_size}, {batch} x {length} tokens"
    print(f"\n{name}: {found['Weft'].median / found['transformers'].median:.3f} of transformers' time")
    for way, timed in found.items():
        print(f"{way:14}{timed.median * 1e3:9.1f} ms")
        tell(name, way, "host_time", **timed.figures)
