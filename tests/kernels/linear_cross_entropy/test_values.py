"""linear_cross_entropy against torch in float64: every dtype, reduction, option and chunk; what it computes and holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import cross_entropy, linear, linear_cross_entropy
from weft.kernels.cross_entropy.options import Options
from weft.kernels.linear_cross_entropy import gradients
from weft.kernels.linear_cross_entropy.agreement import check_sizes, sizes_of
from weft.kernels.linear_cross_entropy.chunks import HELD_BYTES_ON_CPU, chunks_of

from tests.kernels.cross_entropy.cases import ASKED, DTYPES, given, max_error
from tests.kernels.linear_cross_entropy.cases import Given, check, make, oracle

CHUNKS = [pytest.param(None, id="one-chunk"), pytest.param(4, id="4-tokens"), pytest.param(1, id="1-token")]


def run(case: Given, **options: Any) -> tuple[Tensor, list[Tensor]]:
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, **options)
    return loss.detach(), list(torch.autograd.grad(loss, case.leaves(), case.upstream.to(loss.dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_it_is_as_good_as_eager_torch(device, dtype, reduction, chunk_tokens):
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


def test_transposed_and_sliced_factors(device):
    case = make((4, 6), 31, device, bias=True)
    x = case.input.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = torch.cat([case.linear_weight.detach()] * 2, 1).T.contiguous().T[:, :16].requires_grad_()
    other = case._replace(input=x, linear_weight=weight)
    assert not x.is_contiguous()
    torch.testing.assert_close(run(other, chunk_tokens=5), run(case, chunk_tokens=5))


# What nothing is asked of


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
    """As in torch: their gradient is no product with it."""
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
    """As a vocabulary that was padded has them."""
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
    """The GEMMs that run, and the elements of the largest tensor that any op makes."""

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
    N, V, H = 64, 200, 8
    case = make((N,), V, device, torch.bfloat16, reduction, H=H)
    with Work() as work:
        run(case, reduction=reduction, chunk_tokens=16)
    assert 16 * V <= work.largest <= 2 * 16 * V < N * V  # the interpreter's copies are of bytes


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


# Chunks


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_anchor_3_the_error_of_the_weights_gradient_is_flat_in_the_number_of_chunks(device, dtype, reduction):
    """Accumulated in bf16 over a hundred chunks it diverged: what is added is soon below half an ulp of the sum."""
    case = make((64,), 5, device, dtype, reduction, H=4)
    with torch.no_grad():
        case.input.abs_()
    case.target[:] = 3  # so that all tokens pull the same class, and the sum grows with each
    _, truth = oracle(case, torch.float64, reduction=reduction)
    errors = [max_error(run(case, reduction=reduction, chunk_tokens=n)[1][1], truth[1]) for n in (64, 8, 1)]
    assert max(errors) <= 1.5 * errors[0] + torch.finfo(dtype).eps / 2 * float(truth[1].abs().max())


def test_chunks_are_whole_tiles_and_cover_all_tokens():
    like = torch.empty(0, dtype=torch.bfloat16)
    for tokens in (0, 1, 127, 128, 1000, 16384, 100_003):
        for classes in (1, 5, 128256, 1 << 30):
            chunks = chunks_of(tokens, None, classes, 1, like)
            assert [row for rows in chunks for row in (rows.start, rows.stop)] == sorted(
                row for rows in chunks for row in (rows.start, rows.stop)
            )
            assert sum(rows.stop - rows.start for rows in chunks) == tokens
            sizes = {rows.stop - rows.start for rows in chunks[:-1]}
            assert all(size * classes * 2 <= HELD_BYTES_ON_CPU or size == 1 for size in sizes)
            assert all(size % 128 == 0 for size in sizes if classes < 1 << 17)


class OnGpu:
    """As much of a tensor as the choice of chunks looks at."""

    device, itemsize = torch.device("cuda"), 2


def test_on_a_gpu_4096_tokens_of_128256_classes_are_one_chunk_of_less_than_1_1_gb():
    (chunk,) = chunks_of(4096, None, 128256, 1, OnGpu())
    assert (chunk.stop - chunk.start) * 128256 * 2 <= 1.1e9
    assert [rows.stop for rows in chunks_of(16384, None, 128256, 1, OnGpu())] == [4096, 8192, 12288, 16384]


def test_on_a_gpu_a_sum_in_24_bits_leaves_chunks_half_the_memory_at_least():
    for H, expected in ((1024, 3584), (4096, 2048), (16384, 2048)):
        sizes = {rows.stop - rows.start for rows in chunks_of(10 * expected, None, 128256, 1, OnGpu(), 128256 * H)}
        assert sizes == {expected}
    assert len(chunks_of(4096, None, 128256, 1, OnGpu(), 128256 * 4096)) == 1  # no sum over chunks


def test_ranks_that_would_take_other_chunks_for_a_gradient_of_float32_are_told():
    input, target = (torch.empty(16384, *dims, dtype=dtype, device="meta") for dims, dtype in SHAPES)
    sizes = [sizes_of(input, target, (dtype,) * 3, None, 128256, 1, Options()) for dtype in GRADIENTS]
    assert [each.chunk for each in sizes] == [1024, 1024, 2048]
    with pytest.raises(
        ValueError, match=r"at a time: 1024 on rank 1, 2048 on rank 2; .* gradients have the same dtype"
    ):
        check_sizes([0, 1, 2], [list(map(float, each)) for each in sizes])


SHAPES = (((4096,), torch.bfloat16), ((), torch.int64))
GRADIENTS = (None, torch.bfloat16, torch.float32)  # None: frozen


# Backward, again


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_backwards_and_two_losses_of_one_input(device, reduction):
    case = make((9,), 31, device, torch.bfloat16, reduction, bias=True)
    _, expected = run(case, reduction=reduction, chunk_tokens=4)
    losses = [
        linear_cross_entropy(
            case.input,
            case.linear_weight,
            case.target,
            linear_bias=case.linear_bias,
            reduction=reduction,
            chunk_tokens=4,
        )
        for _ in range(2)
    ]
    for loss in (losses[0], losses[0], losses[1]):
        found = torch.autograd.grad(loss, case.leaves(), case.upstream, retain_graph=True)
        assert all(map(torch.equal, found, expected))
        found[1].zero_()  # what the caller does with it is its own matter


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_given_away_it_is_the_same_gradient_and_a_second_backward_an_error(device, chunk_tokens, upstream):
    case = make((9,), 31, device, torch.bfloat16, bias=True)._replace(upstream=torch.tensor(upstream, device=device))
    _, expected = run(case, chunk_tokens=chunk_tokens)
    loss = linear_cross_entropy(
        case.input, case.linear_weight, case.target, linear_bias=case.linear_bias, chunk_tokens=chunk_tokens,
        inplace_backward=True,
    )  # fmt: skip
    found = torch.autograd.grad(loss, case.leaves(), case.upstream, retain_graph=True)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, case.leaves(), case.upstream)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
def test_what_forward_made_is_given_away_by_the_last_backward(device, chunk_tokens, kept):
    """A graph that is not kept has no other: no second tensor of the weight's size."""
    case = make((9,), 31, device, torch.bfloat16, bias=True)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=chunk_tokens)
    (made,) = [saved for saved in loss.grad_fn.saved_tensors if saved is not None and saved.shape == (31, 16)]
    before = made.clone()
    first, second = (
        torch.autograd.grad(loss, case.linear_weight, case.upstream, retain_graph=kept)[0],
        torch.autograd.grad(loss, case.linear_weight, case.upstream)[0] if kept else None,
    )
    assert (first.data_ptr() == made.data_ptr()) is not kept
    if second is not None:
        assert second.data_ptr() == made.data_ptr() and torch.equal(first, second)
    torch.testing.assert_close(first, before * case.upstream.to(before.dtype), rtol=2**-6, atol=0)


