"""linear_cross_entropy against torch in float64: every dtype, reduction and option; its work and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import cross_entropy, linear, linear_cross_entropy

from tests.kernels.cross_entropy.cases import ASKED, DTYPES, given
from tests.kernels.linear_cross_entropy.cases import CHUNKS, check, make, run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_linear_cross_entropy_errs_no_more_than_eager_torch(device, dtype, reduction, chunk_tokens):
    case = make((3, 7), 37, device, dtype, reduction, bias=True)
    check(case, *run(case, reduction=reduction, chunk_tokens=chunk_tokens), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", ASKED)
def test_every_option_is_as_in_float64(device, options, reduction):
    case = make((9,), 37, device, torch.float32, reduction)
    options = given(options, 37, device) | {"reduction": reduction}
    check(case, *run(case, chunk_tokens=4, **options), **options)


@pytest.mark.parametrize("V", [1, 31, 4097])
@pytest.mark.parametrize("tokens", [(), (1,), (2, 1, 3)], ids=str)
def test_odd_shapes(device, tokens, V):
    case = make(tokens, V, device)
    check(case, *run(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", ASKED)
def test_gradcheck_of_loss_and_lse(options, reduction):
    case = make((2, 2), 5, dtype=torch.float64, H=3, bias=True)
    options = given(options, 5, "cpu")
    if "weight" in options:
        options["weight"] = options["weight"].double()

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return linear_cross_entropy(
            x, weight, case.target, linear_bias=bias, reduction=reduction, chunk_tokens=3, return_lse=True, **options
        )

    assert torch.autograd.gradcheck(loss, case.leaves())
    assert torch.autograd.gradcheck(lambda *leaves: loss(*leaves)[0], case.leaves())


def test_the_lse_is_that_of_the_logits(device):
    case = make((5,), 31, device, bias=True)
    loss, lse = linear_cross_entropy(
        case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, return_lse=True, chunk_tokens=2
    )
    logits = linear(case.input, case.linear_weight, case.linear_bias)
    expected = cross_entropy(logits, case.target, return_lse=True)
    torch.testing.assert_close((loss, lse), tuple(expected))


def test_a_denominator_is_what_mean_divides_by(device):
    case = make((6,), 31, device)
    total, _ = run(case, reduction="sum")
    loss, gradients = run(case, denominator=77.0, chunk_tokens=2)
    torch.testing.assert_close(loss, total / 77)
    _, of_sum = run(case, reduction="sum")
    torch.testing.assert_close(gradients, [each / 77 for each in of_sum])


@pytest.mark.exhaustive
def test_transposed_and_sliced_factors(device):
    case = make((4, 6), 31, device, bias=True)
    x = case.input.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = torch.cat([case.linear_weight.detach()] * 2, 1).T.contiguous().T[:, :16].requires_grad_()
    other = case._replace(input=x, linear_weight=weight)
    assert not x.is_contiguous()
    torch.testing.assert_close(run(other, chunk_tokens=5), run(case, chunk_tokens=5))


# No tokens that count


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_tokens(device, reduction):
    case = make((0,), 31, device, reduction=reduction, bias=True)
    loss, gradients = run(case, reduction=reduction)
    assert loss.sum() == 0
    assert [each.shape for each in gradients] == [leaf.shape for leaf in case.leaves()]
    assert all((each == 0).all() for each in gradients)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_tokens_ignored(device, reduction):
    case = make((5,), 31, device, reduction=reduction, bias=True)
    case.target[:] = -100
    loss, gradients = run(case, reduction=reduction, chunk_tokens=2)
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    assert all((each == 0).all() for each in gradients)


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
@pytest.mark.parametrize("options", [{"reduction": "none"}, {}, {"inplace_backward": True}], ids=str)
def test_an_upstream_gradient_that_is_no_number_leaves_ignored_tokens_alone(device, options, number):
    """As in torch, an ignored token's gradient is 0, not a product with the upstream gradient."""
    case = make((5,), 31, device, reduction=options.get("reduction", "mean"), bias=True)
    _, (dx, dweight, dbias) = run(case._replace(upstream=torch.full_like(case.upstream, number)), **options)
    assert [bool((row == 0).all()) for row in dx] == (case.target == -100).tolist()
    assert not any(each.isfinite().all() for each in (dx, dweight, dbias))


@pytest.mark.parametrize("V", [1, 31])
def test_a_class_may_be_the_one_to_ignore(device, V):
    case = make((6,), V, device, reduction="none")
    case.target[:3] = 0
    check(case, *run(case, reduction="none", ignore_index=0), reduction="none", ignore_index=0) if V > 1 else None
    loss, _ = run(case, reduction="none", ignore_index=0)
    assert (loss[:3] == 0).all()


@pytest.mark.parametrize("masked", [slice(30, 37), slice(0, 30), slice(1, None)], ids=["tail", "head", "all-but-one"])
def test_classes_whose_bias_is_minus_infinity(device, masked):
    """A padded vocabulary has such classes."""
    case = make((9,), 37, device, reduction="none", bias=True)
    with torch.no_grad():
        case.linear_bias[masked] = -torch.inf
    case.target[:] = int((case.linear_bias.detach() > -torch.inf).nonzero()[0])
    loss, gradients = run(case, reduction="none", chunk_tokens=4)
    check(case, loss, gradients, reduction="none")
    assert all(each.isfinite().all() for each in (loss, *gradients))
    assert (gradients[2][masked] == 0).all()


