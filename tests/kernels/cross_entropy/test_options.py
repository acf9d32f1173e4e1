"""Class weights, smoothing, z-loss, soft caps, scales, lse, in-place gradients: with torch's meaning on every path."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.kernels.cross_entropy.options import AllOptions, Options
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, reshard, to_global

from tests.kernels.cross_entropy.cases import (
    ASKED,
    BLOCK,
    DTYPES,
    SPLITS,
    assert_as_good_as_eager,
    check_against,
    given,
    loss_and_gradient,
    make,
    shard_by_shard,
    torch_loss_and_gradient,
)


@pytest.mark.parametrize("loss", [cross_entropy, linear_cross_entropy])
def test_a_signature_shows_every_option_with_its_default(loss):
    shown = inspect.signature(loss).parameters
    assert {each.name: each.default for each in fields(Options)}.items() <= {
        name: parameter.default for name, parameter in shown.items()
    }.items()
    assert "label_smoothing: 'float' = 0.0" in pydoc.render_doc(loss)


def test_type_checkers_know_every_option():
    assert set(get_type_hints(AllOptions)) == {each.name for each in fields(Options)}


@pytest.mark.parametrize(
    ("dtype", "reduction"), [(torch.bfloat16, "mean"), (torch.float16, "sum"), (torch.float32, "none")], ids=str
)
@pytest.mark.parametrize("options", ASKED)
def test_every_option_is_as_in_float64(device, options, dtype, reduction):
    logits, target, upstream = make(7, 257, device, dtype, reduction)
    target[2] = -100
    assert_as_good_as_eager(logits, target, upstream, reduction=reduction, **given(options, 257, device))


@pytest.mark.parametrize("options", ASKED)
def test_more_classes_than_a_block(device, options):
    logits, target, upstream = make(2, BLOCK + 9, device, reduction="none")
    target[0] = BLOCK + 5
    assert_as_good_as_eager(logits, target, upstream, reduction="none", **given(options, BLOCK + 9, device))


@pytest.mark.parametrize("options", ASKED)
@pytest.mark.parametrize("sizes", SPLITS)
def test_anchor_6_no_vocabulary_split_changes_the_loss(device, sizes, options):
    """Megatron's smoothing was wrong under vocabulary sharding."""
    logits, target, upstream = make(4, 31, device, reduction="none")
    target[:] = torch.tensor([0, 15, 16, 30])
    options = given(options, 31, device)
    results = shard_by_shard(logits, target, upstream, sizes, reduction="none", **options)
    assert all(torch.equal(loss, results[0][0]) for loss, _ in results)
    gradient = torch.cat([part for _, part in results], -1)
    check_against((results[0][0], gradient), logits, target, upstream, reduction="none", **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("options", ASKED)
def test_gradcheck_of_loss_and_lse(options, reduction):
    logits, target, _ = make(4, 6, "cpu", torch.float64)
    target[1] = -100
    options = given(options, 6, "cpu")
    if "weight" in options:
        options["weight"] = options["weight"].double()
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, target, reduction=reduction, return_lse=True, **options), logits.requires_grad_()
    )


def test_the_lse_alone_has_a_gradient(device):
    logits, target, upstream = make(5, 31, device, reduction="none")
    target[3] = -100
    logits.requires_grad_()
    _, lse = cross_entropy(logits, target, return_lse=True)
    (gradient,) = torch.autograd.grad(lse, logits, upstream)
    truth = logits.detach().double().logsumexp(-1).masked_fill(target == -100, 0)
    expected = logits.detach().double().softmax(-1) * torch.where(target == -100, 0, upstream)[:, None]
    torch.testing.assert_close(lse.detach().double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


def test_z_loss_moves_the_lse_towards_0(device):
    logits, target, _ = make(5, 31, device)
    plain, lse = cross_entropy(logits, target, reduction="none", return_lse=True)
    with_z = cross_entropy(logits, target, reduction="none", z_loss=0.5)
    torch.testing.assert_close(with_z, plain + 0.5 * lse.square())


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"weight": True, "label_smoothing": 0.1}], ids=str)
def test_no_gap_of_200_is_lost_to_smoothing(device, options):
    logits, target, upstream = make(4, 31, device, reduction="none")
    logits[:, 3] += 200
    target[:2] = torch.tensor([3, 5])
    assert_as_good_as_eager(logits, target, upstream, reduction="none", **given(options, 31, device))


