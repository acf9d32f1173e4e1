"""The GPU benchmark of attention, and the tuning of its table, on a CPU: small sizes, the host's clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.kernels.attention.plain import AttentionMeasurement, CallClass, faster_calls

from benchmarks import attentions, truth, tune_attention
from benchmarks import test_attention_speed as speed
from benchmarks.attentions import AGAIN, FLEX, KERNEL, MASK, NEVER, TORCH, Case, attends, truth_of, ways_of
from benchmarks.timing import QUICK, Host

SMALL = Case(tokens=40, head_dim=8, batch=2, heads=4, kv_heads=2)
CASES = {
    "plain": SMALL,
    "packed": replace(SMALL, packed=True),
    "window": replace(SMALL, window=7),
    "dropout": replace(SMALL, dropout=NEVER),
}
WAYS = {
    "plain": {"Weft", KERNEL, TORCH, AGAIN, FLEX},
    "packed": {"Weft", MASK, FLEX},
    "window": {"Weft"},
    "dropout": {"Weft"},
}
EACH_CASE = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing; documents of 9 tokens on average."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(attentions, "DOCUMENT", 9)


@EACH_CASE
def test_all_ways_are_checked_and_timed(name: str) -> None:
    found = speed.of_attention(CASES[name], "cpu", Host(), rounds=3, side=16)
    assert {*found.rows, *found.failed} == WAYS[name] | {"a matmul of 16 x 16"}
    assert {*found.failed} <= {FLEX}  # it has no backward on a CPU
    for way in WAYS[name] - {FLEX}:
        row = found.rows[way]
        assert 0 < row["query_gradient_error"] < truth.CHUNKED and row["flop"] == CASES[name].flop
        assert found.roofline(way) > 0
    assert CASES[name].name in str(found)


@EACH_CASE
def test_all_ways_compute_the_same(name: str) -> None:
    """Also flex_attention, forward alone."""
    case = CASES[name]
    q, k, v, _ = (x.detach() for x in case.operands("cpu", torch.float32))
    first, *others = (make()(q, k, v) for make in attends(case, "cpu").values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


@EACH_CASE
@pytest.mark.parametrize("chunk", [1, 1 << 30], ids=["in-chunks", "at-once"])
def test_the_truth_is_dense_attention_of_the_last_key_head(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attentions, "CHUNK_BYTES", chunk)
    case = CASES[name]
    operands = case.operands("cpu", torch.float64)
    q, k, v, grad = (x[-1:].unflatten(-1, (-1, 8)).transpose(1, 2) for x in operands)
    mask = torch.zeros(case.tokens, case.tokens, dtype=torch.bool)
    start = 0
    for length in case.documents[-1]:
        ones = torch.ones(length, length, dtype=torch.bool)
        mask[start : start + length, start : start + length] = ones.tril() & ones.triu(1 - (case.window or length))
        start += length
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    wanted = [output, *torch.autograd.grad(output, operands[:3], grad)]
    wanted[1:] = [x[-1:].unflatten(-1, (-1, 8)).transpose(1, 2) for x in wanted[1:]]
    for part, true in zip(truth_of(case, operands), wanted, strict=True):
        heads = part.truth.shape[-1] // 8
        torch.testing.assert_close(part.truth, true[0, -heads:].transpose(0, 1).flatten(1))


def test_a_wrong_way_is_found() -> None:
    operands = SMALL.operands("cpu")
    made = ways_of(SMALL, operands, ["Weft"]).made["Weft"]()
    wrong = replace(made, gradients=[made.gradients[0], made.gradients[1] * 1.05, made.gradients[2]])
    with pytest.raises(truth.Inaccurate, match="the key's gradient errs by"):
        truth.errors("Weft", wrong, truth_of(SMALL, operands))


@EACH_CASE
def test_pairs_are_counted(name: str) -> None:
    case = CASES[name]
    seen = case.seen(case.ids("cpu"), torch.arange(case.tokens))
    assert case.pairs == int(seen.sum())
    assert case.flop == 14 * case.pairs * 4 * 8


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tokens", [512, *speed.TOKENS])
def test_a_call_is_a_layers(tokens: int, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions, "DOCUMENT", 500)
    case = Case.of(tokens, head_dim, packed=True)
    assert case.batch * tokens == 65536 and case.heads * head_dim == 4096 and case.heads == 4 * case.kv_heads
    assert all(sum(row) == tokens for row in case.documents)
    lengths = [length for row in case.documents for length in row]
    assert 150 < sum(lengths) / len(lengths) < 600  # rows cut their last documents
    # At a petaflop a second no way takes less than `QUICK`, below which some ways are timed by another clock.
    assert tokens < 2048 or case.flop / 1e15 > QUICK / 2


def test_lengths_and_heads_are_those_that_are_promised() -> None:
    assert sorted(speed.TOKENS) == [2048, 4096, 8192, 16384, 32768]
    tuned = {(each.tokens, each.head_dim) for each in tune_attention.CASES}
    assert tuned >= {(tokens, head_dim) for tokens in speed.TOKENS for head_dim in (64, 128)}
    assert all(each.is_plain for each in tune_attention.CASES)
    assert MASK in attends(Case.of(8192, 64, packed=True), "cpu")
    assert MASK not in attends(Case.of(16384, 64, packed=True), "cpu")


def tuned(table: Path, **options: Any) -> int:
    cases = [SMALL, replace(SMALL, tokens=20)]
    return tune_attention.measure(cases, torch.bfloat16, table, "cpu", Host(), "a test", **options)


def test_tuned_calls_are_in_the_table_and_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.json"
    table.write_text("[]")
    assert tuned(table, end=0.0) == 2 and not AttentionMeasurement.read(table)
    assert tuned(table) == 0
    rows = AttentionMeasurement.read(table)
    assert {*rows} == {CallClass.of("interpreted", torch.bfloat16, 8, tokens) for tokens in (40, 20)}
    assert all(row.seconds > 0 and row.torch_seconds > 0 for row in rows.values())
    assert sum(map(len, faster_calls(rows).values())) == sum(row.seconds < row.torch_seconds for row in rows.values())
    monkeypatch.setattr(tune_attention, "timed", lambda *arguments: pytest.fail("it was measured again"))
    assert tuned(table) == 0


def test_tuning_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RuntimeError, match="there is no GPU to measure on"):
        tune_attention.tune(tmp_path / "table.json")
