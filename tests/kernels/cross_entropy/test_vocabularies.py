"""Cross-entropy of sharded logits, over vocabularies that do not divide: values, gathers, and the count of tokens."""

import math

import pytest
import torch
import torch.distributed as dist
from weft import kernels
from weft.mesh import Layout, ProcessMesh
from weft.reshard import distribute, layout_of

from tests.kernels.cases import FOUR, GRID, TWO, ints, normal, told, torch_cross_entropy, upstream_of, whole
from tests.support.collectives import Collectives

CUBE = ProcessMesh.grid(dp=2, cp=2, tp=2)


def vocab_parallel(mesh, placements, classes, tokens, dtype):
    """The loss and the gradient of the logits, whole, and the bytes of the gathers."""
    layout = Layout(mesh, placements)
    logits = normal(*tokens, classes).to(dtype)
    target = ints(classes, *tokens)
    rows = layout.replace(**dict.fromkeys(layout.shard_order.get(len(tokens), ()), "R"))
    x = distribute(logits, layout).requires_grad_()
    wanted = distribute(target, rows)
    with Collectives() as gathers:
        loss = kernels.cross_entropy(x, wanted, reduction="none")
    assert set(gathers.kinds) == {"all-gather"}
    with Collectives() as seen:
        loss.backward(distribute(upstream_of(loss.shape).float(), layout_of(loss)))
    assert seen.kinds == []
    return told(loss), told(x.grad.float()), gathers.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mesh, placements",
    [
        pytest.param(TWO, "tp: S(2)", id="2"),
        pytest.param(FOUR, "tp: S(2)", id="4"),
        pytest.param(GRID, "dp: S(0), tp: S(2)", id="2x2-tokens-and-vocabulary"),
        pytest.param(GRID, "dp: S(2), tp: S(2)", id="2x2-both-on-the-vocabulary"),
        pytest.param(CUBE, "cp: S(2), tp: S(2), dp: S(0)", id="2x2x2-two-of-three-on-the-vocabulary"),
    ],
)
@pytest.mark.parametrize("classes", [1, 5, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_vocab_parallel_loss_gathers_12_bytes_per_token_and_rank_once(pool, mesh, placements, classes, dtype):
    tokens, layout = (4, 3), Layout(mesh, placements)
    logits = normal(*tokens, classes).to(dtype).double().requires_grad_()
    expected = torch_cross_entropy(logits, ints(classes, *tokens), reduction="none")
    expected.backward(upstream_of(expected.shape))
    results = pool.run(vocab_parallel, mesh, placements, classes, tokens, dtype, ranks=mesh.size)
    loss = whole([result[0] for result in results], mesh, expected.shape)  # bitwise equal over the replicas
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-5, rtol=1e-5)
    grad = whole([result[1] for result in results], mesh, logits.shape)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(grad.double(), logits.grad, **near)
    for rank, (_, _, nbytes) in enumerate(results):
        assert nbytes == [12 * math.prod(layout.local_shape(logits.shape, rank)[:-1]) * (layout.parts(2) - 1)]


def on_part_of_the_world(placements, classes):
    """`vocab_parallel` on the first four ranks; the rest do nothing."""
    if dist.get_rank() >= GRID.size:
        return None
    return vocab_parallel(GRID, placements, classes, (4, 3), torch.float32)


def test_ranks_outside_of_the_mesh_need_not_call_where_two_axes_shard_the_vocabulary(pool):
    """A single gather runs over both axes, as on the whole world."""
    expected = torch_cross_entropy(normal(4, 3, 5), ints(5, 4, 3), reduction="none")
    *results, _ = pool.run(on_part_of_the_world, "dp: S(2), tp: S(2)", 5, ranks=5)
    loss = whole([result[0] for result in results], GRID, expected.shape)
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    assert [nbytes for _, _, nbytes in results] == [[12 * 12 * 3]] * 4


def mean(mesh):
    """The mean over tokens sharded on two axes, and its communication; ranks outside the mesh do not call."""
    if dist.get_rank() >= mesh.size:
        return None
    logits, target = normal(4, 3, 5), torch.where(ints(3, 4, 3) == 0, -100, ints(5, 4, 3))
    on_tokens = Layout(mesh, "dp: S(0), tp: S(1)")
    x, y = distribute(logits, on_tokens), distribute(target, on_tokens)
    with Collectives() as seen:
        loss = kernels.cross_entropy(x, y)
    return told(loss), seen.kinds


@pytest.mark.parametrize("ranks", [pytest.param(4, id="the-world"), pytest.param(5, id="part-of-it")])
def test_tokens_on_two_axes_are_counted_at_once(pool, ranks):
    target = torch.where(ints(3, 4, 3) == 0, -100, ints(5, 4, 3))
    results = pool.run(mean, GRID, ranks=ranks)[:4]
    loss = whole([result[0] for result in results], GRID, ())
    torch.testing.assert_close(loss, torch_cross_entropy(normal(4, 3, 5), target, reduction="mean"))
    assert [seen for _, seen in results] == [["all-reduce"]] * 4
