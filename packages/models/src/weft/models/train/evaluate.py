"""The computing of `weft evaluate`: losses and rewards of a model on the rows of a file, on a single device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Batches, Rows
from ..data.examples.rows import ExampleBatches
from ..losses import IGNORE_INDEX, document_sums
from ..preference_losses import divides_by_length, dpo, implicit_rewards, kl_of, kto
from .task_config import DPOConfig, KTOConfig

Figures = dict[str, int | float]  # by the names that `weft evaluate --json` prints


class LossNotFinite(RuntimeError):
    """The mean loss is NaN or infinite."""


def evaluate_text(model: nn.Module, batches: Batches, *, rows: int, device: torch.device) -> Figures:
    """The mean loss of every next token in all sequences of a text, held-out sequences included.

    batches: with a batch size of `rows`. rows: sequences in a call of the model. Raises LossNotFinite.
    """
    total, learned, examples = 0.0, 0, 0
    for part in _every(batches, rows):
        losses = _token_losses(model, part, device)
        total += float(losses.double().sum())
        learned += int((part.targets != IGNORE_INDEX).sum())
        examples += len(part.tokens)
    return _mean(total, learned, examples)


def evaluate_examples(
    model: nn.Module,
    batches: ExampleBatches,
    *,
    task: str,
    rows: int,
    device: torch.device,
    reference: nn.Module | None = None,
    pairs: DPOConfig | None = None,
    judged: KTOConfig | None = None,
) -> Figures:
    """The mean loss of the answers' tokens, and for the tasks dpo and kto the figures of preferences.

    dpo: `accuracy`, the share of pairs whose chosen answer has the greater log-probability. With a reference, rewards
        and the loss of DPO; see `_pair_figures`.
    kto: with a reference, rewards and the loss of KTO, with the divergence over all examples, as for a run's held-out
        examples; see `_judged_figures`.
    reference: None: without rewards and preference losses. rows: in a call of the model. pairs, judged: the options of
        the losses; None: the defaults. Raises LossNotFinite.
    """
    scores = _score(model, batches, task, rows, device, 0)
    figures = _mean(-float(scores.log_probabilities.sum()), scores.learned, len(scores.log_probabilities))
    if task == "sft":
        return figures
    of_reference = None if reference is None else _score(reference, batches, task, rows, device, 0).log_probabilities
    if task == "dpo":
        return figures | _pair_figures(scores, of_reference, pairs or DPOConfig())
    if reference is None or of_reference is None:
        return figures
    mismatched = [_score(each, batches, task, rows, device, 1).log_probabilities for each in (model, reference)]
    return figures | _judged_figures(scores, of_reference, kl_of(*mismatched), judged or KTOConfig())


def _pair_figures(scores: _Scores, reference: Tensor | None, options: DPOConfig) -> Figures:
    """The figures of dpo, with rewards and loss as in training.

    scores: of the policy. reference: log-probabilities [pairs, 2] of the chosen and the rejected answer.
    """
    policy = scores.log_probabilities
    figures: Figures = {"accuracy": float((policy[:, 0] > policy[:, 1]).double().mean())}
    if reference is None:
        return figures
    lengths = scores.lengths if divides_by_length(options.loss, options.length_normalized) else None
    loss = dpo(
        policy,
        reference,
        beta=options.beta,
        label_smoothing=options.label_smoothing,
        loss=options.loss,
        lengths=lengths,
    )
    chosen, rejected = implicit_rewards(policy, reference, options.beta, lengths).unbind(-1)
    return figures | {
        "dpo_loss": float(loss),
        "reward_accuracy": float((chosen > rejected).double().mean()),
        "reward_margin": float((chosen - rejected).mean()),
        "chosen_reward": float(chosen.mean()),
        "rejected_reward": float(rejected.mean()),
    }


def _judged_figures(scores: _Scores, reference: Tensor, kl: Tensor, options: KTOConfig) -> Figures:
    """The figures of kto, without the mean reward of a label that no example has.

    scores: of the policy. reference: log-probabilities [examples, 1] of the answers. kl: `kl_of` the mismatched
    answers.
    """
    policy, reference, desirable = scores.log_probabilities[:, 0], reference[:, 0], scores.labels
    rewards = implicit_rewards(policy, reference, options.beta)
    loss = kto(
        policy,
        reference,
        desirable,
        kl,
        beta=options.beta,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
    )
    figures: Figures = {"kto_loss": float(loss), "kl": float(kl)}
    for name, chosen in (("desirable", desirable), ("undesirable", ~desirable)):
        figures[name] = int(chosen.sum())
        if figures[name]:
            figures[f"{name}_reward"] = float(rewards[chosen].mean())
    return figures


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scores:
    """A model's log-probabilities of all examples of a file, and facts about the examples, on the CPU."""

    log_probabilities: Tensor  # [examples, answers] float64: sums over an answer's tokens; dpo has 2 answers, else 1
    lengths: Tensor  # [examples, answers] float64: the number of an answer's tokens
    labels: Tensor  # [examples] bool, of kto: whether desirable

    @property
    def learned(self) -> int:
        """The number of tokens of all answers."""
        return int(self.lengths.sum())


