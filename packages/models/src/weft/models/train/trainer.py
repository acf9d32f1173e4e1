"""The model, optimizer and data of a process, and the computation of a step.

The training loop (loop.py) makes a `Trainer` per process. Order of the calls: `begin`; `held_out_loss` in a run before
step 1; for each step `step`, or `first_step` for step 1; where due `read_metrics`, `held_out_loss`, and `check_finite`
before a checkpoint; at the end `sample` and `held_out_loss`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from weft.reshard import GradientSync, drop_gathered, fixed_parameters
from weft.reshard.extension import Collective, WaitTimer, format_ranks

from ..compare.recorder import Recorder
from ..data.batches import Prefetch
from ..data.examples.rows import ExampleBatches
from ..generation import generate
from ..losses import local_value
from ..parallel import parallelize
from ..parallel.batch import cuts_by_documents
from ..parallel.parallelize import pipeline_of
from ..step.communication import Communication, Phase
from ..step.find_gradients import find_gradients, find_loss
from ..step.loss_parts import update_correction_biases
from ..tracing import traced
from .config import learning_rate
from .explanation import Outline
from .initial_weights import draw_weights, load_unsharded_weights, load_weights
from .measure import CollectiveCount, flops_per_token, memory_table, peak_flops, peak_memory, total_memory
from .model_class import parameters_of
from .objective import PreferenceObjective, StepBatch, TokenObjective, make_preference_objective, open_batches
from .optimizer import make_optimizer
from .report import Metrics, Report
from .run import Run
from .step_metrics import UnreadStep, name_failing_router, preference_metrics, router_metrics, sum_loads

SAMPLE_TOKENS = 60


class TrainingError(RuntimeError):
    """The run cannot continue; the message says where and why.

    Raised by `train` on every rank; `launch` prints the message on rank 0. The message names the newest checkpoint if
    a value is not finite or a checkpoint could not be written.
    """


class Trainer:
    """The model, optimizer and data on this process, with the methods to train, evaluate and sample.

    model, optimizer, mesh, plan, pipeline, rank: of this process; pipeline: None without one.
    report: prints on rank 0. activity: the work of the process now, in words, for `RollCall`.
    prediction: the predicted communication of a step, on rank 0; else None.
    predicts_exchange: whether rank 0 predicted step 1 by the documents, for exchanges of keys along "cp".
    rows_line: the rows of examples in words; None for text. The loop prints both lines. tokens_line: as in `Outline`.
    recorder: digests steps, for the loop to take after each step; None in a run without digests.
    issued_collectives: the collectives of step 1 by phase, filled by `first_step`.
    load: [layers with experts, E], set by `read_metrics`: the tokens given to each expert; None without experts.
    wait_timer: times the device's waits for communication. Active within `measure_waits` of the loop.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self._config, self._device = run.config, device
        self.rank = dist.get_rank()
        self.report = Report(enabled=self.rank == 0)
        self._outline = outline = Outline.of(run.config, run.axes, device.type)
        self.mesh, self.plan, self.tokens_line = outline.mesh, outline.plan, outline.tokens_line
        self._batch_shape = outline.batch_shape
        self._batches = open_batches(run)
        cuts = self.rank == 0 and cuts_by_documents(self.mesh, self.plan)
        documents = self._batches.batch(0, slice(None)).documents if cuts else None  # which decide who exchanges keys
        self.predicts_exchange = documents is not None
        self.rows_line = self._batches.describe() if isinstance(self._batches, ExampleBatches) else None
        examples = self._batches.examples_per_row if isinstance(self._batches, ExampleBatches) else 0
        self.prediction: Communication | None = None
        if self.rank == 0:
            self.prediction = outline.record_step(0, device.type, documents, examples).communication
        model = parallelize(outline.make_model(), self.mesh, self.plan)
        if run.origin is None:
            self.model = draw_weights(model, device, run.config.seed)
        else:
            self.model = load_weights(model, run.origin, device, self.mesh, self.plan, seed=run.config.seed)
        # The folder of the weights before step 1, if any; `first_step` compares with these weights. Also `run.resume`,
        # because a run resumed from a checkpoint of `weft convert` still takes step 1.
        self._origin = run.origin or run.resume
        self.pipeline = pipeline_of(self.model)
        if run.config.compile:
            experts = self.plan.experts
            is_whole = experts is None or experts.size == 1  # else a graph before and after experts
            is_whole = is_whole and not cuts_by_documents(self.mesh, self.plan)  # else before and after attention
            for layer in self.model.blocks:  # type: ignore[union-attr]
                layer.compile(fullgraph=is_whole)
        self._sync = GradientSync(self.model, dtype=outline.reduce_dtype)
        self.optimizer = make_optimizer(self.model, run.config.optimizer)
        self.activity = "before the first step"  # shown by `RollCall` if a rank does not answer
        self._corpus: Any = run.corpus
        self._tokenizer = run.corpus.tokenizer
        self._objective: TokenObjective | PreferenceObjective
        if isinstance(self._batches, ExampleBatches) and run.config.task in ("dpo", "kto"):
            self._objective = make_preference_objective(run, self._batches, outline, self.model, device)
        else:
            self._objective = TokenObjective(self._batches, outline, self.model, device)
        every, steps = run.config.digests, run.digested_steps
        self.recorder = Recorder(self.model, self._batch_shape, every=every, steps=steps) if every or steps else None
        self._prefetch: Prefetch[Any] = Prefetch(self._objective.read)
        self.issued_collectives: dict[Phase, list[Collective]] = {}  # collectives of step 1
        self._flops_per_token = flops_per_token(
            run.config.model,
            outline.batch_shape[1],
            multiplying=parameters_of(run.config.model, run.config.model_class)[1],
        )
        self._peak_flops = peak_flops(device, run.config.dtype)
        self._unread_steps: list[UnreadStep] = []
        self.load: Tensor | None = None  # summed over the steps of the last `read_metrics`
        self.wait_timer = WaitTimer(device)
        self._read_at = time.perf_counter()

    def _call_context(self) -> AbstractContextManager[None]:
        """The context to call the model in: autocast to the run's dtype."""
        return self._outline.autocast_context(self._device.type)

    def step(self, step: int, counter: CollectiveCount | None = None) -> None:
        """Forward, backward, gradient sync, clipping and update of step `step`, counted from 0.

        counter: from `first_step`; after each phase, the collectives move to `issued_collectives`. None after step 1.
        The host does not wait for the device; `read_metrics` fetches the loss and the norm.
        Communication: for dpo and kto as `PreferenceObjective.step`; as `find_gradients`; under muon as Muon's
        `update_matrices`, while every further optimizer updates each rank's shards without communication; for a step
        with digests as `Recorder.finish`.
        """

        def after_phase(phase: Phase) -> None:
            self.activity = f"step {step + 1}, after {phase}"
            if counter is not None:
                self.issued_collectives.setdefault(phase, []).extend(counter.take_each())

        self.activity = f"step {step + 1}, forward"

        clip_norm = self._config.optimizer.clip_norm
        with traced("data"):
            rows: Any = self._prefetch(step)
        batch: StepBatch = self._objective.step(step, rows)
        if counter is not None:
            counter.take_each()  # of the reference; the prediction is of the model's step alone
        recorder = self.recorder if self.recorder is not None and self.recorder.begin(step + 1) else None
        with nullcontext() if recorder is None else recorder.watching(batch.microbatches):
            result = find_gradients(
                self.model,
                batch.criterion,
                batch.microbatches,
                self._sync,
                clip_norm=clip_norm,
                after_phase=after_phase,
                call_context=self._call_context,
                after_sync=(lambda: None) if recorder is None else recorder.add_gradients,
            )
        lr = learning_rate(self._config.optimizer, step, self._config.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with traced("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
            if result.parts is not None and self._outline.bias_rate:
                update_correction_biases(self.model, result.parts.load, self._outline.bias_rate)
        after_phase("optimizer")
        if recorder is not None:
            recorder.finish(result.loss, result.grad_norm)
        self._unread_steps.append(UnreadStep(step + 1, result, lr))

    def begin(self, step: int) -> None:
        """Fill the table of a precomputed reference, if any; start a thread to read the data of `step`, from 0.

        Called by the loop after resuming: `step` is the first of this process. Later steps' data are prefetched.
        Communication: as `PreferenceObjective.begin`, for dpo and kto.
        """
        self._objective.begin(step, self.report.print_line)
        self._prefetch.begin(step)

    def restart_clock(self) -> None:
        """Restart the clock by which the next `read_metrics` measures speed and the share of waiting.

        Called before the steps, by `first_step` and `read_metrics`, and after evaluations, whose time does not count.
        """
        self.wait_timer.pop_seconds()
        self._read_at = time.perf_counter()

    def read_metrics(self, newest_checkpoint: Callable[[], Path | None] = lambda: None) -> list[Metrics]:
        """Wait for the device once, and return the metrics of the steps since the last call, in order.

        newest_checkpoint: returns the path to name in an error; `Saver.wait_for_newest` in a run.
        Communication: none; for a loss that is not finite, an all-gather of a bool: whether the rank's part of the
        loss is not finite.
        Raises TrainingError, on every rank, for the first step whose loss or gradient norm is not finite.
        """
        steps, self._unread_steps = self._unread_steps, []
        losses = torch.stack([each.result.loss for each in steps]).tolist()
        norms = torch.stack([each.result.grad_norm for each in steps if each.result.grad_norm is not None]).tolist()
        of_routers, of_preferences = router_metrics(steps), preference_metrics(steps, self._config.task, self._batches)
        self.load = sum_loads(steps)
        seconds, waited = time.perf_counter() - self._read_at, self.wait_timer.pop_seconds()
        waited_for_data, self._prefetch.waited = self._prefetch.waited, 0.0
        self.restart_clock()
        for each, loss, norm in zip(steps, losses, norms, strict=True):
            if not math.isfinite(loss):
                ranks = self._ranks_with(not math.isfinite(float(each.result.local_loss)))
                what = f"the loss is {loss} at step {each.step}, on {ranks}"
                what += name_failing_router(each.result, self._config.model)
                raise TrainingError(self._failure(what, newest_checkpoint))
            if not math.isfinite(norm):
                raise TrainingError(
                    self._failure(f"the gradients' norm is {norm} at step {each.step}", newest_checkpoint)
                )
        per_second = len(steps) * math.prod(self._batch_shape) / seconds
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
                **routers,
                **preferences,
            )
            for each, loss, norm, routers, preferences in zip(
                steps, losses, norms, of_routers, of_preferences, strict=True
            )
        ]

    def check_finite(self, step: int, newest_checkpoint: Callable[[], Path | None]) -> None:
        """Check before saving whether all weights and optimizer states are finite. Waits for the device once.

        step: the number of steps taken, for the error. newest_checkpoint: as for `read_metrics`.
        Communication: an all-reduce of a number; after a failure, an all-gather.
        Raises TrainingError, on every rank, if a value is not finite.
        """
        bounds = [each.float() for tensor in self._tensors_to_save() for each in torch.aminmax(tensor)]
        is_finite = torch.stack([torch.zeros((), device=self._device), *bounds]).isfinite().all().float()
        all_finite = is_finite.clone()
        dist.all_reduce(all_finite, op=dist.ReduceOp.MIN)
        if not all_finite:
            ranks = self._ranks_with(not is_finite)
            what = f"weights are not finite after step {step}, on {ranks}"
            raise TrainingError(self._failure(what, newest_checkpoint))

    def _tensors_to_save(self) -> Iterator[Tensor]:
        """Yield this rank's nonempty local tensors of the weights and the optimizer's state."""
        states = (each for state in self.optimizer.state.values() for each in state.values())
        for each in (*self.model.parameters(), *states):
            # State tensors on another device are step counts.
            if isinstance(each, Tensor) and each.device.type == self._device.type and each.is_floating_point():
                local = local_value(each)
                if local.numel():
                    yield local

    def first_step(self) -> None:
        """Take step 1, in place of `step(0)`. A run resumed after step 1 skips this method.

        The step is uncompiled. The collectives are counted and printed beside the prediction. With the option
        `check`, the loss is compared with the loss of one process.
        Communication: as `step`; for the comparison a broadcast of a number; under a pipeline also an all-gather, by
        `memory_table`.
        Raises TrainingError, on every rank, if the losses differ by more than rounding.
        """
        if self._config.check:
            self._objective.keep_reference(0)
        loss_alone = self._single_process_loss() if self._config.check and self.rank == 0 else None
        self.restart_clock()
        drop_gathered(self.model)  # step 1 starts from shards, like every later step
        with torch.compiler.set_stance("force_eager"), CollectiveCount() as counter:
            self.step(0, counter)
        if self.prediction is not None:
            self.report.print_issued(self.prediction, Communication.of(self.issued_collectives))
        if self._config.check:
            self._compare_losses(float(self._unread_steps[0].result.loss), loss_alone)
        if self.pipeline is not None:
            self.report.print_line(memory_table(self.pipeline, self.model, self.optimizer))

    def held_out_loss(self) -> float | None:
        """The mean loss over the held-out data, without dropout; None if nothing is held out.

        Every rank takes part and waits for the device.
        Communication: for each batch the model's forward and the sum of the losses over "dp" and "cp"; with stages
        also messages between stages and an all-reduce of the sum over "pp"; for dpo and kto also the reference's.
        """
        if not self._batches.num_held_out:
            return None
        self.model.eval()
        total = torch.zeros((), device=self._device)
        # A compiled model would be compiled again for a forward without gradients.
        eager = torch.compiler.set_stance("force_eager")
        with traced("evaluate"), eager, self._call_context(), fixed_parameters(self.model):
            for batch in self._objective.held_out():
                total += batch.weight * find_loss(self.model, batch.criterion, batch.microbatches)
        self.model.train()
        return total.item()

    def held_out_bytes_per_token(self) -> float | None:
        """Bytes of the held-out text per predicted token, for the bits per byte that the run's last lines print.

        None for examples, whose prompts are not predicted.
        """
        if self._config.task != "pretrain":
            return None
        count = self._batches.num_held_out
        rows = (self._batches.held_out(slice(row, row + 1)).targets[0].tolist() for row in range(count))
        return max(1, sum(map(self._tokenizer.num_bytes, rows))) / (count * self._batch_shape[1])

    def sample(self) -> str:
        """A prompt and the model's continuation, without dropout. Every rank takes part.

        For a task: the prompt of the first example, and the likeliest answer up to its end.
        """
        self.model.eval()
        corpus, is_text = self._corpus, self._config.task == "pretrain"
        # tokenized like the beginning of a document in the data
        prompt_tokens = (
            [*corpus.begin, *self._tokenizer.encode_document(corpus.prompt)] if is_text else corpus.prompt_tokens
        )
        ends = [] if is_text else [self._tokenizer.end]
        prompt = torch.tensor([prompt_tokens], device=self._device)
        # a compiled model would be compiled again for each length
        with torch.compiler.set_stance("force_eager"), self._call_context():
            tokens = generate(
                self.model,
                prompt,
                max_new_tokens=SAMPLE_TOKENS,
                temperature=0.7 if is_text else 0.0,
                seed=self._config.seed,
                use_cache=hasattr(self.model, "make_cache"),
                ends=ends,
            )
        new = takewhile(lambda token: token not in ends, tokens[0, len(prompt_tokens) :].tolist())
        text: str = corpus.prompt + "".join(self._tokenizer.decode_each(new, after=prompt_tokens))
        return text

    def _single_process_loss(self) -> float:
        """The loss of step 1 on this process alone: the same weights, the whole batch, unsharded tensors."""
        model = self._outline.make_model()
        if self._origin is None:
            model = draw_weights(model, self._device, self._config.seed)
        else:
            model = load_unsharded_weights(model, self._origin, self._device, seed=self._config.seed)
        batch = self._objective.whole(0, model)
        return float(find_loss(model, batch.criterion, batch.microbatches, self._call_context))

    def _compare_losses(self, loss: float, loss_alone: float | None) -> None:
        """Compare the loss of step 1 with the loss on a single process, known to rank 0.

        Communication: a broadcast of a number.
        Raises TrainingError, on every rank, if the losses differ by more than rounding. An infinite or NaN loss is
        left to `read_metrics`, which names the ranks.
        """
        count, differing = self.mesh.size, [loss_alone]  # the differing loss on one process; [None] if losses agree
        if loss_alone is not None and self.report.check_loss(loss, loss_alone, count, self._config.dtype):
            differing = [None]
        dist.broadcast_object_list(differing, src=0)
        if differing[0] is not None and math.isfinite(loss):
            raise TrainingError(
                f"the loss of step 1 is {loss:.7f} on {count} process{'es' if count > 1 else ''}, but "
                f"{differing[0]:.7f} on one, with the weights "
                f"{'of the seed' if self._origin is None else f'of {self._origin}'}: this mesh or plan computes "
                f"another model; choose another --mesh or --plan, or --no-check to train anyway"
            )

    def _ranks_with(self, failed: bool) -> str:
        """The ranks on which `failed` is True, in words; all ranks if there are none.

        Communication: an all-gather of a bool.
        """
        of_ranks: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(of_ranks, failed)
        return format_ranks([rank for rank, is_true in enumerate(of_ranks) if is_true] or list(range(len(of_ranks))))

    def _failure(self, what: str, newest_checkpoint: Callable[[], Path | None]) -> str:
        """The message of a TrainingError: the cause, the newest checkpoint, and a remedy."""
        checkpoint = newest_checkpoint() or "none; set --save-every to keep some"
        return (
            f"{what}; last checkpoint: {checkpoint}. A lower --optimizer.lr (now {self._config.optimizer.lr}) "
            f"or a longer --optimizer.warmup-steps often helps"
        )
