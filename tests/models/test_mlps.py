"""MLPs fuse ops whose intermediate nobody observes: gate and up, on a mesh too, and GPT's activation with down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from weft import kernels
from weft.mesh import Layout, ProcessMesh
from weft.models import ColwiseParallel, GPTConfig, ParallelPlan, RowwiseParallel, lora, parallelize
from weft.models.blocks import GatedMLP
from weft.models.gpt.model import GPTMLP
from weft.reshard import distribute, to_global

from tests.support.pool import Pool

H, INNER = 8, 12


def made(bias: bool = False) -> GatedMLP:
    torch.manual_seed(0)
    mlp = GatedMLP(H, INNER, bias=bias).double()
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    return mlp


def given() -> Tensor:
    return torch.randn(2, 4, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def meaning(x: Tensor, mlp: Any) -> Tensor:
    return F.linear(F.silu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)


def found(run: Callable[..., Tensor], x: Tensor, *parameters: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = run(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *parameters])]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each call of kernels.swiglu_linear."""
    calls: list[int] = []
    own = kernels.swiglu_linear
    monkeypatch.setattr(kernels, "swiglu_linear", lambda *tensors: calls.append(1) or own(*tensors))
    return calls


def test_a_gated_mlp_is_one_op_of_the_same_values_and_gradients(fused: list[int]) -> None:
    mlp = made()
    weights = [each.weight for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    torch.testing.assert_close(found(mlp, given(), *weights), found(lambda x: meaning(x, mlp), given(), *weights))
    assert len(fused) == 1
    assert list(mlp.state_dict()) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


class Other(nn.Linear):
    """A library's layer in place of the model's."""


SEEN: dict[str, Callable[[GatedMLP], Any]] = {
    "forward-hook": lambda mlp: mlp.gate_proj.register_forward_hook(lambda *_: None),
    "pre-hook": lambda mlp: mlp.up_proj.register_forward_pre_hook(lambda *_: None),
    "backward-hook": lambda mlp: mlp.up_proj.register_full_backward_hook(lambda *_: None),
    "other-forward": lambda mlp: setattr(mlp.gate_proj, "forward", mlp.gate_proj.forward),
    "other-class": lambda mlp: setattr(mlp, "up_proj", Other(H, INNER, bias=False, dtype=torch.float64)),
}


@pytest.mark.parametrize("kind", SEEN)
def test_a_layer_that_somebody_sees_is_called(kind: str, fused: list[int]) -> None:
    mlp = made()
    SEEN[kind](mlp)
    torch.testing.assert_close(found(mlp, given()), found(lambda x: meaning(x, mlp), given()))
    assert not fused


def test_biases_are_added(fused: list[int]) -> None:
    mlp = made(bias=True)
    gate, up, down = ((each.weight, each.bias) for each in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    x = given()
    torch.testing.assert_close(mlp(x), F.linear(F.silu(F.linear(x, *gate)) * F.linear(x, *up), *down))
    assert not fused


def test_an_adapter_applies(fused: list[int]) -> None:
    mlp = lora(made(), 2, 4.0, ["gate_proj"])
    adapter: Any = mlp.gate_proj.lora
    nn.init.normal_(adapter.B)
    x = given()
    gate = F.linear(x, mlp.gate_proj.weight) + 2 * F.linear(F.linear(x, adapter.A), adapter.B)
    torch.testing.assert_close(mlp(x), F.linear(F.silu(gate) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight))
    assert not fused


def gpt() -> GPTMLP:
    config = GPTConfig(vocab_size=7, hidden_size=H, intermediate_size=INNER, num_layers=1, num_heads=2, max_seq_len=8)
    torch.manual_seed(0)
    mlp = GPTMLP(config).double()
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    return mlp


@pytest.mark.parametrize("seen", [False, True], ids=["together", "seen"])
def test_gpts_activation_is_part_of_the_second_product_where_nobody_sees_it(
    seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = gpt()
    passes, own = [], kernels.gelu
    monkeypatch.setattr(kernels, "gelu", lambda *given, **more: passes.append(1) or own(*given, **more))
    given_to: list[Tensor] = []
    if seen:
        mlp.c_proj.register_forward_hook(lambda module, args, output: given_to.append(args[0]))

    def hidden(x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, mlp.c_fc.weight, mlp.c_fc.bias), approximate="tanh")

    parameters = [*mlp.parameters()]
    torch.testing.assert_close(
        found(mlp, given(), *parameters),
        found(lambda x: F.linear(hidden(x), mlp.c_proj.weight, mlp.c_proj.bias), given(), *parameters),
    )
    assert len(passes) == len(given_to) == seen
    for each in given_to:
        torch.testing.assert_close(each, hidden(given()))


COLUMNS = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}


def on_a_mesh() -> tuple[list[Tensor], int]:
    """The results on two ranks, and the number of calls of kernels.swiglu_linear."""
    calls, own = [], kernels.swiglu_linear
    kernels.swiglu_linear = lambda *tensors: calls.append(1) or own(*tensors)  # type: ignore[assignment]
    try:
        mesh = ProcessMesh.grid(tp=2)
        plan = ParallelPlan(tensor=COLUMNS, sequence=True)
        mlp: Any = parallelize(made(), mesh, plan)
        x = distribute(given(), Layout(mesh, "tp: S(1)")).requires_grad_()
        output = mlp(x)
        to_global(output).square().sum().backward()
        return [to_global(each) for each in (output, x.grad, mlp.gate_proj.weight.grad)], len(calls)
    finally:
        kernels.swiglu_linear = own


def test_columns_of_both_are_computed_together_on_a_mesh(pool: Pool) -> None:
    mlp = made()
    truth = found(lambda x: meaning(x, mlp), given(), mlp.gate_proj.weight)
    for values, calls in pool.run(on_a_mesh, ranks=2):
        torch.testing.assert_close(values, [each.detach() for each in truth])
        assert calls == 1
