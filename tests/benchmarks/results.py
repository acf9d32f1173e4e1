"""Folders of results that the page is made of: as this project writes them, of a GPU with a history, hostile, broken."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from benchmarks.record import Case, Run, folder_name
from tests.architecture.rules import ROOT
from tests.benchmarks.cases import case, run

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"
WAYS = {
    "Weft": 1.0,
    "eager torch": 3.1,
    "eager torch, again": 3.12,
    "torch.compile": 1.9,
    "Liger, and a copy of the logits": 1.6,
}


def of_a_cpu(folder: Path) -> Path:
    """One run of all that is counted and timed without a GPU, and the files that all devices share."""
    shutil.copytree(ROOT / "benchmarks/results/aot", folder / "aot")
    shutil.copy(ROOT / "benchmarks/results/reshard_bytes.json", folder)
    cpu_run().write(folder / "cpu")
    return folder


def of_a_gpu(folder: Path) -> Path:
    """Six runs of an H200, the last of them slower, and a CPU's."""
    of_a_cpu(folder)
    for minute in range(6):
        gpu_run(minute).write(folder / "NVIDIA-H200")
    return folder


def hostile(folder: Path) -> Path:
    """Every word that a run may hold is markup, in two runs."""
    for minute in range(2):
        words = {"group": HOSTILE, "name": f"{HOSTILE} 2"}
        cases = [
            *(case(way=way, **words) for way in ("Weft", HOSTILE)),
            Case(**words, way="eager", kind="time", status="failed", figures={"error": HOSTILE}),
            count("linear_cross_entropy", HOSTILE, "Weft", peak_bytes=4, **{HOSTILE: 3}),
            count("loss_curves", HOSTILE, HOSTILE, step_1=2.0, step_2=1.0),
            count("loss_curves", HOSTILE, "Weft", step_1=2.0, step_2=1.0),
        ]
        rest: dict[str, Any] = {"device": f"H {HOSTILE}", "commit": HOSTILE, "versions": {HOSTILE: HOSTILE}}
        run(*cases, minute=minute, ceilings={HOSTILE: 1}, **rest).write(folder / folder_name(rest["device"]))
    rows = [
        {"engine": HOSTILE, "mesh": HOSTILE, "shape": [2, 2], "pairs": 1, "mean": 1.0, "max": 1.0, "ratios": {"1": 1}}
    ]
    (folder / "reshard_bytes.json").write_text(json.dumps(rows))
    return folder


def broken(folder: Path) -> Path:
    """What cannot be read, beside one run that can."""
    run().write(folder / "NVIDIA-H200")
    for number, text in enumerate(["", "{", "[]", '{"schema": 0}', run(minute=7, device="NVIDIA A100").text()]):
        (folder / "NVIDIA-H200" / f"20260301T13000{number}Z_broken.json").write_text(text)
    (folder / "reshard_bytes.json").write_text('[{"engine": "Weft"}]')
    (folder / "aot").mkdir()
    (folder / "aot" / "triton-3.7.1.json").write_text("{}")
    return folder


def gpu_run(minute: int) -> Run:
    pace = 1.15 if minute == 5 else 1 + 0.01 * math.sin(3 * minute)
    cases = [
        each
        for shape, seconds in (("8192 x 131072", 1.6e-3), ("4096 x 32768", 2.3e-4))
        for each in logits(shape, seconds, pace)
    ]
    linear = "linear_cross_entropy, 4096 tokens, H=4096, V=128256 bf16"
    for way, ratio, share in (
        ("three GEMMs", 0.98, None),
        ("Weft", 1.0, 0.98),
        ("Weft, inplace_backward", 0.99, 0.99),
        ("CCE", 1.33, 0.74),
    ):
        roofline = {"roofline": share / pace} if share else {}
        cases.append(gpu_case(linear, way, 31e-3 * ratio * pace, peak_bytes=1_084_000_000, **roofline))
    cases.append(Case(group="cross_entropy_speed", name=linear, way="Liger", kind="time", status="absent"))
    cases += [each for each in counts() if each.kind == "count"]
    return run(*cases, minute=minute)


