"""By what a run's bits are compared with an earlier run's: facts, digests and their header.

`arithmetic_of`: the facts on which the bits of a run with `plan.exact` depend, noted in checkpoints and digests.
`header_of` and `Against`: the digests of a run in training, compared with an earlier run's (--against, --replay).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.huggingface import attempt, raise_on_all
from ..compare.judge import Judge, shared_exact
from ..compare.record_file import Header, RunDigests, StepDigests, read_digests
from ..compare.report import describe
from ..exact import AXES, in_words, parse_exact
from ..experts import MixtureOfExperts
from ..layers import Dropout
from ..parallel.parallelize import pipeline_of
from .config import TrainConfig
from .run import Run
from .saved_run import ARITHMETIC, options_of_losses


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


def header_of(run: Run, model: nn.Module) -> Header:
    """The header of a run's digests. model: after `parallelize`, on this rank. Communication: none."""
    pipeline = pipeline_of(model)
    parameters = dict(model.named_parameters()) if pipeline is None else pipeline.parameters
    config, arithmetic = run.config, arithmetic_of(run.config, next(model.parameters()).device)
    return Header(
        parameters={name: tuple(each.shape) for name, each in parameters.items()},
        modules=tuple(name for name, _ in model.named_modules() if name),
        mesh=run.axes,
        batch=(config.data.batch_size, config.data.sequence_length),
        dtype=config.dtype,
        reduce_dtype=config.reduce_dtype,
        choosing=tuple(name for name, each in model.named_modules() if isinstance(each, MixtureOfExperts)),
        microbatches=config.plan.microbatches or 1,
        by_microbatch=_by_microbatch(model, run),
        data=run.corpus.sha256,
        seed=config.seed,
        arithmetic=None if arithmetic is None else {name: str(value) for name, value in arithmetic.items()},
        options=options_of_losses(run),
    )


def _by_microbatch(model: nn.Module, run: Run) -> tuple[str, ...]:
    """`Header.by_microbatch`: masks drawn for each microbatch, and losses that are no sums over tokens."""
    found = []
    if any(isinstance(each, Dropout) and each.p > 0 for each in model.modules()):
        found.append("the masks of dropout")
    if getattr(run.config.model, "router_aux_loss_coef", 0.0) and not getattr(run.config.model, "seq_aux", False):
        found.append("the balance loss of routers")
    return tuple(found)


class Against:
    """Compares each step of a run with the digests of an earlier run, on rank 0. Made by `train` on every rank."""

    def __init__(self, run: Run, folder: Path, header: Header, *, resumed_step: int) -> None:
        """Reads the digests of the earlier run, on rank 0.

        folder: of the earlier run. header: of this run. resumed_step: of the checkpoint that this run begins with; 0
            for a new run.
        Communication: a broadcast of rank 0's error. Raises ValueError, on every rank, for unreadable digests, and for
        runs that cannot be compared.
        """
        self._names = str(folder), str(run.folder)
        self._recorded: RunDigests | None = None
        self._judge: Judge | None = None
        self._previous: StepDigests | None = None
        error = attempt(self._begin, run, folder, header, resumed_step) if dist.get_rank() == 0 else None
        raise_on_all(error, dist.is_initialized())

    def _begin(self, run: Run, folder: Path, header: Header, resumed_step: int) -> None:
        """`__init__` on rank 0."""
        self._recorded = read_digests(folder)
        same_start = run.resume is not None and run.resume.parent.resolve() == folder.resolve()
        headers = (*self._recorded.headers.values(), header)
        self._judge = Judge(
            (self._recorded.header_of(resumed_step + 1), header), same_start=same_start, exact=shared_exact(headers)
        )

    def add(self, digests: list[StepDigests]) -> str:
        """Compare further steps. Returns, on every rank, the report of the first difference above rounding, else "".

        digests: on rank 0, of this run's steps since the last call; elsewhere not read.
        Communication: a broadcast of the report. Raises ValueError, on every rank, as `Judge.add`.
        """
        report: list[Any] = ["", None]
        if self._judge is not None and self._recorded is not None:
            try:
                report[0] = self._add(self._judge, self._recorded, digests)
            except ValueError as error:
                report[1] = str(error)
        dist.broadcast_object_list(report, src=0)
        if report[1] is not None:
            raise ValueError(report[1])
        return str(report[0])

    def _add(self, judge: Judge, recorded: RunDigests, digests: list[StepDigests]) -> str:
        """`add` on rank 0."""
        for each in digests:
            previous, self._previous = self._previous, each
            earlier = recorded.steps.get(each.step)
            if earlier is not None and judge.add(earlier, each, (recorded.steps.get(each.step - 1), previous)):
                return describe(judge, self._names)
        return ""

    def closing_line(self) -> str:
        """The verdict on all compared steps, for rank 0 to print at the end."""
        if self._judge is None or not self._judge.steps:
            return f"compared with {self._names[0]}: no step of this run has digests there"
        return f"compared with {self._names[0]}: {describe(self._judge, self._names)}"
