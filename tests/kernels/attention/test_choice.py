"""The table of measurements which chooses between torch's fused attention and the kernel on a GPU."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from weft.kernels import attention
from weft.kernels.attention import plain
from weft.kernels.attention.plain import TABLE, AttentionMeasurement, CallClass, faster_calls, is_kernel_faster
from weft.kernels.launching.launched import write_table

OF = CallClass.of("sm_90", torch.bfloat16, 64, 1000)
ROW = AttentionMeasurement(of=OF, seconds=1.0, torch_seconds=2.0, where="a test")
SLOWER = replace(ROW, of=OF._replace(tokens=4096), seconds=3.0)
CPU = torch.device("cpu")


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table filled by hand, on a chip that it names."""
    write_table({each.of: each for each in (ROW, SLOWER)}, tmp_path / "table.json")
    monkeypatch.setattr(plain, "FASTER", faster_calls(AttentionMeasurement.read(tmp_path / "table.json")))
    monkeypatch.setattr(plain, "chip_of", lambda device: ("sm_90", 132))


@pytest.mark.parametrize(
    ("call", "faster"),
    [
        pytest.param((torch.bfloat16, 64, 1024), True, id="measured-faster"),
        pytest.param((torch.bfloat16, 64, 513), True, id="of-the-same-power-of-two"),
        pytest.param((torch.bfloat16, 64, 512), False, id="shorter"),
        pytest.param((torch.bfloat16, 64, 1025), False, id="longer"),
        pytest.param((torch.bfloat16, 64, 4096), False, id="measured-slower"),
        pytest.param((torch.float16, 64, 1024), False, id="another-dtype"),
        pytest.param((torch.bfloat16, 128, 1024), False, id="another-head-dim"),
    ],
)
def test_the_kernel_is_chosen_where_it_was_measured_faster(
    call: tuple[torch.dtype, int, int], faster: bool, filled: None
) -> None:
    assert is_kernel_faster(CPU, *call) == faster


def test_another_chip_is_not_measured(filled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "chip_of", lambda device: ("sm_80", 108))
    assert not is_kernel_faster(CPU, torch.bfloat16, 64, 1024)


def test_an_empty_table_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "FASTER", {})
    monkeypatch.setattr(plain, "chip_of", lambda device: pytest.fail("it asked"))
    assert not is_kernel_faster(CPU, torch.bfloat16, 64, 1024)


def test_the_table_is_as_it_is_written(tmp_path: Path) -> None:
    rows = AttentionMeasurement.read(TABLE)
    write_table(rows, tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == TABLE.read_text()
    assert all(row.where for row in rows.values())


def ops_called(
    monkeypatch: pytest.MonkeyPatch,
    T: int,
    S: int,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 64,
    **options: Any,
) -> list[str]:
    """The names of the ops which a call on a GPU runs. The tensors are fake: no GPU is needed."""
    module = importlib.import_module("weft.kernels.attention.sharded.op")
    names = []

    def noted(op: Any, query: Tensor, *operands: Any, **given: Any) -> Tensor:
        names.append(op.name)
        return query

    monkeypatch.setattr(module, "apply", noted)
    with FakeTensorMode():
        tensors = [torch.empty(2, each, 2 * head_dim, dtype=dtype, device="cuda") for each in (T, S, S)]
        attention(*tensors, head_dim=head_dim, **options)
    return names


@pytest.mark.parametrize(
    ("T", "S", "options", "chosen"),
    [
        pytest.param(1024, 1024, {}, "attention", id="measured-faster"),
        pytest.param(4096, 4096, {}, "plain_attention", id="measured-slower"),
        pytest.param(2048, 2048, {}, "plain_attention", id="not-measured"),
        pytest.param(1024, 1024, {"causal": False}, "plain_attention", id="not-causal"),
        pytest.param(1, 1024, {}, "plain_attention", id="a-query"),
        pytest.param(2048, 2048, {"window": 5}, "attention", id="a-window"),
    ],
)
def test_a_filled_table_changes_the_choice(
    T: int, S: int, options: dict[str, Any], chosen: str, filled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ops_called(monkeypatch, T, S, **options) == [chosen]
    monkeypatch.setattr(plain, "FASTER", {})
    assert ops_called(monkeypatch, T, S, **options) == ["attention" if "window" in options else "plain_attention"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "chosen"),
    [
        pytest.param(torch.bfloat16, 17, "plain_attention", id="bfloat16-odd"),
        pytest.param(torch.float16, 2, "plain_attention", id="float16-even"),
        pytest.param(torch.float32, 64, "plain_attention", id="float32"),
        pytest.param(torch.float32, 20, "plain_attention", id="float32-multiple-of-4"),
        pytest.param(torch.float32, 17, "attention", id="float32-odd"),
        pytest.param(torch.float32, 18, "attention", id="float32-even"),
        pytest.param(torch.float64, 64, "attention", id="float64"),
    ],
)
def test_torch_is_chosen_only_where_its_attention_is_fused(
    dtype: torch.dtype, head_dim: int, chosen: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere torch would hold the scores of all tokens by all tokens."""
    assert ops_called(monkeypatch, 2048, 2048, dtype, head_dim, causal=causal) == [chosen]


@pytest.mark.exhaustive
def test_the_choice_is_compiled_once_for_many_lengths(filled: None) -> None:
    """A length that torch.compile does not know is compared with the table's, and stays unknown."""
    counted = CompileCounter()

    def chosen(x: Tensor) -> Tensor:
        return x + 1 if plain.is_kernel_faster(x.device, torch.bfloat16, 64, x.shape[0]) else x - 1

    compiled = torch.compile(chosen, backend=counted, fullgraph=True, dynamic=True)
    for tokens in (600, 700, 800, 1024):
        assert compiled(torch.zeros(tokens))[0] == 1
    assert compiled(torch.zeros(1500))[0] == -1
    assert counted.frame_count == 2
