"""Attention projects q, k and v in one op, in every family, unless a user's hook or layer comes between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weft import kernels
from weft.mesh import Layout, ProcessMesh
from weft.models import ColwiseParallel, GPTConfig, ParallelPlan, RowwiseParallel, lora, parallelize
from weft.models.blocks import Attention
from weft.models.gpt.model import GPTAttention
from weft.reshard import distribute, to_global

from tests.support.pool import Pool

H, D, T = 16, 4, 3
ANGLES = torch.outer(torch.arange(T).double(), torch.tensor([1.0, 0.3]).double())
TABLES = (ANGLES.cos(), ANGLES.sin())


def llama(bias: bool = False, norm: bool = False) -> Attention:
    return Attention(
        H, num_heads=4, num_kv_heads=2, head_dim=D, qkv_bias=bias,
        output_bias=False, qk_norm_eps=1e-6 if norm else None,
        window=None, dropout=0.0, name="attention",
    )  # fmt: skip


def gpt() -> GPTAttention:
    return GPTAttention(
        GPTConfig(vocab_size=7, hidden_size=H, intermediate_size=H, num_layers=1, num_heads=4, max_seq_len=8), 0
    )


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen2": lambda: llama(bias=True),
    "qwen3": lambda: llama(norm=True),
    "gpt": gpt,
}


def made(family: str) -> Any:
    torch.manual_seed(0)
    attention: Any = FAMILIES[family]().double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    return attention


def given() -> Tensor:
    return torch.randn(2, T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def one_by_one(attention: Any) -> Any:
    """The same attention with an idle hook on k_proj, which rules out the fused op."""
    attention.k_proj.register_forward_hook(lambda *_: None)
    return attention


def found(attention: Any, x: Tensor) -> list[Tensor]:
    """The output and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output = attention(x) if isinstance(attention, GPTAttention) else attention(x, *TABLES)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *attention.parameters()])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each call of kernels.qkv_linear."""
    seen: list[int] = []
    own = kernels.qkv_linear
    monkeypatch.setattr(kernels, "qkv_linear", lambda *given, **more: seen.append(1) or own(*given, **more))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_query_key_and_value_are_one_op_of_the_same_values_and_gradients(family: str, calls: list[int]) -> None:
    together = found(made(family), given())
    assert len(calls) == 1
    torch.testing.assert_close(together, found(one_by_one(made(family)), given()))
    assert len(calls) == 1


SEEN: dict[str, Callable[[Any], Any]] = {
    "forward-hook": lambda attention: attention.q_proj.register_forward_hook(lambda *_: None),
    "pre-hook": lambda attention: attention.v_proj.register_forward_pre_hook(lambda *_: None),
    "backward-hook": lambda attention: attention.k_proj.register_full_backward_hook(lambda *_: None),
    "other-forward": lambda attention: setattr(attention.q_proj, "forward", attention.q_proj.forward),
    "between": lambda attention: attention.attend.keys_and_values.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("kind", SEEN)
def test_a_layer_that_somebody_sees_is_called(kind: str, family: str, calls: list[int]) -> None:
    attention = made(family)
    wanted = found(attention, given())
    calls.clear()
    SEEN[kind](attention)
    torch.testing.assert_close(found(attention, given()), wanted)
    assert not calls


def test_an_adapter_applies(calls: list[int]) -> None:
    plain, adapted = made("llama"), made("llama")
    x = given()
    before = plain(x, *TABLES)
    calls.clear()
    adapted = lora(adapted, 2, 4.0, ["q_proj"])
    assert torch.equal(adapted(x, *TABLES), before)  # B is zero
    adapter: Any = adapted.q_proj.lora
    nn.init.normal_(adapter.B)
    with torch.no_grad():
        plain.q_proj.weight += 2 * adapter.B @ adapter.A
    assert not calls
    torch.testing.assert_close(adapted(x, *TABLES), plain(x, *TABLES))


COLUMNS = {"[qkv]_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}


def on_a_mesh() -> tuple[list[Tensor], int]:
    """The results on two ranks, and the number of calls of kernels.qkv_linear."""
    calls, own = [], kernels.qkv_linear
    kernels.qkv_linear = lambda *given, **more: calls.append(1) or own(*given, **more)  # type: ignore[assignment]
    try:
        mesh = ProcessMesh.grid(tp=2)
        attention = parallelize(made("llama"), mesh, ParallelPlan(tensor=COLUMNS, sequence=True))
        x = distribute(given(), Layout(mesh, "tp: S(1)")).requires_grad_()
        output = attention(x, *TABLES)
        to_global(output).square().sum().backward()
        return [to_global(each) for each in (output, x.grad, *(p.grad for p in attention.parameters()))], len(calls)
    finally:
        kernels.qkv_linear = own


def test_query_key_and_value_are_one_op_on_a_mesh(pool: Pool) -> None:
    truth = [each.detach() for each in found(made("llama"), given())]
    for values, calls in pool.run(on_a_mesh, ranks=2):
        torch.testing.assert_close(values, truth)
        assert calls == 1