def logits(shape: str, seconds: float, pace: float) -> list[Case]:
    name = f"cross_entropy, {shape} bf16"
    found = [gpu_case(name, "a copy of the logits", seconds * 0.91)]
    for way, ratio in WAYS.items():
        spent = seconds * ratio * (pace if way == "Weft" else 1)
        found.append(gpu_case(name, way, spent, roofline=seconds * 0.91 / spent, peak_bytes=int(2_147_483_648 * ratio)))
    return found


def gpu_case(name: str, way: str, seconds: float, **figures: Any) -> Case:
    return case(name, way, seconds, group="cross_entropy_speed", **figures)


def cpu_run(minute: int = 9) -> Run:
    return run(*counts(), *host_times(), minute=minute, device="cpu", dirty=True, ceilings={})


def counts() -> list[Case]:
    cases = [
        count("cross_entropy", name, "Weft", bytes_a_logit=6.0045, gathered_bytes_a_token=0)
        for name in ("cross_entropy", "with label smoothing")
    ]
    cases.append(
        count(
            "cross_entropy",
            "cross_entropy",
            "Liger, where it is another number",
            bytes_a_logit=10.0,
            gathered_bytes_a_token=0,
        )
    )
    for tokens, own, other in ((4096, 1.084e9, 5.22e9), (16384, 2.236e9, 24.03e9)):
        name = f"linear_cross_entropy, {tokens} tokens"
        cases += [
            count("linear_cross_entropy", name, way, peak_bytes=held, flop=1.3e13)
            for way, held in (("Weft", own), ("eager torch", other))
        ]
    for mesh, mean, most in (("2x2", 1.41, 4.0), ("4x4x4", 10.05, 64.0)):
        for way, figures in (
            ("Weft", (1.0, 1.0)),
            ("DTensor", (mean, most)),
            ("DTensor, min-cost", (mean**0.5, most**0.7)),
        ):
            both = {"bytes_over_bound_mean": figures[0], "bytes_over_bound_max": figures[1]}
            cases.append(count("reshard_bytes", f"{mesh}, 8192 x 8192 fp32", way, pairs=81, unneeded=0, **both))
    for place, mesh in enumerate(("one process", "dp=2 x tp=2", "dp=4", "tp=4")):
        losses = {f"step_{step:03}": 5.55 * math.exp(-step / 20) + 2.3 + 1e-7 * place * step for step in range(1, 41)}
        cases.append(count("loss_curves", "llama-tiny, 40 steps", f"Weft, {mesh}", **losses))
    cases += [
        count(
            "compiled", "cross_entropy.gradient/bf16", f"Weft, {target}", registers=40, spill_bytes=0, shared_bytes=512
        )
        for target in ("sm_90", "gfx942")
    ]
    return cases


def host_times() -> list[Case]:
    step = "a step of llama-tiny, dp=2 x tp=2"
    cases = [
        host("step_time", step, way, 0.1 * ratio, collectives=number)
        for way, ratio, number in (("Weft", 1, 21), ("torch", 0.97, 23), ("torch again", 0.98, 23))
    ]
    for number in range(12):
        pair = f"S0R -> RS{number}, 64 MB on 2x2"
        cases += [
            host("reshard_time", pair, way, 0.02 * ratio * (1 + number))
            for way, ratio in (("Weft", 1), ("DTensor", 3 + number), ("DTensor, again", 3.1 + number))
        ]
    cases += [
        host("dispatch", "matmul", way, seconds)
        for way, seconds in (("Weft", 4e-5), ("DTensor", 2e-4), ("the local op", 6e-6))
    ]
    return [
        *cases,
        host("mesh", "infer.einsum, cached", "Weft", 7.6e-7),
        host("mesh", "a mesh of 131,072 ranks made, sliced and hashed", "Weft", 2.8e-5),
    ]


def count(group: str, name: str, way: str, **figures: Any) -> Case:
    return Case(group=group, name=name, way=way, kind="count", status="measured", figures=figures)


def host(group: str, name: str, way: str, seconds: float, **figures: Any) -> Case:
    spread = {"seconds_median": seconds, "seconds_p20": seconds * 0.95, "seconds_p80": seconds * 1.1}
    return Case(group=group, name=name, way=way, kind="host_time", status="measured", figures=spread | figures)
