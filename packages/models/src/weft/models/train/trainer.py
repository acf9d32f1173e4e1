"""The model, optimizer and data of a process, and the computation of a step.

The training loop (loop.py) makes a `Trainer` per process and calls the methods in order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.kernels import cross_entropy
from weft.mesh import Layout, Shard
from weft.reshard import GradientSync, drop_gathered, fixed_parameters
from weft.reshard.extension import Collective, WaitTimer, format_ranks, gathering_units

from ..data.batches import Batches, Prefetch, Rows
from ..generation import generate
from ..losses import local_value
from ..parallel import lay_out_batch, parallelize
from ..parallel.batch import prepare_rows
from ..parallel.parallelize import pipeline_of
from ..parallel.pipeline.run import Microbatch, Pipeline
from ..step.communication import Communication, Phase
from ..step.find_gradients import StepResult, find_gradients, find_loss
from ..step.forward_backward import divide, join
from ..tracing import traced
from .explanation import Outline
from .initial_weights import filled, loaded, loaded_alone
from .learning_rate import learning_rate
from .measure import CollectiveCount, flops_per_token, peak_flops, peak_memory, total_memory
from .model_class import parameters_of
from .optimizer import make_optimizer
from .report import Metrics, Report
from .run import Run

SAMPLE_TOKENS = 60


class TrainingError(RuntimeError):
    """The run cannot continue; the message says where and why.

    The message names the newest checkpoint if a value is not finite or a checkpoint could not be written.
    """


@dataclass(frozen=True, slots=True)
class _UnreadStep:
    """A step whose loss and gradient norm are still on the device, until `Trainer.read`."""

    step: int
    found: StepResult
    lr: float


class Trainer:
    """The model, optimizer and data on this process, with the methods to train, evaluate and sample."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._config, self._device = run.config, device
        self.rank = dist.get_rank()
        self.report = Report(enabled=self.rank == 0)
        self._outline = outline = Outline.of(run.config, run.axes)
        self.mesh, self.plan = outline.mesh, outline.plan
        self._shape, self._criterion = outline.batch, outline.criterion
        data = run.config.data
        self._batches = Batches(
            run.corpus,
            sequence_length=data.sequence_length,
            batch_size=data.batch_size,
            seed=run.config.seed,
            packed=data.pack and run.corpus.is_prepared,
        )
        # packed documents say which ranks will exchange keys
        documents = None if run.config.compile or self.rank else self._batches.batch(0, slice(None)).documents
        self.predicted = outline.first_step(0, device.type, documents).communication if self.rank == 0 else None
        model = parallelize(outline.make_model(), self.mesh, self.plan)
        if run.origin is None:
            self.model = filled(model, device, run.config.seed)
        else:
            self.model = loaded(model, run.origin, device, self.mesh, self.plan)
        # the folder of the weights before step 1; `Saver` loads the weights of a resumed run
        self._origin = run.origin or run.resume
        self.pipeline = pipeline_of(self.model)
        if run.config.compile:
            for layer in self.model.blocks:  # type: ignore[union-attr]
                layer.compile(fullgraph=True)
        self._sync = GradientSync(self.model, dtype=outline.reduce_dtype)
        self.optimizer = make_optimizer(self.model, run.config.optimizer)
        self.doing = "before the first step"  # shown by `RollCall` if a rank does not answer
        self._prompt, self._begin, self._tokenizer = run.corpus.prompt, run.corpus.begin, run.corpus.tokenizer
        self._stage_mesh = self.mesh if self.pipeline is None else self.pipeline.stage_mesh
        self._layout = Layout(self._stage_mesh, {"dp": Shard(0)})
        self._rows = Prefetch(self._read_rows)
        self.issued: dict[Phase, list[Collective]] = {}  # collectives of step 1
        self._flops_per_token = flops_per_token(
            run.config.model,
            data.sequence_length,
            multiplying=parameters_of(run.config.model, run.config.model_class)[1],
        )
        self._peak_flops = peak_flops(device, run.config.dtype)
        self._unread: list[_UnreadStep] = []
        self.waits = WaitTimer(device)
        self._read_at = time.perf_counter()

    def _computing(self) -> AbstractContextManager[None]:
        """The context to call the model in: autocast to the run's dtype."""
        return self._outline.computing(self._device.type)

    def step(self, step: int, count: CollectiveCount | None = None) -> None:
        """Forward, backward, gradient sync, clipping and update of step `step`, counted from 0.

        count: if given, the counted collectives are added to `issued` by phase.
        The host does not wait for the device; `read` fetches the loss and the norm.
        Communication: as `find_gradients`; the optimizer updates each rank's shards without communication.
        """

        def after_phase(phase: Phase) -> None:
            self.doing = f"step {step + 1}, after {phase}"
            if count is not None:
                self.issued.setdefault(phase, []).extend(count.take_each())

        self.doing = f"step {step + 1}, forward"

        clip_norm = self._config.optimizer.clip_norm
        found = find_gradients(
            self.model,
            self._criterion,
            self._microbatches(step),
            self._sync,
            clip_norm=clip_norm,
            after_phase=after_phase,
            computing=self._computing,
        )
        lr = learning_rate(self._config.optimizer, step, self._config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with traced("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._unread.append(_UnreadStep(step + 1, found, lr))

    def read_ahead(self, step: int) -> None:
        """Start reading the data of the first step to be taken."""
        self._rows.begin(step)

    def begin_reading(self) -> None:
        """Restart the clock from which the next `read` measures speed and waiting."""
        self.waits.take()
        self._read_at = time.perf_counter()

    def read(self, last: Callable[[], Path | None] = lambda: None) -> list[Metrics]:
        """Wait for the device once, and return the metrics of the steps since the last call, in order.

        last: returns the checkpoint to name in an error.
        Communication: none; for a loss that is not finite, an all-gather of a bool: whether the rank's part of the
        loss is not finite.
        Raises TrainingError, on every rank, for the first step whose loss or gradient norm is not finite.
        """
        steps, self._unread = self._unread, []
        losses = torch.stack([each.found.loss for each in steps]).tolist()
        norms = torch.stack([each.found.grad_norm for each in steps if each.found.grad_norm is not None]).tolist()
        seconds, waited = time.perf_counter() - self._read_at, self.waits.take()
        waited_for_data, self._rows.waited = self._rows.waited, 0.0
        self.begin_reading()
        for each, loss, norm in zip(steps, losses, norms, strict=True):
            if not math.isfinite(loss):
                ranks = self._ranks_where(not math.isfinite(float(each.found.local_loss)))
                raise TrainingError(self._explain(f"the loss is {loss} at step {each.step}, on {ranks}", last))
            if not math.isfinite(norm):
                raise TrainingError(self._explain(f"the gradients' norm is {norm} at step {each.step}", last))
        per_second = len(steps) * math.prod(self._shape) / seconds
        flops = per_second * self._flops_per_token / self.mesh.size
        used = peak_memory(self._device)
        return [
            Metrics(
                step=each.step,
                done=each.step / self._config.steps,
                loss=loss,
                grad_norm=norm,
                lr=each.lr,
                tokens_per_second=per_second,
                tflops=flops / 1e12,
                mfu=None if self._peak_flops is None else flops / self._peak_flops,
                memory_bytes=used,
                memory_share=used / total_memory(self._device),
                communication_share=waited / seconds,
                data_share=waited_for_data / seconds,
                seconds_left=(self._config.steps - each.step) * seconds / len(steps),
            )
            for each, loss, norm in zip(steps, losses, norms, strict=True)
        ]

    def check_finite(self, step: int, last: Callable[[], Path | None]) -> None:
        """Check before saving whether all weights and optimizer states are finite. Waits for the device once.

        step: the steps taken, for the error. last: returns the checkpoint to name in an error.
        Communication: an all-reduce of a number; after a failure, an all-gather.
        Raises TrainingError, on every rank, if a value is not finite.
        """
        bounds = [each.float() for tensor in self._written() for each in torch.aminmax(tensor)]
        here = torch.stack([torch.zeros((), device=self._device), *bounds]).isfinite().all().float()
        everywhere = here.clone()
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        if not everywhere:
            where = self._ranks_where(not here)
            raise TrainingError(self._explain(f"weights are not finite after step {step}, on {where}", last))

    def _written(self) -> Iterator[Tensor]:
        """Yield this rank's nonempty local tensors of the weights and the optimizer's state."""
        states = (each for state in self.optimizer.state.values() for each in state.values())
        for each in (*self.model.parameters(), *states):
            # State tensors on another device are step counts.
            if isinstance(each, Tensor) and each.device.type == self._device.type and each.is_floating_point():
                local = local_value(each)
                if local.numel():
                    yield local

    def first_step(self) -> None:
        """Take step 1 of a new run, instead of `step(0)`; a resumed run skips this method.

        The step is uncompiled. The collectives are counted and printed beside the prediction. With the option
        `check`, the loss is compared with the loss of one process.
        Communication: as `step`; for the comparison a broadcast of a number; under a pipeline an all-gather by `_held`.
        Raises TrainingError, on every rank, if the losses differ by more than rounding.
        """
        alone = self._loss_alone() if self._config.check and self.rank == 0 else None
        self.begin_reading()
        drop_gathered(self.model)  # step 1 starts from shards, like every later step
        with torch.compiler.set_stance("force_eager"), CollectiveCount() as count:
            self.step(0, count)
        if self.predicted is not None:
            self.report.issued(self.predicted, Communication.of(self.issued))
        if self._config.check:
            self._compare(float(self._unread[0].found.loss), alone)
        if self.pipeline is not None:
            self.report.line(_held(self.pipeline, self.model, self.optimizer))

    def held_out_loss(self) -> float:
        """The mean loss over the held-out text, without dropout. Every rank takes part and waits for the device.

        Communication: for each batch the model's forward and the sum of the losses over "dp" and "cp"; with stages
        also messages between stages and an all-reduce of the sum over "pp".
        """
        self.model.eval()
        (size, T), count = self._shape, self._batches.num_held_out
        total = torch.zeros((), device=self._device)
        # A compiled model would be compiled again for a forward without gradients.
        eager = torch.compiler.set_stance("force_eager")
        with traced("evaluate"), eager, self._computing(), fixed_parameters(self.model):
            for start in range(0, count, size):
                shape = (min(size, count - start), T)
                rows = self._layout.local_slices(shape, self.rank)[0]
                batch = self._batches.held_out(slice(start + rows.start, start + rows.stop))
                microbatch = self._microbatch(batch, shape)
                total += find_loss(self.model, partial(cross_entropy, denominator=float(count * T)), [microbatch])
        self.model.train()
        return total.item()

    def held_out_bytes(self) -> float:
        """Bytes of the held-out text per predicted token."""
        count = self._batches.num_held_out
        rows = (self._batches.held_out(slice(row, row + 1)).targets[0].tolist() for row in range(count))
        return max(1, sum(map(self._tokenizer.num_bytes, rows))) / (count * self._shape[1])

    def sample(self) -> str:
        """A prompt and the model's continuation, without dropout. Every rank takes part."""
        self.model.eval()
        # tokenized like the beginning of a document in the data
        prompt_tokens = [*self._begin, *self._tokenizer.encode_document(self._prompt)]
        prompt = torch.tensor([prompt_tokens], device=self._device)
        # a compiled model would be compiled again for each length
        with torch.compiler.set_stance("force_eager"), self._computing():
            tokens = generate(
                *(self.model, prompt),
                max_new_tokens=SAMPLE_TOKENS,
                temperature=0.7,
                seed=self._config.seed,
                use_cache=hasattr(self.model, "make_cache"),
            )
        return self._prompt + "".join(
            self._tokenizer.decode_each(tokens[0, len(prompt_tokens) :].tolist(), after=prompt_tokens)
        )

    def _microbatches(self, step: int) -> list[Microbatch]:
        """This rank's rows of each microbatch of a step. The microbatches are the same on every mesh."""
        (rows, T), parts = self._shape, []
        with traced("data"):
            batches = self._rows(step)
        for number, batch in enumerate(batches):
            key = self._outline.dropout_key(step, number)
            parts.append(self._microbatch(batch, (rows // self._outline.microbatches, T), dropout_key=key))
        join(parts)
        return parts

    def _read_rows(self, step: int) -> list[Rows]:
        """Read only this rank's rows of each microbatch, and prepare packed ones."""
        (rows, T), count = self._shape, self._outline.microbatches
        own = self._layout.local_slices((rows // count, T), self.rank)[0]
        firsts = range(0, rows, rows // count)
        read = [self._batches.batch(step, slice(first + own.start, first + own.stop)) for first in firsts]
        options: Any = {"compiled": self._config.compile, "dtype": getattr(torch, self._config.dtype)}
        for each in read:
            prepare_rows(self.model, self._stage_mesh, self.plan, each.documents, self._device, **options)
        return read

    def _microbatch(self, rows: Rows, shape: tuple[int, int], **inputs: Any) -> Microbatch:
        """The arguments of the model for this rank's rows.

        shape: (rows, T) of the whole microbatch over all ranks. inputs: further inputs of the model, as dropout_key.
        """
        # documents stay on the host, where lay_out_batch reads them
        tensors = {name: each if name == "documents" else each.to(self._device) for name, each in rows.named().items()}
        compiled = self._config.compile
        laid = lay_out_batch(self._stage_mesh, self.plan, **tensors, rows=shape[0], compiled=compiled)
        assert laid.targets is not None, "rows.named() includes targets"
        inputs |= {"positions": laid.positions, "documents": laid.documents}
        return Microbatch(args=(laid.tokens,), kwargs=self._outline.accepted(inputs), targets=laid.targets)

    def _loss_alone(self) -> float:
        """The loss of step 1 on this process alone: the same weights, the whole batch, unsharded tensors."""
        model = self._outline.make_model()
        if self._origin is None:
            model = filled(model, self._device, self._config.seed)
        else:
            model = loaded_alone(model, self._origin, self._device)
        tensors = {name: each.to(self._device) for name, each in self._batches.batch(0, slice(None)).named().items()}
        tokens, target = tensors.pop("tokens"), tensors.pop("targets")
        tensors = self._outline.accepted({"dropout_key": self._outline.dropout_key(0), **tensors})
        parts = divide(model, tokens, target, self._outline.microbatches, tensors)
        return float(find_loss(model, self._criterion, parts, self._computing))

    def _compare(self, loss: float, alone: float | None) -> None:
        """Compare the loss of step 1 with `alone`, a single process's loss, given on rank 0.

        Communication: a broadcast of a number.
        Raises TrainingError, on every rank, if the losses differ by more than rounding. An infinite or NaN loss is
        left to `read`, which names the ranks.
        """
        count, wrong = self.mesh.size, [alone]  # [None] if the losses agree
        if alone is not None and self.report.check(loss, alone, count, self._config.dtype):
            wrong = [None]
        dist.broadcast_object_list(wrong, src=0)
        if wrong[0] is not None and math.isfinite(loss):
            raise TrainingError(
                f"the loss of step 1 is {loss:.7f} on {count} process{'es' if count > 1 else ''}, but {wrong[0]:.7f} "
                f"on one, with the weights {'of the seed' if self._origin is None else f'of {self._origin}'}: this "
                f"mesh or plan computes another model; choose another --mesh or --plan, or --no-check to train anyway"
            )

    def _ranks_where(self, here: bool) -> str:
        """The ranks with a true `here`, in words; all ranks if there are none.

        Communication: an all-gather of a bool.
        """
        found: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(found, here)
        return format_ranks([rank for rank, is_true in enumerate(found) if is_true] or list(range(len(found))))

    def _explain(self, what: str, last: Callable[[], Path | None]) -> str:
        """The message of a TrainingError: the cause, the newest checkpoint, and a remedy."""
        return (
            f"{what}; last checkpoint: {last() or 'none; set --save-every to keep some'}. A lower --optimizer.lr (now "
            f"{self._config.optimizer.lr}) or a longer --optimizer.warmup-steps often helps"
        )


def _held(pipeline: Pipeline, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A table of each rank's memory, in MiB, and microbatches in flight, for a pipeline.

    A gradient that accumulates at full size over microbatches counts at full size. Communication: an all-gather of a
    few numbers.
    """
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    parameters = list(model.parameters())
    found = (each for unit in gathering_units(model) for each in unit.full_parameters().items())
    full_parameters: dict[Tensor, Tensor] = {shard: whole.leaf for shard, whole in found if whole.accumulate_grad}
    gradients = [full_parameters.get(each, each) for each in parameters if each.requires_grad]
    numbers = [sum(local_value(each).nbytes for each in tensors) for tensors in (parameters, gradients, states)]
    of_ranks: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, [*numbers, pipeline.in_flight])
    lines = ["held by each rank, in MiB; and microbatches in flight at most"]
    lines.append("          parameters  gradients  optimizer state  in flight")
    for rank, (parameter, gradient, state, in_flight) in enumerate(of_ranks):
        lines.append(
            f"  rank {rank:<4} {parameter / 2**20:9.2f}  {gradient / 2**20:9.2f}  {state / 2**20:15.2f}  {in_flight:9}"
        )
    return "\n".join(lines)
