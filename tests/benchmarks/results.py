"""Folders of results that the page is made of: as this project writes them, of a GPU with a history, hostile, broken."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import Case, Run, folder_name
from tests.architecture.rules import ROOT
from tests.benchmarks.cases import MACHINE, case, run

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"
LOGITS = (
    (8192, 131072),
    (4096, 128256),
    (16384, 50257),
    (8192, 32000),
    (256, 32000),
)  # of the benchmark: tokens, classes
TOKENS = (4096, 16384)  # of the linear one
PER_SECOND = 4.1e12  # bytes
GEMMS = 7.8e14  # flop a second
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


def of_two_machines(folder: Path) -> Path:
    """Four runs of a CPU's, the second of another machine; the newest is slower, holds more, and has more collectives."""
    for minute in range(4):
        made = cpu_run(minute)
        other = {"cpu": "AMD EPYC 7763", "cores": 4, "load": 3.5}
        machine = other if minute == 1 else {**MACHINE, "load": 0.5 * minute}
        cases = [_grown(each, 1.4, 1.1) if minute == 3 else each for each in made.cases]
        replace(made, machine=machine, cases=tuple(cases)).write(folder / "cpu")
    return folder


def _grown(each: Case, seconds: float, held: float) -> Case:
    """Weft's own, slower and with more memory, and with two collectives more."""
    growth = {"seconds_p20": seconds, "seconds_median": seconds, "seconds_p80": seconds, "peak_bytes": held}
    grown = {key: each.numbers[key] * growth[key] for key in growth if key in each.numbers}
    grown |= {key: each.numbers[key] + 2 for key in ("collectives",) if key in each.numbers}
    return replace(each, figures=each.figures | grown) if each.ours else each


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
    cases = [each for N, V in LOGITS for each in logits(N, V, pace)]
    cases += [each for tokens in TOKENS for each in products(tokens, pace)]
    ceilings = {"copy_bytes_per_second": PER_SECOND, "bf16_flop_per_second": GEMMS}
    return run(*cases, *counts(), minute=minute, ceilings=ceilings)


def logits(N: int, V: int, pace: float) -> list[Case]:
    """A shape of cross-entropy: the copies that are its roofline, Weft's ways and the others'."""
    name, moved = f"cross_entropy, {N} x {V} bf16", 4 * N * V
    copied = moved / PER_SECOND
    found = [gpu_case(name, "a copy of the logits", copied), gpu_case(name, "a copy of a shard", copied / 8)]
    for way, ratio in WAYS.items():
        spent = copied / 0.91 * ratio * (pace if way == "Weft" else 1)
        told = {"bytes": moved, "bytes_per_second": moved / spent, "gradient_error": 2.0**-9}
        words = {"configuration": "4096 classes at a time, 8 warps", "registers": 40} if way == "Weft" else {}
        held = int(moved / 2 * ratio)
        found.append(gpu_case(name, way, spent, roofline=copied / spent, peak_bytes=held, **told, **words))
    return [*found, gpu_case(name, "Weft, one shard", copied / 8 / 0.88, roofline=0.88, peak_bytes=moved // 16)]


def products(tokens: int, pace: float) -> list[Case]:
    """A shape of linear cross-entropy: three GEMMs, which are its roofline, Weft's ways and the others'."""
    name, needed = f"linear_cross_entropy, {tokens} tokens, H=4096, V=128256 bf16", 6 * tokens * 4096 * 128256
    found = [gpu_case(name, f"three GEMMs{again}", needed / GEMMS) for again in ("", ", again")]
    for way, share in (("Weft", 0.98), ("Weft, float32 gradient", 0.99), ("torch, chunked", 0.6), ("CCE", 0.74)):
        spent = needed / GEMMS / share * (pace if way.startswith("Weft") else 1)
        told = {"roofline": needed / GEMMS / spent, "peak_bytes": 1_084_000_000, "flop": needed}
        found.append(gpu_case(name, way, spent, flop_per_second=needed / spent, **told))
    return [*found, Case(group="cross_entropy_speed", name=name, way="Liger", kind="time", status="absent")]


def gpu_case(name: str, way: str, seconds: float, **figures: Any) -> Case:
    timer = "graph" if seconds < 1e-3 else "events"
    return case(name, way, seconds, group="cross_entropy_speed", timer=timer, **figures)


def cpu_run(minute: int = 9) -> Run:
    return run(*counts(), *host_times(), minute=minute, device="cpu", dirty=True, ceilings={})


def counts() -> list[Case]:
    cases = [
        count("cross_entropy", name, way, bytes_a_logit=moved, gathered_bytes_a_token=gathered)
        for name, way, moved, gathered in (
            ("cross_entropy", "Weft", 6.0045, 0),
            ("cross_entropy", "Liger, where the upstream gradient is 1", 6.0009, 0),
            ("cross_entropy", "Liger, where it is another number", 10.0011, 0),
            ("cross_entropy, vocab-parallel", "Weft", 6.0176, 12),
            ("with label smoothing", "Weft", 6.005, 0),
        )
    ]
    for tokens, own, other in ((4096, 1.051e9, 5.22e9), (16384, 1.085e9, 24.03e9)):
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
    cases += [
        host("sharded_optimizers", "a sharded step of llama-tiny, dp=4", way, seconds)
        for way, seconds in (("Weft zero=2", 0.12), ("Weft zero=3", 0.13), ("FSDP2 kept", 0.17), ("FSDP2", 0.21))
    ]
    return [
        *cases,
        host("mesh", "infer.einsum, cached", "Weft", 7.6e-7),
        host("mesh", "a mesh of 131,072 ranks made, sliced and hashed", "Weft", 2.8e-5),
    ]


def count(group: str, name: str, way: str, **figures: Any) -> Case:
    return Case(group=group, name=name, way=way, kind="count", status="measured", figures=figures)


def host(group: str, name: str, way: str, seconds: float, **figures: Any) -> Case:
    spread = {"seconds_median": seconds, "seconds_p20": seconds * 0.95, "seconds_p80": seconds * 1.1, "timer": "host"}
    return Case(group=group, name=name, way=way, kind="host_time", status="measured", figures=spread | figures)