def _score(
    model: nn.Module, batches: ExampleBatches, task: str, rows: int, device: torch.device, which: int
) -> _Scores:
    """The `_Scores` of all examples under a model. rows: in a call. which: as for `ExampleBatches.batch`."""
    answers = 2 if task == "dpo" else 1
    sums, counts, labels = list[Tensor](), list[Tensor](), list[Tensor]()
    for first in range(0, batches.num_every, rows):
        part = batches.every(slice(first, first + rows), which)
        losses = _token_losses(model, part, device)
        documents = _documents(part).to(device)
        learned = (part.targets != IGNORE_INDEX).double().to(device)
        valid = part.examples >= 0  # [rows, E]
        for found, values in ((sums, -losses.double()), (counts, learned)):
            of_rows = document_sums(values, documents, answers * batches.examples_per_row)
            found.append(of_rows.cpu().view(*valid.shape, answers)[valid])
        labels.append(part.labels[valid])
    return _Scores(log_probabilities=torch.cat(sums), lengths=torch.cat(counts), labels=torch.cat(labels))


def _documents(part: Rows) -> Tensor:
    """The number of each token's document in the row, [rows, T]."""
    assert part.documents is not None, "rows of examples number their documents"
    return part.documents


@torch.no_grad()
def _token_losses(model: nn.Module, part: Rows, device: torch.device) -> Tensor:
    """The negative log-probability of each target, [rows, T]; 0 at places without a target."""
    inputs: dict[str, Any] = {name: each.to(device) for name, each in part.named().items()}
    losses: Tensor = model(inputs.pop("tokens"), **inputs)
    return losses


def _every(batches: Batches, rows: int) -> Iterator[Rows]:
    """All rows once, `rows` at a time: the rows held out by a run, then the first epoch of a run.

    batches: of a single source, with a batch size of `rows`.
    """
    for first in range(0, batches.num_held_out, rows):
        yield batches.held_out(slice(first, first + rows))
    for first in range(0, batches.num_samples, rows):
        yield batches.batch(first // rows, slice(0, min(rows, batches.num_samples - first)))


def _mean(total: float, learned: int, examples: int) -> Figures:
    """The figures common to all tasks. total: the sum of the losses of `learned` tokens. Raises LossNotFinite."""
    loss = total / learned
    perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())
    if not torch.tensor([loss, perplexity]).isfinite().all():
        raise LossNotFinite(
            f"the mean loss of {learned:,} tokens is {loss}; look for NaN in the weights, or load the model in float32"
        )
    return {"examples": examples, "learned_tokens": learned, "loss": loss, "perplexity": perplexity}
