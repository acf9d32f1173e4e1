"""The digests of a run in training: their header, and the comparison with an earlier run's (--against, --replay)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ..checkpoint.huggingface import attempt, raise_on_all
from ..compare.entries import Header, StepDigests
from ..compare.judge import Judge, shared_exact
from ..compare.record_file import RunDigests, read_digests
from ..compare.report import describe
from ..experts import MixtureOfExperts
from ..layers import Dropout
from ..parallel.parallelize import pipeline_of
from .arithmetic import arithmetic_of
from .run import Run


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