@pytest.mark.parametrize("offset", [1e4, 1e5, -1e5, 3e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [2, 31, 257, BLOCK + 9])
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0, "z_loss": 1e-3},
        {"weight": True, "label_smoothing": 0.1},
        {"label_smoothing": 0.1, "logit_scale": -0.5},
    ],
    ids=str,
)
def test_no_digits_of_a_smoothed_loss_are_lost_to_an_offset(device, options, V, dtype, offset):
    """The loss is a difference: the sum of the logits and V times their logsumexp both grow with the offset."""
    logits, target, upstream = make(4, V, device, reduction="none")
    logits = (logits + offset).to(dtype)
    target[2] = -100
    options = given(options, V, device) | {"reduction": "none"}
    assert_as_good_as_eager(logits, target, upstream, **options)
    results = shard_by_shard(logits, target, upstream, [1, 0, V - 1], **options)
    found = results[0][0], torch.cat([part for _, part in results], -1)
    check_against(found, logits, target, upstream, **options)


@pytest.mark.parametrize("options", ASKED)
def test_minus_infinity_is_as_in_torch(device, options):
    logits, target, upstream = make(3, 31, device, reduction="none")
    logits[0, 4] = logits[1, 10:20] = -torch.inf
    target[:2] = torch.tensor([7, 12])
    options = given(options, 31, device)
    loss, _ = loss_and_gradient(logits, target, upstream, reduction="none", **options)
    truth, _ = torch_loss_and_gradient(logits.double(), target, upstream, reduction="none", **options)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_weight_of_0_gives_its_tokens_no_gradient(device):
    logits, target, upstream = make(4, 31, device, reduction="none")
    target[:] = 15
    loss, gradient = loss_and_gradient(
        logits, target, upstream, reduction="none", **given({"weight": True}, 31, device)
    )
    assert (loss == 0).all()
    assert (gradient == 0).all()


# In place


def in_place(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits, target, inplace_backward=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, *ASKED[3:4], *ASKED[-1:]])
def test_in_place_it_is_the_same_gradient_in_the_memory_of_the_logits(device, options, dtype):
    leaf, target, upstream = make(7, 257, device, dtype, "none")
    leaf.requires_grad_()
    options = given(options, 257, device) | {"reduction": "none"}
    logits = leaf.clone()
    where = logits.data_ptr()
    arrived: list[Tensor] = []
    logits.register_hook(arrived.append)
    in_place(logits, target, **options).backward(upstream)
    assert arrived[0].data_ptr() == where
    (expected,) = torch.autograd.grad(cross_entropy(leaf, target, **options), leaf, upstream)
    assert torch.equal(leaf.grad, expected)


def test_in_place_a_second_use_is_an_error(device):
    """Never a wrong number: after two losses of the same logits, a second backward, or an op that saved the logits."""
    leaf, target, _ = make(7, 31, device)
    leaf.requires_grad_()
    for use in (in_place, cross_entropy, lambda logits, target: logits.square().sum()):
        logits = leaf.clone()
        first, second = in_place(logits, target), use(logits, target)
        first.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
    logits = leaf.clone()
    loss = in_place(logits, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "change", [lambda x: x.T.contiguous().T, lambda x: x[:, :1].expand(-1, 31)], ids=["strided", "expanded"]
)
def test_in_place_needs_memory_of_its_own(device, change):
    logits, target, _ = make(7, 31, device)
    with pytest.raises(ValueError, match=r"inplace_backward with logits of shape .* give contiguous logits"):
        in_place(change(logits), target)


# Forms of logits and targets


def test_uint8_targets_are_class_ids(device):
    logits, target, upstream = make(7, 200, device)
    target[0] = 156  # as an ignore_index of -100 would be in 8 bits
    narrow = loss_and_gradient(logits, target.to(torch.uint8), upstream)
    for ours, wide in zip(narrow, loss_and_gradient(logits, target, upstream), strict=True):
        assert torch.equal(ours, wide)


def test_uint8_targets_may_be_ignored_as_255(device):
    logits, target, upstream = make(7, 200, device)
    target[:3] = 255
    narrow = loss_and_gradient(logits, target.to(torch.uint8), upstream, ignore_index=255)
    for ours, wide in zip(narrow, loss_and_gradient(logits, target, upstream, ignore_index=255), strict=True):
        assert torch.equal(ours, wide)
    assert not narrow[1][:3].any() and narrow[1][3:].any()


@pytest.mark.parametrize("ignore_index", [-100, 255])
def test_uint8_targets_of_the_linear_loss(device, ignore_index):
    hidden, weight = (
        torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows)).to(device) for rows in (7, 200)
    )
    _, target, _ = make(7, 200, device)
    target[0], target[1] = 156, 255 if ignore_index == 255 else 199
    found = []
    for each in (target, target.to(torch.uint8)):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*leaves, each, ignore_index=ignore_index, chunk_tokens=3)
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    for wide, narrow in zip(*found, strict=True):
        assert torch.equal(wide, narrow)