def test_recorded_in_a_cuda_graph_nothing_is_given_away(device, monkeypatch):
    """It may be played again, with another number arriving, and saved tensors have no versions there."""
    monkeypatch.setattr(gradients, "is_recorded", lambda tensor: True)
    case = make((9,), 31, device, torch.bfloat16)
    _, expected = run(case, chunk_tokens=4)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target, chunk_tokens=4)
    made = [saved.data_ptr() for saved in loss.grad_fn.saved_tensors if saved is not None]
    found = torch.autograd.grad(loss, case.leaves(), case.upstream)
    assert all(map(torch.equal, found, expected))
    assert not {each.data_ptr() for each in found} & set(made)


def test_a_graph_kept_to_be_differentiated_keeps_what_forward_made(device):
    case = make((9,), 31, device)
    loss = linear_cross_entropy(case.input, case.linear_weight, case.target)
    first = torch.autograd.grad(loss, case.leaves(), create_graph=True)
    kept = [each.detach().clone() for each in first]
    for each in torch.autograd.grad(loss, case.leaves()):
        each.zero_()
    assert all(map(torch.equal, first, kept))


def test_an_upstream_gradient_of_1_is_not_multiplied_with(interpreted):
    from weft.kernels.linear_cross_entropy.launch import scale
    from weft.kernels.traffic import Traffic, counted_traffic

    x = torch.randn(3, 5000).bfloat16()
    before = x.clone()
    with counted_traffic() as traffic:
        scale(x, torch.tensor(1.0), x)
    assert traffic == Traffic(loaded=4 * 4, stored=0)  # the factor, by each of four programs
    assert torch.equal(x, before)
    with counted_traffic() as traffic:
        scale(x, torch.tensor(-2.5), x)
    assert traffic == Traffic(loaded=4 * 4 + 2 * x.numel(), stored=2 * x.numel())
    torch.testing.assert_close(x, before * -2.5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_changes_nothing(reduction):
    case = make((9,), 31, reduction=reduction, bias=True)
    loss, expected = run(case, reduction=reduction)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = run(case, reduction=reduction)
    assert torch.equal(loss, found)
    assert all(map(torch.equal, gradients, expected))


def test_an_upstream_gradient_is_not_rounded_to_bf16(interpreted):
    from weft.kernels.linear_cross_entropy.launch import scale

    x, factor = torch.randn(5000).bfloat16(), torch.tensor(1 / 3)
    assert torch.equal(scale(x, factor, torch.empty_like(x)), (x.float() * factor).bfloat16())
    assert torch.equal(scale(x.float(), factor, torch.empty_like(x)), (x.float() * factor).bfloat16())


# What cannot be taken


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
        pytest.param({"target": torch.zeros(3).long()}, r"target \[...\], got \(4, 3\) and \(3,\)", id="target"),
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
def test_what_cannot_be_taken_is_said(change, message):
    call = {"input": torch.zeros(4, 3), "linear_weight": torch.zeros(5, 3), "target": torch.zeros(4).long()} | change
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(call.pop("input"), call.pop("linear_weight"), call.pop("target"), **call)
