"""The contract of cross-entropy: saved tensors, bytes moved, and refusals."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import cross_entropy
from weft.kernels.cross_entropy import function, reference
from weft.kernels.cross_entropy.merged import LossShard
from weft.kernels.cross_entropy.options import Options
from weft.kernels.cross_entropy.sharded.loss import as_denominator
from weft.kernels.launching.traffic import Traffic, counted_traffic

from tests.kernels.cross_entropy.cases import loss_and_gradient, make, shard_by_shard
from tests.support.pool import Pool


@pytest.mark.parametrize("sizes", [[31], [16, 15]], ids=["whole", "sharded"])
@pytest.mark.parametrize("wrong", [-1, 31, 2**40])
def test_a_target_that_is_no_class(device, wrong, sizes):
    logits, target, upstream = make(6, 31, device, reduction="none")
    logits, target, upstream = logits.view(2, 3, 31), target.view(2, 3), upstream.view(2, 3)
    target[1, 2] = wrong
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"target\[1, 2\] is {wrong}, which is no class of 31 \(0 to 30\)"):
            shard_by_shard(logits, target, upstream, sizes, reduction="none")
        return
    for loss, gradient in shard_by_shard(logits, target, upstream, sizes, reduction="none"):
        assert loss.isnan().flatten().tolist() == [False] * 5 + [True]
        assert gradient.isnan().any(-1).flatten().tolist() == [False] * 5 + [True]


def test_the_passes_mark_a_target_that_is_no_class_with_nan(device):
    passes = function.select_passes(torch.empty(0, device=device))
    logits, target, _ = make(4, 31, device)
    target[:3] = torch.tensor([-1, 31, -100])
    found = passes.statistics(logits, target, None, LossShard(0, 31, Options()))
    assert found[:, 1].isnan().tolist() == [True, True, False, False]
    assert found[2].tolist() == [-torch.inf, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"target": torch.zeros(4)}, "target has dtype torch.float32", id="float-target"),
        pytest.param({"target": torch.zeros(3).long()}, r"target of shape \(3,\) .*\(4,\)", id="short-target"),
        pytest.param({"target": torch.zeros(4, 5).long()}, r"target of shape \(4, 5\)", id="one-hot-target"),
        pytest.param({"logits": torch.zeros(4, 5).long()}, "dtype torch.int64", id="int-logits"),
        pytest.param({"logits": torch.tensor(1.0)}, r"logits of shape \(\)", id="scalar-logits"),
        pytest.param({"logits": torch.zeros(4, 5, device="meta")}, "target is on cpu, logits on meta", id="devices"),
        pytest.param({"weight": torch.ones(4)}, r"weight of shape \(4,\) .* each of the 5 classes", id="short-weight"),
        pytest.param({"weight": torch.ones(5).long()}, "weight of .* torch.int64; give one float", id="int-weight"),
        pytest.param({"vocab_start": -1}, "vocab_start is -1", id="negative-start"),
        pytest.param({"vocab_start": 1, "vocab_size": 5}, "classes 1 to 6 of a vocabulary of 5", id="past-the-end"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(change, message):
    arguments = {"logits": torch.zeros(4, 5), "target": torch.zeros(4).long(), "options": Options()} | change
    gathers: list[Tensor] = []
    with pytest.raises(ValueError, match=message):
        function.forward(arguments.pop("logits"), arguments.pop("target"), **arguments, gather=gathers.append)
    assert gathers == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"reduction": "avg"}, "'avg'; choose one of 'mean', 'sum', 'none'", id="reduction"),
        pytest.param({"ignore_index": None}, "ignore_index is None", id="ignore-index"),
        pytest.param(
            {"label_smoothing": 1.5}, "label_smoothing is 1.5; give a share of the target, 0 to 1", id="smoothing"
        ),
        pytest.param({"z_loss": -1.0}, "z_loss is -1.0; give a finite factor, 0 or more", id="z-loss"),
        pytest.param({"softcap": 0.0}, "softcap is 0.0; give a finite bound above 0, or None", id="softcap"),
        pytest.param({"logit_scale": float("inf")}, "logit_scale is inf; give a finite factor", id="scale"),
        pytest.param({"denominator": -2.0}, "denominator is -2.0; give a number", id="negative-denominator"),
        pytest.param({"denominator": torch.tensor(torch.nan)}, "denominator is nan; give a ", id="nan-denominator"),
        pytest.param({"denominator": "three"}, "denominator is 'three'; give a number", id="text-denominator"),
        pytest.param(
            {"denominator": torch.ones(2)},
            r"denominator has shape \(2,\) and .*; give one number",
            id="two-denominators",
        ),
        pytest.param(
            {"weight": torch.ones(5, requires_grad=True)},
            r"weight requires .* give weight.detach\(\)",
            id="weight-gradient",
        ),
        pytest.param(
            {"denominator": torch.tensor(3.0, requires_grad=True)}, "denominator requires a", id="denominator-gradient"
        ),
        pytest.param({"denominator": 4, "reduction": "sum"}, "only 'mean' divides", id="denominator-of-a-sum"),
        pytest.param({"inplace_backward": True}, "would overwrite logits that are a leaf", id="leaf"),
    ],
)
def test_options_that_mean_nothing(change, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(torch.zeros(4, 5, requires_grad=True), torch.zeros(4).long(), **change)


@pytest.mark.parametrize(
    "view", [lambda x: x.view(4, 5), lambda x: x[:], lambda x: x.T.T], ids=["view", "slice", "transposed"]
)
def test_in_place_no_view_of_a_leaf_is_overwritten(view):
    leaf = torch.zeros(4, 5, requires_grad=True)
    with pytest.raises(ValueError, match="would overwrite logits that are a leaf"):
        cross_entropy(view(leaf), torch.zeros(4).long(), inplace_backward=True)
    cross_entropy(view(leaf) * 1, torch.zeros(4).long(), inplace_backward=True).backward()


@pytest.mark.parametrize("denominator", [torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.float64), torch.tensor(3)])
def test_a_denominator_of_any_dtype_leaves_a_float32_scalar(device, denominator):
    logits, target, _ = make(4, 5, device)
    loss = cross_entropy(logits, target, denominator=denominator.to(device))
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert torch.equal(loss, cross_entropy(logits, target, denominator=3))


def test_a_denominator_on_the_host_is_not_copied_from_there(monkeypatch):
    """A copy would make the host wait, and could not be captured in a CUDA graph."""
    logits, moved, to = torch.empty(4, 5, device="meta"), [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, **how: moved.append(tensor.device) or to(tensor, **how))
    as_denominator(torch.tensor(3.0), None, logits)
    assert moved == [logits.device]


def test_a_second_derivative_is_refused(device):
    logits, target, _ = make(4, 5, device)
    (gradient,) = torch.autograd.grad(cross_entropy(logits.requires_grad_(), target), logits, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.square().sum().backward()


def test_an_int32_target_is_not_taken_for_a_wider_ignore_index(device):
    logits, _, _ = make(2, 5, device)
    target = torch.tensor([0, 1], dtype=torch.int32, device=device)
    ignoring, plain = (cross_entropy(logits, target, reduction="none", ignore_index=i) for i in (2**32, -100))
    assert torch.equal(ignoring, plain)


def test_the_lse_has_a_gradient_where_the_loss_divides_by_0(device):
    logits, target, _ = make(4, 5, device)
    _, lse = cross_entropy(logits.requires_grad_(), target, weight=torch.zeros(5, device=device), return_lse=True)
    (gradient,) = torch.autograd.grad(lse.sum(), logits)
    torch.testing.assert_close(gradient, logits.detach().softmax(-1))


def test_no_gradient_is_made_where_none_is_needed(device):
    logits, target, upstream = make(4, 5, device)
    _, saved = function.forward(logits, target, options=Options())
    assert function.backward(saved, (upstream,), (False,) * 4, options=Options()) == (None,) * 4


def test_only_the_logits_themselves_are_saved(device):
    logits, target, _ = make(6, 257, device, torch.bfloat16)
    _, saved = function.forward(logits, target, options=Options(label_smoothing=0.1, z_loss=0.1))
    assert saved[0] is logits
    assert saved[1] is target
    assert [tuple(tensor.shape) for tensor in saved[2:] if tensor is not None] == [(), (1, 6, 5)]


def test_merge_is_exact_about_minus_infinity():
    shard = torch.tensor([[2.0, 3.0, 1.5]])
    empty = torch.tensor([[-torch.inf, 0.0, 0.0]])
    alone = reference.merge(shard.unsqueeze(0))
    for statistics in ((shard, empty), (empty, shard), (empty, shard, empty)):
        assert all(map(torch.equal, reference.merge(torch.stack(statistics)), alone))
    only_the_target = torch.tensor([[-torch.inf, 0.0, 1.5]])
    assert [float(x) for x in reference.merge(only_the_target.unsqueeze(0))] == [1.5, 0, -torch.inf]


@pytest.mark.parametrize("chunk", [1, 31, 100])
def test_the_reference_is_the_same_in_any_chunks(monkeypatch, chunk):
    logits, target, upstream = make(7, 31, "cpu", torch.bfloat16)
    whole = loss_and_gradient(logits, target, upstream)
    monkeypatch.setattr(reference, "CHUNK", chunk)
    assert all(map(torch.equal, loss_and_gradient(logits, target, upstream), whole))


MORE = ({}, {"softcap": 30.0, "z_loss": 1e-4}, {"label_smoothing": 0.1}, {"return_token_accuracy": True})


@pytest.mark.few(1)
@pytest.mark.parametrize("options", MORE, ids=str)
def test_six_bytes_a_bf16_logit(interpreted, options):
    """2 read forward, 2 read and 2 written backward; of an ignored row only the target and the statistics are read."""
    N, V, ignored = 5, 5000, 2
    logits, target, upstream = make(N, V, "cpu", torch.bfloat16)
    target[:ignored] = -100
    asked, is_smoothed = Options(**options), bool(options.get("label_smoothing"))
    smoothed, first = 8 * is_smoothed, 2 * is_smoothed  # each row's two float32 more; and its first logit twice
    rivals = 4 * asked.return_token_accuracy

    with counted_traffic() as forward:
        _, saved = function.forward(logits, target, options=asked)
    assert forward == Traffic(
        loaded=(N - ignored) * (V * 2 + 2 + first) + N * (8 + 20 + smoothed), stored=N * (20 + smoothed + rivals)
    )
    with counted_traffic() as backward:
        function.backward(saved, (upstream,), (True, False, False, False), options=asked)
    assert backward == Traffic(loaded=(N - ignored) * V * 2 + N * (8 + 12 + 4 + 4), stored=N * V * 2)


def without_triton() -> float:
    assert "weft.kernels.cross_entropy.launch" not in sys.modules, "which is imported where Triton is needed"
    sys.modules["triton"] = None  # type: ignore[assignment]
    loss = cross_entropy(torch.zeros(2, 8, requires_grad=True), torch.tensor([1, 2]))
    loss.backward()
    return round(float(loss), 4)


def test_a_cpu_run_needs_no_triton():
    with Pool() as fresh:
        assert fresh.run(without_triton, ranks=1) == [2.0794]


class Operators(TorchDispatchMode):
    """Counts the calls of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ignored", "most"), [(0, 75), (1, 100)], ids=["all-count", "one-ignored"])
def test_a_cpu_asks_for_few_operators(ignored, most):
    """With few logits the operators take the time, not the numbers."""
    logits, target, _ = make(4, 31, "cpu")
    target.clamp_(min=0)[:ignored] = -100
    logits.requires_grad_()
    cross_entropy(logits, target).backward()  # the first backward, from which the next upstream gradient is guessed
    with Operators() as seen:
        cross_entropy(logits, target).backward()
    assert seen.count <= most
