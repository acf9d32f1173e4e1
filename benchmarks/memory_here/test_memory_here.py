"""Predicts the peak memory of a training step for twelve plans, and measures the step on this machine's CPU."""

from __future__ import annotations

import pytest
import torch
from weft.models import LlamaConfig

from benchmarks.conftest import Tell
from benchmarks.memory_here.measured import Case, measure
from tests.support.pool import Pool

WITHIN = 0.05
MODEL = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    max_seq_len=256,
)
BATCH = (8, 256)
FEW_ROWS = (4, 256)  # products in bfloat16 are slow on many CPUs
FOUR_LAYERS = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_seq_len=256,
)

CASES = {
    "1 process": Case(axes={"dp": 1}, model=MODEL, batch=BATCH),
    "1 process, bfloat16": Case(axes={"dp": 1}, model=MODEL, batch=FEW_ROWS, dtype=torch.bfloat16),
    "1 process, full recompute, 4 microbatches, clipping": Case(
        axes={"dp": 1}, model=MODEL, batch=BATCH, plan={"recompute": "full"}, microbatches=4, clip_norm=1.0
    ),
    "dp=2": Case(axes={"dp": 2}, model=MODEL, batch=BATCH),
    "dp=2, zero=1, selective recompute, clipping": Case(
        axes={"dp": 2}, model=MODEL, batch=BATCH, plan={"zero": 1, "recompute": "selective"}, clip_norm=1.0
    ),
    "dp=2, zero=2, 2 microbatches": Case(axes={"dp": 2}, model=MODEL, batch=BATCH, plan={"zero": 2}, microbatches=2),
    "dp=2, zero=3": Case(axes={"dp": 2}, model=MODEL, batch=BATCH, plan={"zero": 3}),
    "dp=2, zero=3, full recompute, bfloat16": Case(
        axes={"dp": 2}, model=MODEL, batch=BATCH, plan={"zero": 3, "recompute": "full"}, dtype=torch.bfloat16
    ),
    "tp=2": Case(axes={"tp": 2}, model=MODEL, batch=BATCH),
    "tp=2, sequence, bfloat16": Case(
        axes={"tp": 2}, model=MODEL, batch=FEW_ROWS, plan={"sequence": True}, dtype=torch.bfloat16
    ),
    "pp=2, 1f1b, 4 microbatches": Case(
        axes={"pp": 2}, model=FOUR_LAYERS, batch=BATCH, microbatches=4, pipeline={"schedule": "1f1b"}
    ),
    "pp=2, gpipe, full recompute, 4 microbatches": Case(
        axes={"pp": 2},
        model=FOUR_LAYERS,
        batch=BATCH,
        plan={"recompute": "full"},
        microbatches=4,
        pipeline={"schedule": "gpipe"},
    ),
}


def measured(case: Case) -> list[dict[str, int]]:
    """The peaks of each rank, in new processes: what earlier cases leave in a heap would count as resident."""
    with Pool(None) as pool:
        found: list[dict[str, int]] = pool.run(measure, case, ranks=case.mesh.size)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_memory_is_as_predicted(name: str, tell: Tell) -> None:
    case = CASES[name]
    of_ranks = tell.measuring(measured, case)
    for rank, found in enumerate(of_ranks):
        predicted = case.predict(rank).nbytes
        beside = [f"{way} {nbytes:>12,} ({predicted / nbytes - 1:+.1%})" for way, nbytes in found.items()]
        print(f"\n{name}, rank {rank}: predicted {predicted:>12,}; {', '.join(beside)}")
        tell(f"{name}, rank {rank}", "Weft", "count", predicted_bytes=predicted, **found)
        assert predicted == pytest.approx(found["counted"], rel=WITHIN)
