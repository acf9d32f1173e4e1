"""Times `generate` beside transformers, with the same weights, in turn on one CPU thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from weft.models import generate

from benchmarks.conftest import Tell
from benchmarks.test_llama_cpu import LARGE, SMALL, LlamaConfig, both
from benchmarks.timing import Host, in_turn


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "batch", "length", "rounds"),
    [
        pytest.param(SMALL, 1, 16, 10, id="H128-V257-B1"),
        pytest.param(SMALL, 8, 16, 10, id="H128-V257-B8"),
        pytest.param(LARGE, 1, 16, 6, id="H512-V8192-B1"),
    ],
)
def test_generate_beside_transformers(
    config: LlamaConfig, batch: int, length: int, rounds: int, tmp_path: Path, tell: Tell
) -> None:
    """Generates 96 tokens after prompts of 16 tokens, always the most likely token."""
    model, theirs = both(config, tmp_path)
    theirs.generation_config.eos_token_id = None  # no token ends a text
    prompts = torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(prompts)

    def weft() -> Tensor:
        return generate(model, prompts, max_new_tokens=96)

    def other() -> Tensor:
        found: Tensor = theirs.generate(
            prompts, attention_mask=mask, max_new_tokens=96, do_sample=False, pad_token_id=0
        )
        return found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(weft(), other())
        found = tell.measuring(in_turn, {"Weft": weft, "transformers": other}, Host(), rounds=rounds, warmup=1)
    finally:
        torch.set_num_threads(threads)
    name = f"generate on a CPU, H={config.hidden_size}, V={config.vocab_size}, {batch} x 96 tokens"
    print(f"\n{name}: {found['Weft'].median / found['transformers'].median:.2f} of transformers' time")
    for way, timed in found.items():
        print(f"{way:14}{timed.median / 96 * 1e3:9.2f} ms a step")
        tell(name, way, "host_time", **timed.figures)
