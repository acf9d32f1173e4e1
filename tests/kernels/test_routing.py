"""The choice of experts: `route` against float64, with its ties, extremes, options, bytes and errors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import route
from weft.kernels.launching.traffic import counted_traffic

from tests.kernels.cases import normal
from tests.kernels.matmul.cases import assert_as_good_as_eager

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
# Each option alone, and in pairs; "bias" stands for a bias of the experts' number.
OPTIONS: dict[str, Any] = {
    "softmax_after": True, "normalize": False, "bias": True, "scale": 2.5, "groups": (4, 2), "score": "sigmoid",
}  # fmt: skip
CHOSEN = [
    dict.fromkeys(names) | {name: OPTIONS[name] for name in names}
    for count in range(3)
    for names in itertools.combinations(OPTIONS, count)
    if {"softmax_after", "score"} - {*names}
]
SIZES = [
    pytest.param((3, 5), 8, 2, id="two-of-8"),
    pytest.param((7,), 12, 3, id="three-of-12"),
    pytest.param((0,), 8, 2, id="no-tokens"),
    pytest.param((4,), 1, 1, id="one-expert"),
    pytest.param((3,), 8, 8, id="all"),
    pytest.param((), 8, 3, id="a-token"),
    pytest.param((2,), 60, 16, id="16-of-60"),
    pytest.param((2,), 600, 3, id="three-of-600"),
    pytest.param((2,), 40, 20, id="20-of-40"),
]


def highest(values: list[float], k: int) -> list[int]:
    """The indices of the k highest values, the lower index first where two are equal; NaN is the highest."""
    ranked = sorted(range(len(values)), key=lambda i: (not math.isnan(values[i]), -values[i], i))
    return ranked[:k]


def chosen(scores: Tensor, k: int, options: dict[str, Any], bias: Tensor | None) -> Tensor:
    """The experts, by the definition: token by token, in Python."""
    values = scores if scores.dtype == torch.float64 else scores.float()
    if options.get("score") == "sigmoid":
        values = values.sigmoid()
    elif not options.get("softmax_after") and (bias is not None or "groups" in options):
        values = values.softmax(-1)
    values = values if bias is None else values + bias
    rows = []
    for row in values.reshape(-1, values.shape[-1]).tolist():
        if "groups" in options:
            groups, most = options["groups"]
            members = len(row) // groups
            sums = [sum(sorted(row[g * members : (g + 1) * members])[-2:]) for g in range(groups)]
            allowed = highest(sums, most)
            row = [value if i // members in allowed else -math.inf for i, value in enumerate(row)]
        rows.append(highest(row, k))
    return torch.tensor(rows, dtype=torch.int32).reshape(*scores.shape[:-1], k)


def weigh(scores: Tensor, experts: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights of the experts as transformers' routers compute them, in the dtype of the scores."""
    if options.get("softmax_after"):
        return scores.gather(-1, experts.long()).softmax(-1) * options.get("scale", 1.0)
    sigmoid = options.get("score") == "sigmoid"
    weights = (scores.sigmoid() if sigmoid else scores.softmax(-1)).gather(-1, experts.long())
    if options.get("normalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * options.get("scale", 1.0)


def check(scores: Tensor, k: int, options: dict[str, Any], device: str) -> None:
    bias = 0.1 * normal(scores.shape[-1], seed=3).float() if "bias" in options else None
    leaf = scores.detach().to(device).requires_grad_()
    given = options | ({} if bias is None else {"bias": bias.to(device)})
    experts, weights = route(leaf, k, **given)
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(experts.cpu(), chosen(scores, k, options, bias))
    upstream = normal(*weights.shape, seed=1).float()
    (gradient,) = torch.autograd.grad(weights, leaf, upstream.to(device))
    assert gradient.dtype == scores.dtype
    results = []
    for dtype in (torch.float32, torch.float64):
        wide = scores.detach().to(dtype).requires_grad_()
        expected = weigh(wide, experts.cpu(), options)
        results.append((expected.detach(), *torch.autograd.grad(expected, wide, upstream.to(dtype))))
    (eager, eager_gradient), (truth, true_gradient) = results
    assert_as_good_as_eager(weights.detach().cpu(), eager, truth)
    assert_as_good_as_eager(gradient.cpu(), eager_gradient.to(scores.dtype), true_gradient)


@pytest.mark.parametrize("options", CHOSEN, ids=lambda options: "-".join(options) or "none")
def test_options_alone_and_in_pairs(options: dict[str, Any], device: str) -> None:
    check(normal(3, 5, 12).float(), 3, options, device)


@DTYPES
@pytest.mark.parametrize(("tokens", "E", "k"), SIZES)
def test_sizes_and_dtypes(tokens: tuple[int, ...], E: int, k: int, dtype: torch.dtype, device: str) -> None:
    check(torch.rand(*tokens, E, generator=torch.Generator().manual_seed(E)).to(dtype), k, {}, device)


def test_more_tokens_than_a_program_has(device: str) -> None:
    check(normal(50, 16).float(), 2, {"groups": (8, 3), "score": "sigmoid"}, device)


@DTYPES
def test_of_equal_scores_the_lower_expert_is_first(dtype: torch.dtype, device: str) -> None:
    scores = torch.tensor([[1, 3, 3, 1, 3, 1.0], [0, -0.0, 0, -0.0, 0, 0], [-math.inf] * 6]).to(device, dtype)
    for options in ({}, {"score": "sigmoid"}, {"softmax_after": True, "bias": torch.zeros(6, device=device)}):
        experts, _ = route(scores, 4, **options)
        assert experts.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
    experts, _ = route(scores[:2], 2, score="sigmoid", groups=(3, 2))
    assert experts.tolist() == [[1, 2], [0, 1]]


def test_a_nan_counts_as_the_highest_score(device: str) -> None:
    scores = torch.tensor([[0.0, 1.0, math.nan, 5.0]], device=device)
    for options in ({}, {"normalize": False}, {"softmax_after": True}, {"score": "sigmoid"}):
        experts, weights = route(scores, 2, **options)
        assert experts.tolist() == [[2, 3]] and weights.isnan().all()
    experts, weights = route(scores, 2, score="sigmoid", normalize=False)
    assert experts.tolist() == [[2, 3]] and weights.isnan().tolist() == [[True, False]]
    experts, weights = route(scores, 2, bias=torch.zeros(4, device=device))  # each probability is NaN
    assert experts.tolist() == [[0, 1]] and weights.isnan().all()


def test_infinite_scores(device: str) -> None:
    scores = torch.tensor([[0.0, -math.inf, 2.0, -math.inf]], device=device)
    experts, weights = route(scores, 3)
    assert experts.tolist() == [[2, 0, 1]] and weights[0, 2] == 0
    assert route(scores, 3, score="sigmoid")[1][0, 2] == 0


def test_strided_scores_and_repeated_calls(device: str) -> None:
    scores = normal(16, 9).float().to(device).mT
    first, again = (route(scores, 4) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(first, route(scores.contiguous(), 4), strict=True))


def test_float64_is_differentiated_exactly() -> None:
    scores = normal(3, 8).requires_grad_()
    for options in ({}, {"normalize": False}, {"score": "sigmoid"}, {"score": "sigmoid", "normalize": False}):
        assert route(scores, 3, **options)[1].dtype == torch.float64
        assert torch.autograd.gradcheck(lambda x, options=options: route(x, 3, **options)[1], (scores,))


def test_a_row_is_read_once_in_each_direction(interpreted: None) -> None:
    N, E, k = 32, 64, 8
    scores = normal(N, E).bfloat16().requires_grad_()
    with counted_traffic() as forward:
        _, weights = route(scores, k, bias=torch.zeros(E))
    assert forward.loaded == N * E * 2 + N // 4 * E * 4  # four rows a program, which loads the bias
    assert forward.stored == N * k * (4 + 4)
    with counted_traffic() as backward:
        weights.sum().backward()
    assert (backward.loaded, backward.stored) == (N * E * 2 + N * k * (4 + 4), N * E * 2)


def test_only_the_scores_and_the_experts_are_kept() -> None:
    sizes: list[int] = []
    scores = normal(16, 8).float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        route(scores, 2)
    assert sum(sizes) == scores.nbytes + 16 * 2 * 4


BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "k-above": (9, {}, "k is 9, but there are 8 experts; give 1 to 8"),
    "k-below": (0, {}, "k is 0, but there are 8 experts; give 1 to 8"),
    "score": (2, {"score": "tanh"}, "score is 'tanh'; give one of 'softmax', 'sigmoid'"),
    "after": (2, {"score": "sigmoid", "softmax_after": True}, "softmax_after goes with score='softmax', got 'sigmoid'"),
    "groups": (2, {"groups": (3, 1)}, "8 experts cannot be cut into 3 equal groups; numbers that work: 1, 2, 4, 8"),
    "chosen-groups": (2, {"groups": (4, 5)}, r"chooses from 5 of 4 groups; give 1 to 4"),
    "a-number": (2, {"groups": (4,)}, r"groups is \(4,\); give \(number of groups, groups that"),
    "few-members": (3, {"groups": (4, 1)}, "k is 3, but 1 groups of 2 experts have 2; give a smaller k"),
    "bias-dtype": (2, {"bias": torch.ones(8, dtype=torch.int32)}, "route: the bias is torch.int32; cast it"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_do_not_fit_are_refused(name: str) -> None:
    k, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        route(torch.ones(3, 8), k, **options)


def test_scores_of_ints_are_refused() -> None:
    with pytest.raises(ValueError, match=r"route: scores is torch\.int32; cast it"):
        route(torch.ones(3, 8, dtype=torch.int32), 2)
