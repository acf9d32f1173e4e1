"""The losses under torch.compile: one graph, the eager values, and no step that makes the host wait for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library
from weft.kernels import cross_entropy, linear_cross_entropy
from weft.kernels.cross_entropy import options as checks
from weft.kernels.cross_entropy.options import Options
from weft.kernels.cross_entropy.sharded import custom_ops as of_logits
from weft.kernels.linear_cross_entropy.sharded import custom_ops as of_products

from tests.kernels.cross_entropy.cases import given
from tests.kernels.linear_cross_entropy.cases import make
from tests.kernels.reads import NoReads

V = 31
ASKED: list[Any] = [
    pytest.param({}, id="mean"),
    pytest.param({"reduction": "sum", "denominator": None, "logit_scale": 0.5}, id="sum"),
    pytest.param({"denominator": 7.0, "weight": True, "label_smoothing": 0.1}, id="denominator"),
    pytest.param({"reduction": "none", "z_loss": 0.1, "softcap": 5.0}, id="none"),
    pytest.param({"return_lse": True, "label_smoothing": 0.1}, id="lse"),
    pytest.param({"inplace_backward": True}, id="in-place"),
]


def of_the_logits(x: Tensor, matrix: Tensor, bias: Tensor, target: Tensor, **options: Any) -> Any:
    return cross_entropy(x @ matrix.T + bias, target, **options)


def of_the_product(x: Tensor, matrix: Tensor, bias: Tensor, target: Tensor, **options: Any) -> Any:
    return linear_cross_entropy(x, matrix, target, linear_bias=bias, chunk_tokens=4, **options)


def number(loss: Callable[..., Any], *tensors: Tensor, **options: Any) -> Tensor:
    found = loss(*tensors, **options)
    return found[0].sum() + found[1].square().sum() if isinstance(found, tuple) else found.sum()


# A graph holds a loss as a single op, whatever runs inside.
WHERE = [
    "reference",
    pytest.param("interpreted", marks=pytest.mark.exhaustive),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("device", WHERE, indirect=True)
@pytest.mark.parametrize("loss", [of_the_logits, of_the_product])
@pytest.mark.parametrize("options", ASKED)
def test_a_loss_compiles_to_one_graph(device, loss, options):
    torch._dynamo.reset()
    case, options = make((9,), V, device, bias=True), given(options, V, device)
    plain = number(loss, *case.leaves(), case.target, **options)
    compiled = torch.compile(lambda *tensors: number(loss, *tensors, **options), fullgraph=True, backend="aot_eager")
    traced = compiled(*case.leaves(), case.target)
    torch.testing.assert_close(traced, plain)
    torch.testing.assert_close(*(torch.autograd.grad(each, case.leaves()) for each in (traced, plain)))


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", [of_the_logits, of_the_product])
def test_a_compiled_loss_raises_what_it_raises_otherwise(loss):
    torch._dynamo.reset()
    case = make((9,), V, bias=True)
    compiled = torch.compile(lambda *tensors: number(loss, *tensors), fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"target\[0\] is 31, which is no class of 31"):
        compiled(*case.leaves(), torch.full_like(case.target, V))


@pytest.mark.few(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False]], ids=["all", "weight-alone"])
def test_the_custom_ops_are_what_they_declare(device, reduction, wanted):
    case = make((5,), V, device, bias=True)
    leaves = [leaf.detach().requires_grad_(want) for leaf, want in zip(case.leaves(), wanted, strict=True)]
    x, weight, bias = leaves
    asked = (*of_logits.VocabShard(), *Options(reduction=reduction, label_smoothing=0.1, z_loss=0.1).flat())
    logits = (x @ weight.T).detach().requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    library.opcheck(of_logits.forward, (logits, case.target, None, None, *asked), test_utils=checks)
    library.opcheck(
        of_products.forward,
        (x, weight, case.target, bias, None, None, None, wanted, 2, None, *asked),
        test_utils=checks,
    )


LAUNCHED = ("statistics", "statistics_and_gradient", "losses", "gradient", "gradient_unless_guessed", "scale")


class Launched:
    """Stands for a kernel: counts its launches and computes nothing."""

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constexprs: Any) -> None:
            self.launches += 1

        return launch


@pytest.mark.parametrize("loss", [of_the_logits, of_the_product])
@pytest.mark.parametrize("options", ASKED)
def test_the_host_waits_for_no_device(interpreted, monkeypatch, loss, options):
    """The host must not wait, so that a CUDA graph can record the whole loss.

    Runs the path of a GPU, without kernels, and without a CPU's check of values.
    """
    from weft.kernels.cross_entropy import kernel
    from weft.kernels.linear_cross_entropy import kernel as scaling

    monkeypatch.setattr(checks, "_check_values", lambda *arguments: None)
    kernels = {name: Launched() for name in LAUNCHED}
    for name, counting in kernels.items():
        monkeypatch.setattr(scaling if name == "scale" else kernel, name, counting)
    case, options = make((9,), V, bias=True), given(options, V, "cpu")
    with NoReads():
        number(loss, *case.leaves(), case.target, **options).backward()
        with pytest.raises(AssertionError, match="makes the host wait"):
            bool((case.target < 0).any())
    product = loss is of_the_product
    chunks = 3 if product else 1
    in_backward = {"return_lse"} if product else {"return_lse", "inplace_backward"}
    ahead = options.get("reduction") != "none" and not in_backward & set(options)
    expected = {
        "statistics": chunks * (not ahead),
        "statistics_and_gradient": chunks * ahead,
        "losses": chunks,
        "gradient": chunks * (not ahead),
        "gradient_unless_guessed": ahead and not product,  # the device decides whether it does its work
        "scale": 3 * (ahead and product),
    }
    assert {name: each.launches for name, each in kernels.items()} == expected
