"""Predicts the peak memory of a training step for twelve plans, and measures the step on this machine's CPU."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from weft.models import LlamaConfig

from benchmarks import history, machine
from benchmarks.conftest import Tell
from benchmarks.memory_here.measured import Case, Parts, measure, resident_with_heap
from benchmarks.record import keep_rows, rows_of
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
KEPT = history.RESULTS / "predicted_memory_here.json"  # for the page of results

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


def measured(case: Case) -> list[tuple[Parts, int]]:
    """The bytes of each rank, and the resident peak with gaps of the heap; each in new processes.

    What earlier cases leave in a heap would count as resident.
    """
    with Pool(None) as pool:
        found: list[Parts] = pool.run(measure, case, ranks=case.mesh.size)
    with Pool(None) as pool:
        with_heap: list[int] = pool.run(resident_with_heap, case, ranks=case.mesh.size)
    return list(zip(found, with_heap, strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_memory_is_as_predicted(name: str, tell: Tell) -> None:
    case = CASES[name]
    wrong = []
    for rank, (found, with_heap) in enumerate(tell.measuring(measured, case)):
        predicted = case.predict(rank).nbytes
        errors = [f"{way} {nbytes:,} ({predicted / nbytes - 1:+.1%})" for way, nbytes in asdict(found).items()][:2]
        heap = f"with gaps of the heap {with_heap:,} ({with_heap / found.resident - 1:+.1%})"
        print(
            f"\n{name}, rank {rank}: predicted {predicted:,}; {', '.join(errors)}; {heap}; "
            f"besides: imported {found.imported:,}, kept by libraries {found.kept:,}"
        )
        figures = {**asdict(found), "with_heap": with_heap}
        tell(f"{name}, rank {rank}", "Weft", "count", predicted_bytes=predicted, **figures)
        keep(f"{name}, rank {rank}", predicted, found)
        ways = ("counted", found.counted), ("resident", found.resident)
        wrong += [f"rank {rank}, {way}" for way, nbytes in ways if abs(predicted / nbytes - 1) > WITHIN]
    assert not wrong


def keep(row: str, predicted: int, found: Parts) -> None:
    """Keep the row for the page of results, in place of an earlier one."""
    earlier = rows_of(KEPT) if KEPT.exists() else []
    rows = [each for each in earlier if each["row"] != row]
    for way, nbytes in (("counted", found.counted), ("resident", found.resident)):
        values = {"predicted": float(predicted), "measured": float(nbytes), "machine": machine.in_words()}
        rows.append({"row": row, "figure": f"memory, {way}", **values})
    keep_rows(KEPT, sorted(rows, key=lambda each: (each["figure"], each["row"])))