def uint8_on_a_mesh(placements: str, ignore_index: int) -> None:
    """The logits by tokens and by classes, the targets by tokens."""
    mesh = ProcessMesh.grid(dp=2, tp=2)
    logits, target, _ = make(7, 201, "cpu")
    target[0], target[1] = 156, 255 if ignore_index == 255 else 200
    found = []
    for dtype in (torch.int64, torch.uint8):
        leaf = distribute(logits, Layout(mesh, placements)).detach().requires_grad_()
        rows = distribute(target.to(dtype), Layout(mesh, "dp: S(0)"))
        loss = reshard(cross_entropy(leaf, rows, ignore_index=ignore_index))
        loss.backward()
        found.append([to_global(loss.detach()), to_global(leaf.grad)])
    for wide, narrow in zip(*found, strict=True):
        assert torch.equal(wide, narrow)
    torch.testing.assert_close(found[1][0], F.cross_entropy(logits, target, ignore_index=ignore_index))


@pytest.mark.parametrize("ignore_index", [-100, 255])
@pytest.mark.parametrize("placements", ["dp: S(0)", "dp: S(0), tp: S(1)"])
def test_uint8_targets_on_a_mesh(pool, placements, ignore_index):
    pool.run(uint8_on_a_mesh, placements, ignore_index, ranks=4)


def test_the_first_line_says_where_the_classes_are():
    """torch's classes are dim 1: for logits [N, C, C] the same call gives another number, silently."""
    assert "logits [..., V], whose last dim is the classes" in inspect.getdoc(cross_entropy).splitlines()[0]


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 5, 5), (2, 5, 3, 4), (5,)], ids=str)
def test_class_dim_1_is_torchs_form(device, shape):
    generator = torch.Generator().manual_seed(0)
    dim = 1 if len(shape) > 1 else 0
    logits = torch.randn(shape, generator=generator).to(device).requires_grad_()
    target = torch.randint(5, (*shape[:dim], *shape[dim + 1 :]), generator=generator).to(device)
    loss, expected = cross_entropy(logits, target, class_dim=dim), F.cross_entropy(logits, target)
    torch.testing.assert_close(loss, expected)
    for one, other in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("logits", "target", "more", "message"),
    [
        pytest.param(
            (2, 3),
            torch.rand(2, 3),
            {},
            r"target has dtype torch.float32 and shape \(2, 3\), .* class ids of shape \(2,\); "
            r"for probabilities, give target.argmax",
            id="probabilities",
        ),
        pytest.param(
            (2, 5, 3),
            torch.zeros(2, 3, dtype=torch.int64),
            {},
            r"or class_dim=1 for logits in torch's form, \[N, C, ...\]",
            id="torchs-form",
        ),
        pytest.param(
            (2, 5),
            torch.zeros(2, dtype=torch.int64),
            {"class_dim": 2},
            r"class_dim is 2 for logits of shape \(2, 5\)",
            id="no-dim",
        ),
        pytest.param(
            (2, 5),
            torch.zeros(2, dtype=torch.int16),
            {},
            r"target has dtype torch.int16 and shape \(2,\), not torch.int32, torch.int64, torch.uint8",
            id="int16",
        ),
    ],
)  # fmt: skip
def test_a_wrong_target_is_named(logits, target, more, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.randn(logits), target, **more)
    if not more:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(torch.randn(*logits[:-1], 4), torch.randn(logits[-1], 4), target)


# z-loss and the weights of classes


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_mean_divides_z_loss_by_the_tokens_whatever_the_classes_weigh(device, label_smoothing):
    logits, target, upstream = make(9, 40, device)
    target[3] = -100
    more = given({"weight": True, "z_loss": 0.03, "label_smoothing": label_smoothing}, 40, device)
    assert_as_good_as_eager(logits, target, upstream, **more)
    given_count = cross_entropy(logits, target, denominator=8.0, **more)
    by_hand = cross_entropy(logits, target, reduction="sum", **more) / 8
    torch.testing.assert_close(given_count, by_hand)


def test_without_a_token_z_loss_and_weights_give_no_gradient(device):
    logits, target, upstream = make(3, 40, device)
    more = given({"weight": True, "z_loss": 0.03, "label_smoothing": 0.1}, 40, device)
    loss, gradient = loss_and_gradient(logits, torch.full_like(target, -100), upstream, **more)
    assert loss.isnan() and not gradient.any()
