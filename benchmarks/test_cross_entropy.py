"""Counts the memory traffic of cross-entropy: bytes of device memory a logit, and bytes gathered a token.

Triton's interpreter counts exactly, on a CPU, in the same kernels as on a GPU. No time is measured. If Liger is
installed, Liger's kernel is counted on the same logits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.conftest import Tell

ROWS, CLASSES, SHARDS = 4, 16384, 4
CASES: dict[str, dict[str, Any]] = {
    "cross_entropy": {},
    "with label smoothing": {"label_smoothing": 0.1},
    "with z-loss and softcap": {"z_loss": 1e-4, "softcap": 30.0},
}
PROGRAM = """
import json, sys
import torch
from benchmarks import test_cross_entropy as here
print(json.dumps(here.counted()))
"""


def counted() -> dict[str, dict[str, float]]:
    """Bytes a logit in forward and backward, and bytes gathered a token, for each case.

    Each case is counted with all classes on one rank, and for a single shard of the vocabulary.
    """
    import torch
    from weft.kernels.cross_entropy import function
    from weft.kernels.cross_entropy.options import Options
    from weft.kernels.launching.traffic import counted_traffic

    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(ROWS, CLASSES, generator=generator)).bfloat16()
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    upstream = torch.randn(ROWS, generator=generator)
    found = {}
    for name, asked in CASES.items():
        options, part = Options(reduction="none", **asked), CLASSES // SHARDS
        for shards in (1, SHARDS):
            local = logits if shards == 1 else logits[:, :part].contiguous()
            gathered = []

            def gather(statistics: Any, gathered: list[Any] = gathered) -> Any:
                gathered.append(statistics.nbytes)
                return lambda: statistics.unsqueeze(0)

            with counted_traffic() as forward:
                _, saved = function.forward(local, target, options=options, vocab_size=CLASSES, gather=gather)
            with counted_traffic() as backward:
                function.backward(saved, (upstream,), (True, False, False, False), options=options, vocab_size=CLASSES)
            moved = [each.loaded + each.stored for each in (forward, backward)]
            found[f"Weft, {name}" + (", vocab-parallel" if shards > 1 else "")] = {
                "forward": moved[0] / local.numel(),
                "backward": moved[1] / local.numel(),
                "gathered": sum(gathered) / ROWS if shards > 1 else 0,
            }
    for name, numbers in {"as guessed (2 from the L2)": (1.0,), "another every time": (2.0, 3.0, 4.0)}.items():
        found[f"Weft, a scalar loss, its gradient {name}"] = _scalar(logits, target, numbers)
    if importlib.util.find_spec("liger_kernel"):
        found |= _liger(logits, target)
    return found


def _scalar(logits: Any, target: Any, numbers: tuple[float, ...]) -> dict[str, float]:
    """Bytes a logit of the last of several steps. numbers: the upstream gradients of the steps."""
    import torch
    from weft.kernels import cross_entropy
    from weft.kernels.launching.traffic import counted_traffic

    leaf = logits.clone().requires_grad_()
    for number in numbers:
        with counted_traffic() as forward:
            loss = cross_entropy(leaf, target)
        with counted_traffic() as backward:
            torch.autograd.grad(loss, leaf, torch.tensor(number))
    moved = [(each.loaded + each.stored) / logits.numel() for each in (forward, backward)]
    return {"forward": moved[0], "backward": moved[1], "gathered": 0}


def _liger(logits: Any, target: Any) -> dict[str, dict[str, float]]:
    import torch
    from liger_kernel.ops.cross_entropy import cross_entropy_backward, cross_entropy_forward
    from weft.kernels.launching.traffic import counted_traffic

    mine = logits.clone().requires_grad_()
    with counted_traffic() as forward:
        cross_entropy_forward(mine, target, None, -100, 0.0, 0.0, "mean", None, False)
    with counted_traffic() as backward:
        cross_entropy_backward(mine.detach(), torch.tensor(0.5))
    moved = [(each.loaded + each.stored) / logits.numel() for each in (forward, backward)]
    return {
        "Liger, where the upstream gradient is 1": {"forward": moved[0], "backward": 0, "gathered": 0},
        "Liger, where it is another number": {"forward": moved[0], "backward": moved[1], "gathered": 0},
    }


def test_cross_entropy_traffic(tell: Tell) -> None:
    pytest.importorskip("triton")
    run = tell.measuring(
        subprocess.run,
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    print(f"\nbytes of device memory a bf16 logit, {ROWS} x {CLASSES}, counted in the interpreter")
    print(f"{'':64}{'forward':>9}{'backward':>10}{'both':>8}   gathered a token and rank")
    for name, row in found.items():
        both = row["forward"] + row["backward"]
        print(f"{name:64}{row['forward']:9.2f}{row['backward']:10.2f}{both:8.2f}   {row['gathered']:.0f} bytes")
    if not any(name.startswith("Liger") for name in found):
        print("Liger" + " " * 59 + "not installed: pip install liger-kernel")
        tell("cross_entropy", "Liger", "count", status="absent")
    for name, row in found.items():
        way, _, case = name.partition(", ")
        figures = {"bytes_a_logit": row["forward"] + row["backward"], "gathered_bytes_a_token": row["gathered"]}
        tell(case if way == "Weft" else "cross_entropy", way if way == "Weft" else name, "count", **figures)
        if name.startswith("Weft"):
            assert row["forward"] + row["backward"] < 6.05
            assert row["gathered"] <= 20
