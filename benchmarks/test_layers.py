"""Counts the memory traffic of norms, gates, rope, embedding and dropout: bytes of device memory an input element.

Triton's interpreter counts exactly, on a CPU, in the same kernels as on a GPU. No time is measured. Liger's layers are
counted, too, if Liger is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.conftest import Tell

N, H = 96, 1024
PROGRAM = """
import json
from benchmarks import test_layers as here
print(json.dumps(here.counted()))
"""


def counted() -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Bytes an element of a bf16 input [N, H], in forward and backward, for each layer and way; and the failed ways.

    Some of Liger's kernels run only on a GPU. The second dict has the reasons.
    """
    import torch
    from weft.kernels.launching.traffic import counted_traffic

    from benchmarks import layers
    from benchmarks.failures import Failures

    found, failed = {}, Failures()
    for name, case in layers.CASES.items():
        for way, layer in (("Weft", case.weft), ("Liger", layers.liger_layer(case))):
            if layer is None:
                continue
            given = layers.operands(case, N, H, "cpu", 0)
            with failed.of(f"{way}, {name}"):
                with counted_traffic() as forward:
                    outputs = layers.as_tuple(layer(*given))
                with counted_traffic() as backward:
                    torch.autograd.grad(outputs, layers.leaves(given), layers.upstream_of(outputs))
                moved = [(each.loaded + each.stored) / (N * H) for each in (forward, backward)]
                figures = {"forward": moved[0], "backward": moved[1], "least": 2 * sum(case.passes)}
                found[f"{way}, {name}"] = figures
    return found, dict(failed)


def test_layers_traffic(tell: Tell) -> None:
    pytest.importorskip("triton")
    run = tell.measuring(
        subprocess.run,
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found, failed = json.loads(run.stdout.splitlines()[-1])
    print(f"\nbytes of device memory an element of [{N}, {H}] in bf16, counted in the interpreter")
    print(f"{'':32}{'forward':>9}{'backward':>10}{'both':>8}{'least':>8}")
    for name, row in found.items():
        both = row["forward"] + row["backward"]
        print(f"{name:32}{row['forward']:9.2f}{row['backward']:10.2f}{both:8.2f}{row['least']:8.2f}")
        way, _, case = name.partition(", ")
        tell(case, way, "count", bytes_an_element=both)
        if way == "Weft":  # each program reads the weights, which counts for more with so few rows
            assert row["least"] <= both <= 1.1 * row["least"] + 0.4
    for name, why in failed.items():
        print(f"{name:32}not counted: {why}")
    if not any(name.startswith("Liger") for name in {**found, **failed}):
        print("Liger" + " " * 27 + "not installed: pip install liger-kernel")
