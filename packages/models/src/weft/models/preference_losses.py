"""Losses of preferences: DPO and IPO of pairs of answers, KTO of judged answers. Plain torch on plain tensors.

The formulas and their defaults are those of trl's `DPOTrainer.dpo_loss` and `KTOTrainer.kto_loss`.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

PairLoss = Literal["sigmoid", "ipo"]


def implicit_rewards(policy: Tensor, reference: Tensor, beta: float, lengths: Tensor | None = None) -> Tensor:
    """The rewards beta * (policy - reference) implied by a policy, without graph (Rafailov et al. 2023, section 5).

    policy, reference: log-probabilities of answers, of equal shape; the result has this shape.
    lengths: of this shape, the number of tokens of each answer, by which each reward is divided; None: not divided.
    Raises ValueError for different shapes and for a beta of 0 or less.
    """
    check_positive("implicit_rewards", "beta", beta)
    _check_shapes("implicit_rewards", policy, reference=reference, lengths=lengths)
    rewards = beta * (policy.detach() - reference.detach())
    return rewards if lengths is None else rewards / lengths.clamp(min=1)


def divides_by_length(loss: PairLoss, length_normalized: bool) -> bool:
    """Whether the loss of pairs takes means over an answer's tokens: where asked, and always with "ipo", as by trl."""
    return length_normalized or loss == "ipo"


def dpo(
    policy: Tensor,
    reference: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss: PairLoss = "sigmoid",
    lengths: Tensor | None = None,
    valid: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """The mean loss of pairs of answers (DPO: Rafailov et al. 2023; IPO: Azar et al. 2023); a scalar.

    With m = (policy - reference) of the chosen answer minus (policy - reference) of the rejected answer:
        "sigmoid": -(1 - label_smoothing) * logsigmoid(beta * m) - label_smoothing * logsigmoid(-beta * m)
        "ipo": (m - 1 / (2 * beta))**2
    policy, reference: log-probabilities [..., 2] of the chosen and the rejected answer. No gradient reaches
        `reference`.
    label_smoothing: the probability that the preference is wrong, from 0 to below 0.5.
    lengths: [..., 2], the number of tokens of each answer, by which each log-probability is divided, as trl does for
        "ipo". None: no division.
    valid: [...] bool, the pairs to count; None: all.
    denominator: divides the sum of the pairs' losses; None: the number of counted pairs. Give the number of pairs of
        the whole batch if this call has only some of the pairs.
    Raises ValueError for wrong options and shapes and, without a denominator, if no pair counts; with `valid`, the
    host then waits for the device.
    """
    check_pair_options("dpo", beta, label_smoothing, loss)
    if policy.ndim == 0 or policy.shape[-1] != 2:
        raise ValueError(
            f"dpo takes log-probabilities [..., 2], of the chosen and the rejected answer, got {tuple(policy.shape)}"
        )
    _check_shapes("dpo", policy, reference=reference, lengths=lengths)
    _check_valid("dpo", valid, policy.shape[:-1])
    ratios = policy - reference.detach()
    if lengths is not None:
        ratios = ratios / lengths.clamp(min=1)
    margins = _only_valid(ratios[..., 0] - ratios[..., 1], valid)
    if loss == "ipo":
        losses = (margins - 1 / (2 * beta)) ** 2
    else:
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * margins)
        if label_smoothing:
            losses = losses - label_smoothing * F.logsigmoid(-beta * margins)
    return _mean("dpo", "pair", losses, valid, denominator)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    valid: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """The mean loss of answers judged desirable or undesirable (KTO: Ethayarajh et al. 2024); a scalar.

    With r = policy - reference, the loss of an answer is
        desirable: desirable_weight * (1 - sigmoid(beta * (r - kl)))
        undesirable: undesirable_weight * (1 - sigmoid(beta * (kl - r)))
    policy, reference: log-probabilities [...] of the answers. No gradient reaches `reference` or `kl`.
    desirable: [...] bool.
    kl: a scalar, the divergence of policy and reference over the whole batch: `kl_of` mismatched answers.
    valid, denominator: as for `dpo`, of answers.
    Raises ValueError as `dpo` does.
    """
    check_judged_options("kto", beta, desirable_weight, undesirable_weight)
    _check_shapes("kto", policy, reference=reference, desirable=desirable)
    _check_valid("kto", valid, policy.shape)
    if desirable.dtype != torch.bool:
        raise ValueError(f"kto: desirable is {desirable.dtype}; give bool, True for a desirable answer")
    kl = kl.detach() if isinstance(kl, Tensor) else kl
    excess = _only_valid(policy - reference.detach() - kl, valid)
    # sigmoid(-x) is 1 - sigmoid(x), without the rounding of the difference
    losses = torch.where(
        desirable,
        desirable_weight * torch.sigmoid(-beta * excess),
        undesirable_weight * torch.sigmoid(beta * excess),
    )
    return _mean("kto", "answer", losses, valid, denominator)


