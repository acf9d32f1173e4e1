"""A way whose numbers are wrong is not timed: each part that is compared with float64 finds its own mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import losses, truth
from benchmarks.losses import Made
from benchmarks.truth import Inaccurate, errors

N, V, H = 130, 512, 16
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(N, V, generator=GENERATOR).bfloat16()
X = torch.randn(N, H, generator=GENERATOR).bfloat16().requires_grad_()
WEIGHT = (torch.randn(V, H, generator=GENERATOR) / H**0.5).bfloat16().requires_grad_()
TARGET = torch.randint(V, (N,), generator=GENERATOR)
FREE = sorted(set(range(V)) - set(TARGET.tolist()))
SHARD = LOGITS[:, : V // losses.SHARDS].contiguous()
TRUTHS = {
    "logits": truth.of_logits(LOGITS, TARGET),
    "products": truth.of_products(X, WEIGHT, TARGET),
    "shard": truth.of_a_shard(SHARD, TARGET),
}


def made(kind: str) -> Made:
    operands = {"logits": (LOGITS.clone().requires_grad_(), TARGET), "products": (X, WEIGHT, TARGET)}
    if kind == "shard":
        return losses.of_a_shard([(SHARD, TARGET)]).made["Weft, one shard"]()
    ways = losses.of_logits if kind == "logits" else losses.of_products
    return ways([operands[kind]]).made["Weft"]()


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)


def test_the_truth_is_autograds() -> None:
    x, weight = (each.detach().double().requires_grad_() for each in (X, WEIGHT))
    loss = F.cross_entropy(x @ weight.mT, TARGET)
    exact = Made(loss.detach(), torch.autograd.grad(loss, (x, weight)))
    assert max(errors("exact", exact, TRUTHS["products"]).values()) < 1e-12
    logits = LOGITS.double().requires_grad_()
    loss = F.cross_entropy(logits, TARGET)
    exact = Made(loss.detach(), torch.autograd.grad(loss, logits))
    assert max(errors("exact", exact, TRUTHS["logits"]).values()) < 1e-12


@pytest.mark.parametrize("kind", TRUTHS)
def test_a_right_result_is_within_rounding(kind: str) -> None:
    found = errors("Weft", made(kind), TRUTHS[kind])
    assert found.keys() == {part.figure for part in TRUTHS[kind]}
    assert max(found.values()) < truth.SUMMED


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "CHUNK_BYTES", 8 * V * 7)
    for whole, part in zip(TRUTHS["products"], truth.of_products(X, WEIGHT, TARGET), strict=True):
        torch.testing.assert_close(part.truth, whole.truth, rtol=1e-12, atol=1e-15)


def changed(gradient: int, rows: Any, factor: float) -> Callable[[Made], Made]:
    def change(made: Made) -> Made:
        gradients = [each.clone() for each in made.gradients]
        gradients[gradient][rows] *= factor
        return replace(made, gradients=gradients)

    return change


def column(at: tuple[int, int], value: float) -> Callable[[Made], Made]:
    def change(made: Made) -> Made:
        statistics: Tensor = made.loss.clone()
        statistics[at] += value
        return replace(made, loss=statistics)

    return change


def scaled_loss(made: Made) -> Made:
    return replace(made, loss=made.loss * 1.02)


NAN = float("nan")


@pytest.mark.parametrize(
    ("kind", "mutation", "told"),
    [
        pytest.param("logits", scaled_loss, "the loss errs by", id="logits-loss"),
        pytest.param("logits", changed(0, 0, 0), "the gradient errs by", id="logits-first-row"),
        pytest.param("logits", changed(0, N - 1, -1), "the gradient errs by", id="logits-last-row"),
        pytest.param("logits", changed(0, (N - 1, 3), NAN), "the gradient errs by nan", id="logits-nan"),
        pytest.param("products", scaled_loss, "the loss errs by", id="products-loss"),
        pytest.param("products", changed(0, N - 1, 0.9), "the input's gradient errs by", id="products-input"),
        pytest.param(
            "products", changed(1, int(TARGET[0]), 0.9), "the weight's gradient errs by", id="a-class-of-a-token"
        ),
        pytest.param("products", changed(1, FREE[-1], 0), "of classes without a token errs by", id="a-free-class"),
        pytest.param("products", changed(1, FREE, 1.1), "of classes without a token errs by", id="free-classes"),
        pytest.param("shard", changed(0, 0, 1.2), "the gradient errs by", id="shard-gradient"),
        pytest.param("shard", column((0, 0), 0.01), "logsumexp without the target errs by", id="shard-logsumexp"),
        pytest.param("shard", column((0, 1), 0.01), "logsumexp without the target errs by", id="shard-logsumexp-low"),
        pytest.param("shard", column((0, 2), 0.01), "the target's logit errs by", id="shard-target"),
    ],
)
def test_a_wrong_part_is_found(kind: str, mutation: Callable[[Made], Made], told: str) -> None:
    with pytest.raises(Inaccurate, match=f"^Liger: .*{told}"):
        errors("Liger", mutation(made(kind)), TRUTHS[kind])


def test_a_gradient_of_another_shape_is_told() -> None:
    cut = replace(made("logits"), gradients=[torch.zeros(N, V - 1)])
    with pytest.raises(Inaccurate, match=r"the gradient is of shape \(64, 511\), not \(64, 512\)"):
        errors("Liger", cut, TRUTHS["logits"])


def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults in the computation, not in its numbers: a softmax with too large a sum, a target not subtracted."""
    from weft.kernels.cross_entropy import reference

    right = reference.gradient_factors
    monkeypatch.setattr(
        reference, "gradient_factors", lambda *given: replace(right(*given), log_sum=1 + right(*given).log_sum)
    )
    for kind in TRUTHS:
        with pytest.raises(Inaccurate):
            errors("Weft", made(kind), TRUTHS[kind])
    monkeypatch.setattr(
        reference, "gradient_factors", lambda *given: replace(right(*given), target_grad=0 * right(*given).target_grad)
    )
    for kind in TRUTHS:
        with pytest.raises(Inaccurate):
            errors("Weft", made(kind), TRUTHS[kind])


def test_tokens_are_taken_from_the_first_to_the_last() -> None:
    assert truth.spread(3, like=TARGET).tolist() == [0, 1, 2]
    assert truth.spread(16384, like=TARGET)[[0, -1]].tolist() == [0, 16383]
    for rows in (1, 63, 64, 65, 130, 8192):
        assert len(set(truth.spread(rows, like=TARGET).tolist())) == min(rows, truth.ROWS)
