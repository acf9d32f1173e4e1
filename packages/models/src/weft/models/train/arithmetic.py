"""The facts on which the bits of a run with `plan.exact` depend: noted in checkpoints and digests, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..exact import AXES, in_words, parse_exact
from .config import TrainConfig
from .saved_run import ARITHMETIC


def arithmetic_of(config: TrainConfig, device: torch.device) -> dict[str, Any] | None:
    """The facts, by name, on which a run's bits depend beside data and options of training; None without `plan.exact`.

    These are the named mesh, microbatches and the order of their sums, context, dtypes, and the version of torch, the
    device and, on a CPU, the processor's instructions and the number of threads, on which products may depend.
    """
    plan = config.plan
    if plan.exact is None:
        return None
    named = parse_exact(plan.exact)
    above_one = {axis: named[axis] for axis in AXES if named.get(axis, 1) > 1}
    facts: dict[str, Any] = {
        "exact": in_words(above_one or named),
        "torch": str(torch.__version__),
        "dtype": config.dtype,
    }
    facts |= {"reduce_dtype": config.reduce_dtype, "microbatches": plan.microbatches or 1}
    if facts["microbatches"] > 1:
        facts["the ranks' sum"] = "of each microbatch" if plan.zero > 1 else "of all microbatches"
    if config.mesh.cp > 1:
        facts["context"] = plan.context
    if device.type == "cuda":
        return facts | {"device": torch.cuda.get_device_name(device)}
    instructions = torch.backends.cpu.get_cpu_capability()
    return facts | {"device": device.type, "instructions": instructions, "threads": torch.get_num_threads()}


def end_of_bits(saved: Mapping[str, Any], own: Mapping[str, Any] | None, step: int) -> list[str]:
    """A line to print if a resumed run will have different bits than the run before the checkpoint; otherwise none.

    saved: the checkpoint's document. own: `arithmetic_of` the resumed run. step: of the checkpoint.
    """
    before = saved.get(ARITHMETIC)
    if "config" not in saved or (before is None and own is None):
        return []
    if own is None:
        return [f"plan.exact is off from step {step + 1} on: the bits of the run so far end here"]
    if before is None:
        return [f"plan.exact is {own['exact']} from step {step + 1} on; the steps before were taken without"]
    changed = [
        f"{name} is {own.get(name)}, and was {before.get(name)}"
        for name in own | before
        if own.get(name) != before.get(name)
    ]
    return [f"the bits of the run so far end at step {step}: {'; '.join(changed)}"] if changed else []