def test_no_gap_of_200_is_lost_to_smoothing(device):
    case = make((4,), 31, device, reduction="none", bias=True)
    with torch.no_grad():
        case.linear_bias[3] += 200
    case.target[:2] = torch.tensor([3, 5])
    check(case, *run(case, reduction="none", label_smoothing=0.1), reduction="none", label_smoothing=0.1)


class Work(TorchDispatchMode):
    """Counts the GEMMs that run, and the elements of the largest tensor that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.gemms += func.__name__.partition(".")[0] in ("mm", "addmm")
        for each in made if isinstance(made, tuple) else (made,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.numel())
        return made


@pytest.mark.parametrize(
    ("frozen", "reduction", "gemms"),
    [
        pytest.param((), "mean", 3, id="mean"),
        pytest.param((), "none", 4, id="none"),
        pytest.param((0,), "mean", 2, id="frozen-input"),
        pytest.param((1, 2), "mean", 2, id="frozen-weight"),
        pytest.param((0, 1), "mean", 1, id="bias-alone"),
        pytest.param((0, 1, 2), "mean", 1, id="all-frozen"),
    ],
)
def test_gradients_are_computed_for_what_requires_them_alone(device, frozen, reduction, gemms):
    chunks = 3
    case = make((12,), 31, device, reduction=reduction, bias=True)
    _, expected = run(case, reduction=reduction)
    leaves = [leaf.detach().requires_grad_(i not in frozen) for i, leaf in enumerate(case.leaves())]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    with Work() as work:
        loss = linear_cross_entropy(
            leaves[0], leaves[1], case.target, linear_bias=leaves[2], reduction=reduction, chunk_tokens=4
        )
        found = torch.autograd.grad(loss, wanted, case.upstream) if wanted else ()
    assert work.gemms == gemms * chunks
    torch.testing.assert_close(list(found), [grad for i, grad in enumerate(expected) if i not in frozen])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_logits_never_exist(device, reduction):
    N, V, H, chunk = 24, 600, 2, 4
    case = make((N,), V, device, torch.bfloat16, reduction, H=H)
    with Work() as work:
        run(case, reduction=reduction, chunk_tokens=chunk)
    assert chunk * V <= work.largest <= 4 * chunk * V < N * V  # the interpreter's copies are of bytes


def test_without_gradients_forward_makes_none():
    case = make((12,), 31)
    with torch.no_grad(), Work() as work:
        loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=4)
    assert work.gemms == 3
    assert not loss.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_runs_give_the_same_bits(device, reduction):
    case = make((3, 7), 37, device, torch.bfloat16, reduction, bias=True)
    first, second = (run(case, reduction=reduction, chunk_tokens=4) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_is_a_compute_dtype(reduction):
    case = make((9,), 31, reduction=reduction, bias=True)
    loss, expected = run(case, reduction=reduction, compute_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = run(case, reduction=reduction)
    assert torch.equal(loss, found)
    assert all(map(torch.equal, gradients, expected))


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"linear_weight": torch.zeros(5, 4)}, r"takes input \[..., H\] .* \(4, 3\) and \(5, 4\)", id="weight"
        ),
        pytest.param(
            {"linear_weight": torch.zeros(5)}, r"linear_weight \[V, H\], got \(4, 3\) and \(5,\)", id="vector"
        ),
        pytest.param({"linear_bias": torch.zeros(4)}, r"linear_bias of shape \(5,\), got \(4,\)", id="bias"),
        pytest.param({"linear_weight": torch.zeros(5, 3).half()}, "linear_weight is torch.float16 on cpu", id="dtype"),
        pytest.param({"input": torch.zeros(4, 3).long()}, "input torch.int64 on cpu; convert", id="ints"),
        pytest.param(
            {"target": torch.zeros(3).long()}, r"target of shape \(3,\) for logits of shape \(4, 5\)", id="target"
        ),
        pytest.param({"target": torch.zeros(4)}, "target has dtype torch.float32", id="float-target"),
        pytest.param(
            {"target": torch.tensor([0, 1, 5, 2])}, r"target\[2\] is 5, which is no class of 5", id="no-class"
        ),
        pytest.param({"chunk_tokens": 0}, "chunk_tokens is 0; give a number of tokens, 1 or more", id="chunk"),
        pytest.param({"chunk_tokens": 2.5}, "chunk_tokens is 2.5; give a number of tokens", id="part-of-a-token"),
        pytest.param({"reduction": "avg"}, "'avg'; choose one of", id="reduction"),
        pytest.param({"denominator": 3.0, "reduction": "sum"}, "only 'mean' divides", id="denominator"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    call = {"input": torch.zeros(4, 3), "linear_weight": torch.zeros(5, 3), "target": torch.zeros(4).long()} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(call.pop("input"), call.pop("linear_weight"), call.pop("target"), **call)