def kl_of(
    policy: Tensor, reference: Tensor, valid: Tensor | None = None, *, denominator: float | Tensor | None = None
) -> Tensor:
    """KTO's estimate of the divergence of policy and reference: mean(policy - reference), at least 0, without graph.

    policy, reference: log-probabilities [...] of mismatched answers, each a prompt with the answer to another prompt,
        over the whole batch. valid: [...] bool, the answers to count; None: all.
    denominator: divides the sum; None: the number of counted answers.
    Raises ValueError for different shapes and, without a denominator, if no answer counts; with `valid`, the host then
    waits for the device.
    """
    _check_shapes("kl_of", policy, reference=reference)
    _check_valid("kl_of", valid, policy.shape)
    ratios = _only_valid(policy.detach() - reference.detach(), valid)
    return _mean("kl_of", "answer", ratios, valid, denominator).clamp(min=0)


def check_pair_options(what: str, beta: float, label_smoothing: float, loss: str) -> None:
    """Raise ValueError for options refused by `dpo`. what: the caller's name, for the error."""
    check_positive(what, "beta", beta)
    if loss not in get_args(PairLoss):
        raise ValueError(f'{what}: loss is {loss!r}; give "sigmoid" or "ipo"')
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"{what}: label_smoothing is {label_smoothing}, the probability that a preference is wrong; give a number "
            f"from 0 to below 0.5"
        )
    if label_smoothing and loss == "ipo":
        raise ValueError(
            f'{what}: label_smoothing is {label_smoothing}, which the loss "ipo" does not use; give 0, or '
            f'loss="sigmoid"'
        )


def check_judged_options(what: str, beta: float, desirable_weight: float, undesirable_weight: float) -> None:
    """Raise ValueError for options refused by `kto`. what: the caller's name, for the error."""
    check_positive(what, "beta", beta)
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{what}: {name} is {weight}; give a number of 0 or more")


def check_positive(what: str, name: str, value: float) -> None:
    """Raise ValueError for a number not finite, or 0 or less. what, name: the caller and the option, for the error."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what}: {name} is {value}; give a number above 0")


def _check_shapes(what: str, policy: Tensor, **operands: Tensor | None) -> None:
    for name, operand in operands.items():
        if operand is not None and operand.shape != policy.shape:
            raise ValueError(
                f"{what}: {name} has shape {tuple(operand.shape)}, but policy has {tuple(policy.shape)}; give equal "
                f"shapes"
            )


def _check_valid(what: str, valid: Tensor | None, shape: torch.Size) -> None:
    if valid is not None and (valid.dtype != torch.bool or valid.shape != shape):
        raise ValueError(
            f"{what}: valid is {valid.dtype} of shape {tuple(valid.shape)}; give bool of shape {tuple(shape)}"
        )


def _only_valid(values: Tensor, valid: Tensor | None) -> Tensor:
    """The values, with 0 for answers not counted, which then add neither NaN nor gradients."""
    return values if valid is None else torch.where(valid, values, 0)


def _mean(what: str, noun: str, losses: Tensor, valid: Tensor | None, denominator: float | Tensor | None) -> Tensor:
    """The sum of the counted losses, divided by `denominator`, or by the number of counted losses."""
    total = _only_valid(losses, valid).sum()
    if denominator is not None:
        if not isinstance(denominator, Tensor):
            check_positive(what, "denominator", denominator)
        return total / denominator
    if not losses.numel() or (valid is not None and not bool(valid.any())):
        raise ValueError(
            f"{what} got no {noun} that counts, of shape {tuple(losses.shape)}; give one at least, or a denominator"
        )
    return total / (losses.numel() if valid is None else valid.sum())
