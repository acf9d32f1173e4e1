"""Times a training step on one GPU beside the same Llama in plain PyTorch under DistributedDataParallel.

Reports time, tokens a second and memory. Losses are checked to be equal first. All ways compute in bfloat16 by
autocast, with float32 parameters and torch's fused AdamW. Each way is also timed compiled: Weft's by the block,
torch's as a whole. On one GPU Weft's parameters are plain tensors. Without a GPU this file times nothing. The tests
run `of_steps` with a small model and the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from weft.kernels import cross_entropy
from weft.models import Llama, LlamaConfig, initialize

from benchmarks.baselines import TorchLlama
from benchmarks.conftest import Tell
from benchmarks.failures import Failures
from benchmarks.found import Row, held
from benchmarks.stages import adamw
from benchmarks.timing import Clock, Device, in_turn

# 0.5 billion parameters, in layers as wide as in models of one to two billion parameters.
MODEL = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    max_seq_len=2048,
)
BATCH, TOKENS = 4, 2048
GOAL = 1.0  # tokens a second, relative to DistributedDataParallel
Step = Callable[[], Tensor]  # returns the loss, without waiting for the device


def of_steps(
    config: LlamaConfig, batch: int, length: int, device: str, clock: Clock, rounds: int = 10
) -> tuple[dict[str, Row], Failures]:
    """Times a step of each way in turn, in a world of one rank. Returns the figures, and the failed ways of torch.

    step_bytes, on a GPU: the peak memory of a step above the memory between steps.
    Raises AssertionError if the first losses differ, and all errors of Weft's ways.
    """
    ids = torch.randint(0, config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = (each.contiguous().to(device) for each in (ids[:, :-1], ids[:, 1:]))
    failed, ways, first = Failures(), dict[str, Step](), dict[str, float]()
    for name, make, compiled in (
        ("Weft", weft_step, False),
        ("Weft, compiled", weft_step, True),
        ("DistributedDataParallel", torch_step, False),
        ("DistributedDataParallel, compiled", torch_step, True),
    ):
        with failed.of(name):
            step = make(config, tokens, targets, compiled)
            first[name] = step().item()
            ways[name] = step
    for name, loss in first.items():
        assert loss == pytest.approx(first["Weft"], rel=1e-2), name  # bfloat16 rounds
    timed = in_turn(ways, clock, rounds=rounds, warmup=2, replayed=(), guard=failed.of)
    rows: dict[str, Row] = {}
    for name, each in timed.items():
        rows[name] = {**each.figures, "tokens_per_second": tokens.numel() / each.median}
        if device == "cuda":
            rows[name]["step_bytes"] = held(ways[name])["peak_bytes"]
    return rows, failed


def weft_step(config: LlamaConfig, tokens: Tensor, targets: Tensor, compiled: bool) -> Step:
    with tokens.device:
        model = _model(config)
    optimizer = adamw(model)
    for layer in model.layers if compiled else ():
        layer.compile(fullgraph=True)

    def step() -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss: Tensor = cross_entropy(model(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_step(config: LlamaConfig, tokens: Tensor, targets: Tensor, compiled: bool) -> Step:
    with tokens.device:
        model = DistributedDataParallel(TorchLlama(_model(config)), gradient_as_bucket_view=True)
    optimizer = adamw(model)
    called = torch.compile(model) if compiled else model

    def step() -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = F.cross_entropy(called(tokens).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _model(config: LlamaConfig) -> Llama:
    """The initialized model, on the device of the context: drawing half a billion numbers on a CPU takes long."""
    model = Llama(config)
    initialize(model, seed=0)
    return model


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of one rank, on the GPU."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: the speed of a step there is not measured")
def test_step_speed(world: None, tell: Tell) -> None:
    case = f"a step of a Llama, {MODEL.num_layers} layers of H={MODEL.hidden_size}, {BATCH} x {TOKENS} tokens"
    rows, failed = tell.measuring(of_steps, MODEL, BATCH, TOKENS, "cuda", Device())
    print(f"\n{case}: ms, tokens/s, GB above what there is between steps")
    for way, row in rows.items():
        seconds, rate, nbytes = (float(row[each]) for each in ("seconds_median", "tokens_per_second", "step_bytes"))
        print(f"{way:36}{seconds * 1e3:9.1f}{rate:12,.0f}{nbytes / 1e9:9.2f}")
        tell(case, way, "time", **row)
    for way, error in failed.items():
        print(f"{way:36} failed: {error}")
        tell(case, way, "time", status="failed", error=error)
    weft, ddp = (float(rows[way]["tokens_per_second"]) for way in ("Weft", "DistributedDataParallel"))
    assert weft >= GOAL * ddp
