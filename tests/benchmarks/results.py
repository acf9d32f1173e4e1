"""Folders of results that the page is made of: of a CPU, of a GPU with a history, of two machines, hostile, broken."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import Case, Run, folder_name
from tests.architecture.rules import ROOT
from tests.benchmarks.cases import MACHINE, case, run, unmeasured

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{7*7}}"
OTHER = {"cpu": "AMD EPYC 7763", "cores": 4, "load": 3.5}
KERNELS = {"Weft": 1.0, "eager torch": 3.1, "eager torch, again": 3.12, "Liger": 1.6, "a copy of the logits": 0.91}
LIGER = ("Liger, where the upstream gradient is 1", "Liger, where it is another number")


def of_a_cpu(folder: Path) -> Path:
    """A run with all counts and times of a CPU, and the files shared by all devices."""
    (folder / "aot").mkdir()
    for name in ("aot/triton-3.7.1.json", "reshard_bytes.json", "predicted.json"):
        shutil.copy(ROOT / "benchmarks/results" / name, folder / name)
    columns, machine = ("row", "figure", "predicted", "measured", "machine"), "CPU, a quiet hour"
    for name, rows in (
        ("seconds", [("deep, dp", "seconds", 0.1, 0.11, machine), ("wide, tp", "seconds", 0.25, 0.2, machine)]),
        ("memory", [("dp=2, rank 1", "memory, counted", 2e8, 1.99e8, "CPU")]),
    ):
        objects = [dict(zip(columns, row, strict=True)) for row in rows]
        (folder / f"predicted_{name}_here.json").write_text(json.dumps(objects))
    cpu_run().write(folder / "cpu")
    return folder


def of_a_gpu(folder: Path) -> Path:
    """Six runs on an H200, the last run slower, and a run on a CPU."""
    of_a_cpu(folder)
    for minute in range(6):
        gpu_run(minute).write(folder / "NVIDIA-H200")
    return folder


def of_two_machines(folder: Path) -> Path:
    """Four runs on a CPU, the second on a different machine; in the newest run all numbers of Weft are larger."""
    for minute in range(4):
        made = cpu_run(minute)
        grown = {
            each.key: {key: value * (1.4 if minute == 3 and each.ours else 1) for key, value in each.numbers.items()}
            for each in made.cases
        }
        cases = tuple(replace(each, figures={**each.figures, **grown[each.key]}) for each in made.cases)
        replace(made, machine=OTHER if minute == 1 else MACHINE, cases=cases).write(folder / "cpu")
    return folder


def hostile(folder: Path) -> Path:
    """Two runs in which every text is markup."""
    for minute in range(2):
        words = {"group": HOSTILE, "name": f"{HOSTILE} 2"}
        cases = [
            *(case(way=way, median=1e-3 + minute * (way == "Weft"), **words) for way in ("Weft", HOSTILE)),
            Case(**words, way="eager", kind="time", status="failed", figures={"error": HOSTILE}),
            count("linear_cross_entropy", HOSTILE, "Weft", peak_bytes=4 + minute, **{HOSTILE: 3}),
            *(count("loss_curves", HOSTILE, way, step_001=2.0, step_002=1.0) for way in ("Weft", HOSTILE)),
        ]
        rest: dict[str, Any] = {"device": f"H {HOSTILE}", "commit": HOSTILE, "versions": {HOSTILE: HOSTILE}}
        run(*cases, minute=minute, ceilings={HOSTILE: 1}, **rest).write(folder / folder_name(rest["device"]))
    row = {"engine": HOSTILE, "mesh": HOSTILE, "shape": [2, 2], "pairs": 1, "mean": 1.0, "max": 1.0, "ratios": {"1": 1}}
    (folder / "reshard_bytes.json").write_text(json.dumps([row]))
    row = {"row": HOSTILE, "figure": HOSTILE, "predicted": 1.0, "reported": 2.0, "held_out": True, "source": HOSTILE}
    (folder / "predicted.json").write_text(json.dumps([row]))
    row = {"row": HOSTILE, "figure": HOSTILE, "predicted": 1.0, "measured": 2.0, "machine": HOSTILE}
    (folder / "predicted_memory_here.json").write_text(json.dumps([row]))
    return folder


def broken(folder: Path) -> Path:
    """Unreadable files, beside a readable run."""
    run().write(folder / "NVIDIA-H200")
    for number, text in enumerate(["", "{", "[]", '{"schema": 0}', run(minute=7, device="NVIDIA A100").text()]):
        (folder / "NVIDIA-H200" / f"20260301T13000{number}Z_broken.json").write_text(text)
    (folder / "reshard_bytes.json").write_text('[{"engine": "Weft"}]')
    (folder / "predicted.json").write_text('[{"row": "a", "predicted": 0.0}]')
    row = {"row": "a", "figure": "seconds", "predicted": 1.0, "measured": 0.0, "machine": "CPU"}
    (folder / "predicted_seconds_here.json").write_text(json.dumps([row]))
    (folder / "aot").mkdir()
    (folder / "aot" / "triton-3.7.1.json").write_text("{}")
    return folder


def gpu_run(minute: int) -> Run:
    pace, cases = 1.15 if minute == 5 else 1 + 0.01 * math.sin(3 * minute), []
    for tokens, roofline in ((256, 0.88), (8192, 0.93)):
        for way, ratio in KERNELS.items():
            seconds = tokens * 1e-7 * ratio * (pace if way == "Weft" else 1)
            told = (
                {}
                if way.startswith("a copy")
                else {"roofline": roofline / ratio, "peak_bytes": int(tokens * 1e5 * ratio)}
            )
            words = {"timer": "graph" if tokens == 256 else "events", "configuration": "8 warps"}
            cases.append(case(f"loss, {tokens} tokens", way, seconds, group="cross_entropy_speed", **told, **words))
    lost = replace(unmeasured("loss, 256 tokens", "CCE", "absent"), group="cross_entropy_speed")
    return run(*cases, lost, *counts(), minute=minute)


def cpu_run(minute: int = 9) -> Run:
    step, change = "a step of llama-tiny, dp=2 x tp=2", "S0R -> RS{}, 64 MB on 2x2"
    steps = [("Weft", 0.1, 21), ("torch", 0.14, 23), ("torch again", 0.141, 23)]
    times = [host("step_time", step, way, seconds, collectives=number) for way, seconds, number in steps]
    times += [
        host("reshard_time", change.format(at), way, 0.02 * at) for at in range(1, 9) for way in ("Weft", "DTensor")
    ]
    times += [host("sharded_optimizers", "a step, dp=4", way, 0.12) for way in ("Weft zero=2", "Weft zero=3", "FSDP2")]
    times += [host("mesh", name, "Weft", 7.6e-7) for name in ("infer.einsum, cached", "a mesh made")]
    return run(*counts(), *times, minute=minute, device="cpu", dirty=True, ceilings={})


def counts() -> list[Case]:
    moved = {"Weft": 6.0045, LIGER[0]: 6.0009, LIGER[1]: 10.0011}
    found = [count("cross_entropy", "cross_entropy", way, bytes_a_logit=each) for way, each in moved.items()]
    found.append(count("cross_entropy", "vocab-parallel", "Weft", bytes_a_logit=6.0176, gathered_bytes_a_token=12))
    held = {"Weft": 1.051e9, "eager torch": 5.22e9}
    found += [
        count("linear_cross_entropy", "4096 tokens", way, peak_bytes=each, flop=1.3e13) for way, each in held.items()
    ]
    for way, mean in (("Weft", 1.0), ("DTensor", 10.05)):
        over = {"bytes_over_bound_mean": mean, "bytes_over_bound_max": mean**2}
        found.append(count("reshard_bytes", "4x4x4, 8192 x 8192 fp32", way, pairs=81, **over))
    for place, mesh in enumerate(("one process", "dp=4", "tp=4")):
        losses = {f"step_{step:03}": 5.55 * math.exp(-step / 20) + 1e-7 * place * step for step in range(1, 41)}
        found.append(count("loss_curves", "llama-tiny, 40 steps", f"Weft, {mesh}", **losses))
    return [*found, count("compiled", "cross_entropy.gradient/bf16", "Weft, sm_90", registers=40, spill_bytes=0)]


def count(group: str, name: str, way: str, **figures: Any) -> Case:
    return Case(group=group, name=name, way=way, kind="count", status="measured", figures=figures)


def host(group: str, name: str, way: str, seconds: float, **figures: Any) -> Case:
    spread = {"seconds_median": seconds, "seconds_p20": seconds * 0.95, "seconds_p80": seconds * 1.1, "timer": "host"}
    return Case(group=group, name=name, way=way, kind="host_time", status="measured", figures={**spread, **figures})
