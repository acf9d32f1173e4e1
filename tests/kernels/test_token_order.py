"""Tokens stored in another order than reading order, and tensors exchanged together: plain and on meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from weft.kernels import attention, dropout
from weft.kernels.dispatch.token_order import as_laid, as_read
from weft.kernels.plain import pack, unpack
from weft.mesh import Layout, LayoutError
from weft.reshard import distribute, layout_of, to_global

from tests.kernels.attention.test_op import LAYOUTS, OPTIONS, B, D, attend, op, operands, split, with_gradients
from tests.kernels.cases import FOUR, GRID, TWO, normal, upstream_of
from tests.support.pool import Pool

ORDER = ((5, 7), (0, 1), (3, 5), (3, 3), (1, 3))
LYING = torch.tensor([5, 6, 0, 3, 4, 1, 2])  # the token of each place


def laid(x: Tensor) -> Tensor:
    return x if x.ndim == 1 or x.shape[-1] == 7 else x.index_select(-2, LYING)


def laid_options(options: dict[str, Any]) -> dict[str, Any]:
    more = {"documents": options["documents"][:, LYING]} if "documents" in options else {}
    return {**options, **more, "order": ORDER}


def wanted(options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of the scores written out, in the order in which the tokens lie."""
    upstream = torch.empty(B, 7, 8, dtype=torch.float64)
    upstream[:, LYING] = upstream_of(upstream.shape)
    options, sinks = split(options)
    leaves = [tensor.clone().requires_grad_() for tensor in operands(7, 7, B, sinks=sinks)]
    output = attend(*leaves, head_dim=D, **options)
    return [laid(x.detach()) for x in (output, *torch.autograd.grad(output, leaves, upstream))]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_counts_tokens_as_they_are_read(options: dict[str, Any]) -> None:
    asked, sinks = split(options)
    given = [laid(tensor) for tensor in operands(7, 7, B, sinks=sinks)]
    found = with_gradients(partial(op, **laid_options(asked)), given)
    for one, other in zip(found, wanted(options), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def attention_on_mesh(name: str) -> None:
    mesh, *layouts = LAYOUTS[name]
    query, keys, documents, of_sinks = (Layout(mesh, text) for text in layouts)
    for options in OPTIONS.values():
        asked, sinks = split(options)
        placed = laid_options(asked)
        if "documents" in placed:
            placed["documents"] = distribute(placed["documents"], documents)
        tensors, layouts_of = operands(7, 7, B, sinks=sinks), (query, keys, keys, of_sinks)
        given = [distribute(laid(x), to) for x, to in zip(tensors, layouts_of, strict=False)]
        leaves = [tensor.requires_grad_() for tensor in given]
        output = op(*leaves, **placed)
        upstream = distribute(upstream_of(output.shape), layout_of(output))
        for one, other in zip([output, *torch.autograd.grad(output, leaves, upstream)], wanted(options), strict=True):
            assert isinstance(one, DTensor)
            torch.testing.assert_close(to_global(one.detach()), other, atol=1e-12, rtol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["queries-by-four", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("rows", "queries", "heads"))]
)
def test_on_a_mesh_each_rank_has_the_runs_of_its_own_queries(name: str, pool: Pool) -> None:
    pool.run(attention_on_mesh, name, ranks=LAYOUTS[name][0].size)


def dropout_on_mesh() -> list[Tensor]:
    x, outputs = normal(2, 7, 5), []
    for text in ("dp: S(1)", "dp: S(1), tp: S(1)", "dp: S(0), tp: S(2)", "dp: S(1), tp: P(sum)"):
        on = distribute(laid(x), Layout(GRID, text)).requires_grad_()
        y = dropout(on, 0.4, 11, "name", order=ORDER)
        assert layout_of(y) == layout_of(on)
        (gradient,) = torch.autograd.grad(
            y, on, distribute(laid(upstream_of(x.shape)), Layout(GRID, text.replace("P(sum)", "R")))
        )
        outputs += [to_global(y.detach()), to_global(gradient)]
    return outputs


def test_dropout_draws_its_mask_for_tokens_as_they_are_read(pool: Pool) -> None:
    x = normal(2, 7, 5).requires_grad_()
    y = dropout(x, 0.4, 11, "name")
    expected = [laid(y.detach()), laid(torch.autograd.grad(y, x, upstream_of(x.shape))[0])]
    found = dropout(laid(x.detach()), 0.4, 11, "name", order=ORDER)
    assert torch.equal(found, expected[0])
    for outputs in pool.run(dropout_on_mesh, ranks=4):
        for one, other in zip(outputs, expected * 4, strict=True):
            assert torch.equal(one, other)


