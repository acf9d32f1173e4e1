"""The training loop of a process: steps, with reports, metrics and checkpoints in between.

`launch` calls `train` in every process, once the process group is initialized.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from weft.reshard.extension import measure_waits

from ..checkpoint.huggingface import attempt
from ..config import MixtureConfig
from ..data.examples.source import Examples
from ..data.sources import Data, check_share
from ..parallel.parameter_layouts import layouts_of, shapes_of
from ..terminal import printable
from .agreement import RollCall, StopVote, describe_store_host, is_silence
from .checkpoints import NotSaved, Saver
from .config import PROFILED_FROM, PROFILED_STEPS
from .digests import Against, header_of
from .folder import CHECKPOINT
from .measure import profiled
from .report import ParameterLayout, closing_lines
from .results import NotWritten, Results
from .run import Run
from .trainer import Trainer, TrainingError


def train(run: Run, device: torch.device) -> int:
    """Train as one rank of the mesh pp x dp x cp x tp; the mesh contains all ranks of the world.

    Rank 0 prints, and writes all files except the tensors of checkpoints and the traces, which every rank writes.
    Returns 0, or the signal received. By then a checkpoint is saved or, after the last step, the final model (the last
    checkpoint for a model class of the user's own); a replay (--replay, `Run.last_step`) saves neither after the
    last step.
    Communication: in every step as `Trainer.step`, and an all-reduce of a byte for the vote on stopping; for
    checkpoints as `Saver`.
    Raises TrainingError, on every rank, if the loss, the gradients or the values to save are not finite; if the loss of
    step 1 differs from the loss of one process; if the initial weights cannot be used; if a checkpoint cannot be read
    or written; if metrics, the model or the run's folder cannot be written; if a difference from the run of --against
    is larger than rounding explains; and if prepared data does not match the checksums. Raises Unanswered if a
    collective does not finish within the run's timeout.
    """
    trainers: list[Trainer] = []

    def activity() -> str:
        return trainers[0].activity if trainers else "the start of the run"

    with RollCall(activity, describe_store_host()) as roll:
        try:
            run = _with_paths_of_rank_0(run)
            trainers.append(_make_trainer(run, device))
            writes = trainers[0].rank == 0
            with Results(run.folder, writes=writes, tokenizer=run.corpus.tokenizer) as results:
                return _run(run, device, trainers[0], results)
        except (NotSaved, NotWritten) as error:
            raise TrainingError(str(error)) from error
        except TrainingError:
            raise
        except RuntimeError as error:
            if is_silence(error):
                raise roll.call(run.config.timeout) from error
            raise


def _with_paths_of_rank_0(run: Run) -> Run:
    """The run with rank 0's folders: without --output each rank has named the folder by its own clock, and with --from
    each has searched for the last checkpoint by itself.

    Communication: a broadcast.
    """
    paths: list[Any] = [run.folder, run.origin, run.reference]
    dist.broadcast_object_list(paths, src=0)
    return dataclasses.replace(run, folder=paths[0], origin=paths[1], reference=paths[2])


def _make_trainer(run: Run, device: torch.device) -> Trainer:
    """The trainer, after a check of prepared data. Raises TrainingError for wrong data, and for unusable weights."""
    if run.config.data.verify and run.corpus.is_prepared:
        _check_data(run.corpus)
    try:
        return Trainer(run, device)
    except ValueError as error:
        if run.origin is None:
            raise
        raise TrainingError(f"the run cannot begin with {run.origin}: {error}") from error


def find_parameter_layouts(trainer: Trainer) -> list[ParameterLayout]:
    """Shape and layout of the parameters of all pipeline stages, in stage order.

    Called once at the start of a run, for `Report.print_layout` and for plan.txt.
    Communication: under a pipeline, an all-gather of each rank's parameter names, shapes and layouts.
    """
    layouts, shapes = layouts_of(trainer.model), shapes_of(trainer.model)
    if trainer.pipeline is None:
        return [ParameterLayout(name=name, shape=shapes[name], layout=layout) for name, layout in layouts.items()]
    of_ranks: list[list[ParameterLayout]] = [[] for _ in range(trainer.mesh.size)]
    coordinate = trainer.mesh.coordinate(trainer.rank)
    assert coordinate is not None, "the mesh covers the whole world"
    own = [
        ParameterLayout(name=name, shape=shapes[name], layout=layout, stage_rank=coordinate["pp"])
        for name, layout in layouts.items()
    ]
    dist.all_gather_object(of_ranks, own)
    # for each pp coordinate, the parameters of its first rank
    stages = {of_rank[0].stage_rank: of_rank for of_rank in reversed(of_ranks)}
    return [each for _, of_stage in sorted(stages.items()) for each in of_stage]


def _check_data(data: Data | Examples) -> None:
    """Compare the prepared data with the checksums, each rank a share. Communication: an all-gather of the errors.

    Raises TrainingError, on every rank, for data that does not match.
    """
    errors: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, attempt(check_share, data, dist.get_rank(), dist.get_world_size()))
    for error in errors:
        if error is not None:
            raise TrainingError(str(error)) from error


def _run(run: Run, device: torch.device, trainer: Trainer, results: Results) -> int:
    """Resume, take the steps, save the model, and report; returns as `train`."""
    report, config = trainer.report, run.config
    saver, vote = Saver(run, trainer.model, trainer.optimizer), StopVote(config.timeout)
    parameters = find_parameter_layouts(trainer)
    if trainer.rows_line is not None:
        report.print_line(trainer.rows_line)
    report.print_layout(parameters)
    if trainer.pipeline is not None:
        report.print_schedule(trainer.pipeline.schedule)
    if trainer.tokens_line is not None:
        report.print_line(trainer.tokens_line)
    if trainer.prediction is not None:
        report.print_prediction(trainer.prediction, documents="known" if trainer.predicts_exchange else None)
    try:
        first_step = saver.resume()
        damaged = results.begin(
            *(run.recipe, run.resolved, trainer.plan, trainer.mesh, parameters),
            step=first_step,
            logged=saver.logged,
            arithmetic=saver.arithmetic,
        )
        against = _begin_digests(run, trainer, results, first_step)
    except (OSError, ValueError) as error:
        raise TrainingError(str(error)) from error
    check_profile(run, first_step)
    report.print_lines(saver.take_notes())
    if damaged:
        report.print_line(f"set aside, as damaged: {', '.join(map(str, damaged))}")
    try:
        trainer.begin(first_step)
    except (OSError, ValueError) as error:
        raise TrainingError(str(error)) from error
    if first_step == 0 and run.last_step is None:
        saver.held_out_loss = trainer.held_out_loss()
    start, saved = time.perf_counter(), run.folder / CHECKPOINT
    with vote.record_signals():
        stop = _take_steps(run, trainer, results, saver, vote, first_step, against)
        seconds = time.perf_counter() - start
        if run.last_step is not None and not stop:
            return 0
        if stop:
            assert saver.last is not None, "the last step was saved"
            saved = saver.last
        else:
            trainer.check_finite(config.steps, saver.wait_for_newest)
            if config.model_class is None:
                # The final model is saved without the optimizer's state, which would make it three times as large.
                results.save(trainer.model, run.adapter_base)
                report.print_lines(results.notes)
            else:
                saved = _save_user_model(run, results, saver)
            vote.begin()
            stop = vote.end()
    if stop:
        report.print_line(f"saved {saved}" + ("" if saved.name == CHECKPOINT else "; --resume goes on from there"))
        return stop
    if saver.count:
        report.print_checkpoint_cost(saver.count, blocked=saver.blocked, writing=saver.writing)
    if trainer.pipeline is not None:
        report.print_line("sample  none: no stage of a pipeline has all layers to generate with")
    else:
        report.print_line("sample\n" + "\n".join(f"  | {line}" for line in printable(trainer.sample()).split("\n")))
    held_out_loss = trainer.held_out_loss()
    if trainer.rank == 0:
        load = None if trainer.load is None else trainer.load.tolist()
        layers = config.model.sparse_layers if isinstance(config.model, MixtureConfig) else ()
        if picture := results.picture(report.width, load, layers):
            report.print_line(picture)
    losses = saver.held_out_loss, held_out_loss
    trained_for = seconds if first_step < config.steps else None
    bytes_per_token, on_cpu = trainer.held_out_bytes_per_token(), device.type == "cpu"
    report.print_line(closing_lines(run, losses, trained_for, bytes_per_token=bytes_per_token, on_cpu=on_cpu))
    return 0


def _save_user_model(run: Run, results: Results, saver: Saver) -> Path:
    """Save the checkpoint of the last step, unless `save_every` just did; return the path.

    Called for a model class of the user's own (--model), which has no Hugging Face form.
    Communication and errors: as `Saver.save` and `Results.sync`.
    """
    folder = run.folder / f"{CHECKPOINT}-{run.config.steps}"
    if saver.last != folder:
        results.sync()
        saver.save(run.config.steps, results.logged)
        saver.wait()
    return folder


def check_profile(run: Run, first_step: int) -> None:
    """Raise TrainingError where --profile would trace nothing, since few steps are left after `first_step` steps.

    Called by `_run` after resuming. `first_step` is the number of steps already taken.
    """
    left, needed = run.config.steps - first_step, PROFILED_FROM + PROFILED_STEPS - 1
    if run.config.profile is not None and left < needed:
        raise TrainingError(
            f"--profile traces steps {PROFILED_FROM} to {needed} of this process, and {left} of {run.config.steps} "
            f"steps are left after step {first_step}; raise --steps to {first_step + needed}, or leave out --profile"
        )


def _begin_digests(run: Run, trainer: Trainer, results: Results, first_step: int) -> Against | None:
    """Begin the file of digests, if the run has any; return the comparison with the earlier run of --against, or None.

    Communication and errors: as `Results.begin_digests` and `Against`.
    """
    if trainer.recorder is None:
        return None
    header = header_of(run, trainer.model)
    results.begin_digests(header, first_step)
    earlier = run.config.against
    return None if earlier is None else Against(run, earlier, header, resumed_step=first_step)


def _keep_digests(trainer: Trainer, results: Results, against: Against | None) -> None:
    """Write the digests of the last step, and compare them with the earlier run's.

    Communication: as `Against.add`. Raises TrainingError, on every rank, where rounding does not explain a difference,
    and where a tensor has two shapes.
    """
    if trainer.recorder is None:
        return
    digests = trainer.recorder.take()
    for each in digests:
        results.add_digests(each)
    if against is None:
        return
    try:
        report = against.add(digests)
    except ValueError as error:
        raise TrainingError(str(error)) from error
    if report:
        raise TrainingError(report)


def _take_steps(
    run: Run,
    trainer: Trainer,
    results: Results,
    saver: Saver,
    vote: StopVote,
    first_step: int,
    against: Against | None,
) -> int:
    """Take the steps from `first_step`, counted from 0, to the last.

    Returns the signal with which a rank was told to end, or 0 after the last step.
    """
    report, config, stop = trainer.report, run.config, 0
    with (
        report.show_steps(config) as display,
        profiled(config.profile, trainer.rank) as profiled_step,
        measure_waits(trainer.wait_timer),
    ):
        trainer.restart_clock()
        last = config.steps if run.last_step is None else run.last_step
        for step in range(first_step, last):
            vote.begin()
            trainer.first_step() if step == 0 else trainer.step(step)
            _keep_digests(trainer, results, against)
            profiled_step()
            display.advance(step + 1)
            stop = vote.end()
            saves = stop or (config.save_every and (step + 1) % config.save_every == 0)
            evaluates = config.eval_every and (step + 1) % config.eval_every == 0
            if saves or evaluates or (step + 1) % config.log_every == 0 or step + 1 in (1, last):
                logged = trainer.read_metrics(saver.wait_for_newest)
                if evaluates:
                    logged[-1] = dataclasses.replace(logged[-1], held_out_loss=trainer.held_out_loss())
                    trainer.restart_clock()
                for metrics in logged:
                    display.show(metrics)
                    results.add(metrics)
            if saves:
                with saver.blocking():
                    trainer.check_finite(step + 1, saver.wait_for_newest)
                    results.sync()
                    saver.save(step + 1, results.logged)
                    report.print_lines(saver.take_notes())
            if stop:
                break
        saver.wait()
    report.print_lines(saver.take_notes())
    if against is not None:
        report.print_line(against.closing_line())
    return stop
