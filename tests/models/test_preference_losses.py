"""Losses of preferences against trl's formulas, and the arguments that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.models import DPOCriterion, KTOCriterion, dpo, implicit_rewards, kl_of, kto

SCALES = [pytest.param(1.0, id="ordinary"), pytest.param(1e4, id="extreme")]


def drawn(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale - 2 * scale


def trl_dpo(policy: Tensor, reference: Tensor, kind: str, beta: float, smoothing: float) -> tuple[Tensor, ...]:
    from trl import DPOTrainer  # imported here: it takes seconds
    from trl.trainer.dpo_config import FDivergenceType

    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        reference_free=False,
        f_divergence_type=FDivergenceType.REVERSE_KL,
        beta=beta,
        label_smoothing=smoothing,
    )
    (chosen, rejected), fixed = policy.unbind(-1), reference.unbind(-1)
    return DPOTrainer.dpo_loss(trainer, chosen, rejected, *fixed, loss_type=kind)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("kind", "beta", "smoothing"), [("sigmoid", 0.1, 0.0), ("sigmoid", 0.5, 0.25), ("ipo", 0.2, 0.0)]
)
def test_pairs_have_the_loss_of_trl(kind: Any, beta: float, smoothing: float, scale: float) -> None:
    policy, reference = drawn(7, 2, scale=scale).requires_grad_(), drawn(7, 2, scale=scale, seed=1)
    loss = dpo(policy, reference, beta=beta, label_smoothing=smoothing, loss=kind)
    (found,) = torch.autograd.grad(loss, policy)
    losses, chosen, rejected = trl_dpo(policy, reference, kind, beta, smoothing)
    (wanted,) = torch.autograd.grad(losses.mean(), policy)
    assert loss.isfinite()
    torch.testing.assert_close(loss, losses.mean(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    rewards = implicit_rewards(policy, reference, beta)
    torch.testing.assert_close(rewards, torch.stack([chosen, rejected], -1), rtol=1e-6, atol=1e-6)
    assert not rewards.requires_grad


def test_lengths_divide_log_probabilities_as_trl_divides_them() -> None:
    policy, reference, lengths = (
        drawn(5, 2),
        drawn(5, 2, seed=1),
        torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8], [9, 1]]),
    )
    losses, *_ = trl_dpo(policy / lengths, reference / lengths, "ipo", 0.1, 0.0)
    torch.testing.assert_close(dpo(policy, reference, loss="ipo", lengths=lengths), losses.mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("judged", ["both", "desirable", "undesirable"])
def test_judged_answers_have_the_loss_of_trl(judged: str, scale: float) -> None:
    from trl import KTOTrainer

    policy, reference = drawn(6, scale=scale).requires_grad_(), drawn(6, scale=scale, seed=1)
    mismatched = drawn(6, scale=scale, seed=2), drawn(6, scale=scale, seed=3) - scale
    labels = {"both": [True, False, False, True, True, False], "desirable": [True] * 6, "undesirable": [False] * 6}
    desirable = torch.tensor(labels[judged])
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x),
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    each = (policy[desirable], policy[~desirable], mismatched[0], reference[desirable], reference[~desirable])
    losses, _, _, kl = KTOTrainer.kto_loss(trainer, *each, mismatched[1])
    (wanted,) = torch.autograd.grad(losses.mean(), policy)
    own = kl_of(*mismatched)
    torch.testing.assert_close(own, kl, rtol=1e-6, atol=1e-6)
    options: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss = kto(policy, reference, desirable, own, **options)
    (found,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(loss, losses.mean(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_the_divergence_is_at_least_0_and_has_no_gradient() -> None:
    policy = torch.tensor([-3.0, -2.0], requires_grad=True)
    assert kl_of(policy, torch.tensor([-1.0, -1.0])) == 0
    assert kl_of(policy, torch.tensor([-5.0, -5.0])) == 2.5
    assert not kl_of(policy, torch.tensor([-5.0, -5.0])).requires_grad
    assert kl_of(policy, torch.tensor([-5.0, -5.0]), torch.tensor([True, False])) == 2.0


def test_entries_that_do_not_count_add_nothing_whatever_they_hold() -> None:
    policy, reference, valid = drawn(4, 2), drawn(4, 2, seed=1), torch.tensor([True, False, True, False])
    wanted = dpo(policy[valid], reference[valid])
    policy = policy.masked_fill(~valid[:, None], float("nan")).requires_grad_()
    reference = reference.masked_fill(~valid[:, None], float("inf"))
    loss = dpo(policy, reference, valid=valid)
    (gradient,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close(loss, wanted)
    assert gradient.isfinite().all() and not gradient[~valid].any() and gradient[valid].all()
    sums = dpo(policy, reference, valid=valid, denominator=8)
    torch.testing.assert_close(sums, wanted / 4)
    lengths = torch.ones(4, 2, dtype=torch.int64).masked_fill(~valid[:, None], 0)
    torch.testing.assert_close(dpo(policy, reference, lengths=lengths, valid=valid), wanted)
    one = policy[:, 0].detach().requires_grad_()
    desirable = torch.tensor([True, True, False, False])
    judged = kto(one, reference[:, 0], desirable, 0.5, valid=valid)
    (gradient,) = torch.autograd.grad(judged, one)
    torch.testing.assert_close(judged, kto(one[valid], reference[valid, 0], desirable[valid], 0.5))
    assert gradient.isfinite().all() and not gradient[~valid].any()


def test_a_call_without_entries_is_0_where_a_denominator_is_given() -> None:
    empty = torch.zeros(0, 2, requires_grad=True)
    assert dpo(empty, empty, denominator=3.0) == 0
    assert kto(empty, empty, torch.zeros(0, 2, dtype=torch.bool), 0.0, denominator=torch.tensor(3)) == 0


PAIRS, BOOLS = torch.zeros(3, 2), torch.ones(3, dtype=torch.bool)
REFUSED: dict[str, tuple[Any, str]] = {
    "beta-zero": (lambda: dpo(PAIRS, PAIRS, beta=0.0), "beta is 0.0; give a number above 0"),
    "beta-nan": (lambda: kto(PAIRS, PAIRS, PAIRS.bool(), 0, beta=float("nan")), "beta is nan; give"),
    "rewards": (lambda: implicit_rewards(PAIRS, PAIRS, -1.0), "beta is -1.0"),
    "smoothing-half": (lambda: dpo(PAIRS, PAIRS, label_smoothing=0.5), "label_smoothing is 0.5, .* below 0.5"),
    "smoothing-negative": (lambda: dpo(PAIRS, PAIRS, label_smoothing=-0.1), "label_smoothing is -0.1"),
    "smoothed-ipo": (lambda: dpo(PAIRS, PAIRS, label_smoothing=0.1, loss="ipo"), 'the loss "ipo" does not use'),
    "loss": (lambda: dpo(PAIRS, PAIRS, loss="hinge"), 'loss is \'hinge\'; give "sigmoid" or "ipo"'),  # type: ignore[arg-type]
    "no-pairs": (lambda: dpo(PAIRS[:, 0], PAIRS[:, 0]), r"\[\.\.\., 2\].*got \(3,\)"),
    "shapes": (lambda: dpo(PAIRS, PAIRS[:2]), r"reference has shape \(2, 2\), but policy has \(3, 2\)"),
    "lengths": (lambda: dpo(PAIRS, PAIRS, lengths=PAIRS[:, 0]), r"lengths has shape \(3,\)"),
    "valid": (lambda: dpo(PAIRS, PAIRS, valid=PAIRS.bool()), r"give bool of shape \(3,\)"),
    "valid-ints": (lambda: dpo(PAIRS, PAIRS, valid=BOOLS.long()), "valid is torch.int64"),
    "none-valid": (lambda: dpo(PAIRS, PAIRS, valid=~BOOLS), "got no pair that counts"),
    "empty": (lambda: dpo(PAIRS[:0], PAIRS[:0]), "got no pair that counts"),
    "denominator": (lambda: dpo(PAIRS, PAIRS, denominator=0), "denominator is 0"),
    "desirable": (lambda: kto(PAIRS, PAIRS, PAIRS, 0), "desirable is torch.float32; give bool"),
    "desirable-shape": (lambda: kto(PAIRS, PAIRS, BOOLS, 0), r"desirable has shape \(3,\)"),
    "weight": (lambda: kto(PAIRS, PAIRS, PAIRS.bool(), 0, undesirable_weight=-1), "undesirable_weight is -1; give"),
    "no-answer": (lambda: kto(PAIRS[:0], PAIRS[:0], PAIRS[:0].bool(), 0), "got no answer that counts"),
    "divergence": (lambda: kl_of(PAIRS[:, 0], PAIRS[:, 0], ~BOOLS), "kl_of got no answer that counts"),
    "documents": (lambda: DPOCriterion(num_documents=3, denominator=1), "num_documents is 3; .* 2 for each pair"),
    "no-examples": (lambda: KTOCriterion(num_documents=1, num_desirable=0, num_undesirable=0, kl=0.0), "one example"),
}


@pytest.mark.every_value
@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()