def test_the_mask_that_fused_attention_knows_is_that_of_the_last_queries() -> None:
    """On a GPU fused attention's own mask replaces the explicit mask of a CPU."""
    q, k, v = operands(3, 7, B)
    heads = [x.unflatten(-1, (-1, D)).transpose(1, 2) for x in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=causal_lower_right(3, 7), enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, head_dim=D), mixed.transpose(1, 2).flatten(-2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_of_queries_on_a_gpu(dtype: torch.dtype) -> None:
    """Forward and backward, grouped queries, heads of 64: no mask is made, and the error is at most twice a CPU's."""
    given = [normal(2, 7 * 32, width).to(dtype) for width in (4 * 64, 2 * 64, 2 * 64)]
    order = [(32 * start, 32 * stop) for start, stop in ORDER]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.requires_grad_() for tensor in tensors]
        output = attention(*leaves, head_dim=64, order=order)
        upstream = upstream_of(output.shape).to(dtype).to(output)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]

    truth, usual, found = run([x.double() for x in given]), run(given), run([x.cuda() for x in given])
    for exact, one, other in zip(truth, usual, found, strict=True):
        allowed = 2 * (one.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (other.double().cpu() - exact).abs().max() <= allowed


def test_as_read_and_as_laid_are_each_others_reverse() -> None:
    x = normal(2, 7, 3)
    assert torch.equal(as_laid(x, ORDER, 1), x[:, LYING])
    assert torch.equal(as_read(x[:, LYING], ORDER, 1), x)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        pytest.param(
            lambda q: attention(q, q, q, head_dim=D, order=[(0, 3)]),
            r"order is \[\(0, 3\)\], but the tokens are 0 to 7",
            id="some",
        ),
        pytest.param(
            lambda q: attention(q, q, q, head_dim=D, order=[(0, 4), (3, 7)]), "with each token once", id="twice"
        ),
        pytest.param(
            lambda q: attention(q[:, :3], q, q, head_dim=D, order=ORDER), "3 queries and 7 keys", id="fewer-queries"
        ),
        pytest.param(lambda q: dropout(q, 0.5, 1, order=[(7, 0)]), "dropout: order is", id="backwards"),
    ],
)  # fmt: skip
def test_an_order_that_is_none_is_named(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(normal(2, 7, 4))


# Tensors exchanged together


PACKED = {"two": ((4, 8), 2), "three-by-four": ((16, 8, 8), 4), "one-part": ((3, 5), 1)}


@pytest.mark.parametrize(("widths", "parts"), PACKED.values(), ids=PACKED)
def test_packed_tensors_are_side_by_side_in_each_part(widths: tuple[int, ...], parts: int) -> None:
    tensors = [normal(2, 3, width, seed=i) for i, width in enumerate(widths)]
    packed = pack(*tensors, parts=parts)
    for part in range(parts):
        assert torch.equal(packed[:, :, part], torch.cat([x.chunk(parts, -1)[part] for x in tensors], -1))
    for one, other in zip(unpack(packed, [width // parts for width in widths]), tensors, strict=True):
        assert torch.equal(one, other)


def packed_on_mesh() -> None:
    for layout in (Layout(TWO, "tp: S(2)"), Layout(TWO, "tp: S(1)"), Layout(TWO, "tp: P(sum)")):
        tensors = [normal(2, 3, width, seed=width) for width in (8, 4)]
        leaves = [distribute(x, layout).requires_grad_() for x in tensors]
        packed = pack(*leaves, parts=2)
        assert layout_of(packed) == layout
        assert torch.equal(to_global(packed.detach()), pack(*tensors, parts=2))
        first, second = unpack(packed, (4, 2))
        assert torch.equal(to_global(second.detach()), tensors[1])
        upstream = normal(2, 3, 8, seed=5)
        gradients = torch.autograd.grad(
            first, leaves, distribute(upstream, Layout(TWO, str(layout).replace("P(sum)", "R")))
        )
        assert torch.equal(to_global(gradients[0]), upstream)
        assert not to_global(gradients[1]).any()  # the other's


def badly_packed() -> None:
    with pytest.raises(LayoutError, match=r"2 parts .* cut into 4 shards; give a multiple of 4"):
        pack(distribute(normal(2, 3, 8), Layout(FOUR, "tp: S(2)")), parts=2)
    with pytest.raises(LayoutError, match="the 4 parts, must be cut evenly"):
        unpack(distribute(normal(2, 3, 4, 4), Layout(FOUR, "tp: S(3)")), (2, 2))


def test_packed_on_a_mesh_they_lie_as_they_did(pool: Pool) -> None:
    pool.run(packed_on_mesh, ranks=2)
    pool.run(badly_packed, ranks=4)


def test_tensors_that_cannot_be_packed_are_named() -> None:
    with pytest.raises(ValueError, match=r"a multiple of 2 above 0, .* got \(2, 3\), \(2, 4\)"):
        pack(normal(2, 3), normal(2, 4), parts=2)
    with pytest.raises(ValueError, match=r"the widths \(1, 2\) sum to 3, the last dim of \(2, 2, 4\) is 4"):
        unpack(normal(2, 2, 4), (1, 2))
