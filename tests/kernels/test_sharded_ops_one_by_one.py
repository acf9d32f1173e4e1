"""Single ops on DTensors: other libraries' failures, mixed operands, ranks outside."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from weft import kernels
from weft.mesh import Layout, LayoutError, Partial, ProcessMesh
from weft.reshard import distribute, layout_of, reshard, to_global

from tests.kernels.cases import FOUR, GRID, TWO, assert_names_a_remedy, ints, normal, torch_cross_entropy, upstream_of
from tests.support.collectives import Collectives


def partial_bias():
    """Row-parallel: each rank has a part of the sum, and the bias is in it once."""
    x, weight, bias = normal(3, 8), normal(5, 8), normal(5)
    row = [distribute(x, Layout(FOUR, "tp: S(1)")), distribute(weight, Layout(FOUR, "tp: S(1)"))]
    b = distribute(bias, Layout(FOUR)).requires_grad_()
    output = kernels.linear(*row, b)
    assert layout_of(output) == Layout(FOUR, "tp: P(sum)")
    whole = reshard(output)
    torch.testing.assert_close(whole.to_local(), F.linear(x, weight, bias))
    whole.backward(distribute(upstream_of(whole.shape), Layout(FOUR)))
    assert layout_of(b.grad) == Layout(FOUR)
    torch.testing.assert_close(b.grad.to_local(), upstream_of(whole.shape).sum(0))
    try:
        kernels.linear(*row, distribute(bias, Layout(FOUR, "tp: P(sum)")))
    except LayoutError as error:
        return str(error)


def test_anchor_17_a_bias_on_a_partial_is_added_once(pool):
    for message in pool.run(partial_bias):
        assert "reshard the bias to (tp: R)" in message


def gradients_through_a_reduction():
    """Row-parallel, reduced, then used differently on each rank: every rank's part of the gradient comes back."""
    x, weight = normal(3, 8), normal(4, 8)
    a = distribute(x, Layout(TWO, "tp: S(1)")).requires_grad_()
    b = distribute(weight, Layout(TWO, "tp: S(1)"))
    c = distribute(normal(6, 4), Layout(TWO, "tp: S(0)"))
    inside = reshard(reshard(kernels.linear(a, b)))  # the second moves nothing forward, and reduces backward
    output = kernels.linear(inside, c)
    output.backward(distribute(upstream_of(output.shape), layout_of(output)))
    torch.testing.assert_close(to_global(a.grad), upstream_of(output.shape) @ normal(6, 4) @ weight)


def test_anchor_12_no_gradient_is_lost_behind_a_reduction(pool):
    pool.run(gradients_through_a_reduction, ranks=2)


def differentiated_twice():
    x, weight = distribute(normal(4, 8), Layout(TWO, "tp: S(0)")), distribute(normal(6, 8), Layout(TWO))
    output = kernels.linear(x.requires_grad_(), weight)
    (gradient,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
    try:
        gradient.backward(torch.ones_like(gradient))
    except RuntimeError as error:
        return str(error)


def test_a_second_derivative_is_refused(pool):
    for message in pool.run(differentiated_twice, ranks=2):
        assert "the ops of weft.kernels have no second derivative" in message


def data_parallel_loss(target):
    """The mean loss of the global batch, tokens cut over dp, and the gradient of the logits."""
    layout = Layout(FOUR, "tp: S(0)")
    logits = distribute(normal(*target.shape, 7), layout).requires_grad_()
    loss = reshard(kernels.cross_entropy(logits, distribute(target, layout)))
    loss.backward()
    return float(loss.to_local()), to_global(logits.grad)


@pytest.mark.parametrize("ignored", [0, 1, 3], ids=["none-ignored", "a-rank-all-ignored", "one-rank-left"])
def test_anchors_8_and_17_the_logged_loss_is_the_mean_over_all_tokens(pool, ignored):
    target = ints(7, 4, 3)
    target[:ignored] = -100
    logits = normal(4, 3, 7).requires_grad_()
    expected = torch_cross_entropy(logits, target, reduction="mean")
    expected.backward()
    for loss, grad in pool.run(data_parallel_loss, target):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(grad, logits.grad)


def mixed():
    """Plain tensors count as replicated, and their gradients are plain; a gradient that would be Partial is refused."""
    x, weight, bias = normal(3, 8), normal(6, 8), normal(6)
    sharded, row = distribute(x, Layout(TWO, "tp: S(0)")), distribute(weight, Layout(TWO, "tp: S(0)"))
    torch.testing.assert_close(to_global(kernels.linear(sharded, weight, bias)), F.linear(x, weight, bias))
    torch.testing.assert_close(to_global(kernels.linear(x, row)), F.linear(x, weight))

    leaf = weight.clone().requires_grad_()
    output = kernels.linear(distribute(x, Layout(TWO)), leaf, distribute(bias, Layout(TWO)))
    output.backward(distribute(upstream_of(output.shape), Layout(TWO)))
    assert type(leaf.grad) is Tensor
    torch.testing.assert_close(leaf.grad, upstream_of(output.shape).T @ x)

    messages = []
    for tensors in ((sharded, leaf), (x.clone().requires_grad_(), row)):
        output = kernels.linear(*tensors)
        with pytest.raises(LayoutError) as caught:
            output.backward(distribute(upstream_of(output.shape), layout_of(output)))
        messages.append(str(caught.value))
    assert output.grad_fn is not None
    return messages


def test_plain_tensors_beside_dtensors(pool):
    for first, second in pool.run(mixed, ranks=2):
        assert "linear: a plain tensor of shape (6, 8)" in first
        assert "(tp: P(sum)), which only a DTensor can have; make the tensor a DTensor with distribute()" in first
        assert "linear: a plain tensor of shape (3, 8)" in second


def two_meshes():
    """Operands on two meshes, of the same sizes even."""
    other = TWO.rename(tp="dp")
    x, H = normal(3, 4), normal(4)
    messages = []
    for op, tensors in (
        (kernels.linear, (x, normal(5, 4))),
        (kernels.rms_norm, (x, H)),
        (partial(kernels.rms_norm, head_dim=2), (x, normal(2))),
        (kernels.layer_norm, (x, H, H)),
        (kernels.rope, (x, normal(3, 2), normal(3, 2))),
        (kernels.add, (x, x)),
        (kernels.add, (x, H)),
        (kernels.swiglu, (x, x)),
        (partial(kernels.attention, head_dim=2), (x, x, x)),
        (kernels.embedding, (ints(3, 2), x)),
        (kernels.cross_entropy, (x, ints(4, 3))),
    ):
        first, *rest = tensors
        with pytest.raises(LayoutError) as caught:
            op(distribute(first, Layout(TWO)), *(distribute(tensor, Layout(other)) for tensor in rest))
        messages.append(str(caught.value))
    return messages


def test_operands_on_two_meshes_are_refused(pool):
    for messages in pool.run(two_meshes, ranks=2):
        for message in messages:
            assert_names_a_remedy(message)


def cut_heads():
    """Two key heads over four ranks."""
    layout = Layout(FOUR, "tp: S(2)")
    query, key = distribute(normal(1, 3, 16), layout), distribute(normal(1, 3, 8), layout)
    cos, sin = normal(3, 2), normal(3, 2)
    messages = []
    for function in (
        lambda: kernels.attention(query, key, key, head_dim=4),
        lambda: kernels.rope(key, cos, sin),
        lambda: kernels.rms_norm(key, normal(4), head_dim=4),
    ):
        with pytest.raises(LayoutError) as caught:
            function()
        messages.append(str(caught.value))
    return messages


def test_a_head_is_never_cut_and_the_sizes_that_work_are_named(pool):
    for attention, rope, norm in pool.run(cut_heads):
        assert attention == "attention: " + rope.removeprefix("rope: ")
        assert norm == "rms_norm: " + rope.removeprefix("rope: ")
        assert "2 heads of 4" in rope and "sizes that work: 1, 2" in rope


def norms_of_heads():
    """Each rank has two of the four heads, and the whole weight, whose gradient is Partial."""
    x, weight, grad = normal(3, 16), normal(4), upstream_of((3, 16))
    heads = distribute(x, Layout(TWO, "tp: S(1)")).requires_grad_()
    whole = distribute(weight, Layout(TWO)).requires_grad_()
    with Collectives() as seen:
        kernels.rms_norm(heads, whole, head_dim=4).backward(distribute(grad, Layout(TWO, "tp: S(1)")))
    assert seen.kinds == []
    plain = weight.clone().requires_grad_()
    F.rms_norm(x.unflatten(-1, (4, 4)), (4,), plain, 1e-6).backward(grad.unflatten(-1, (4, 4)))
    torch.testing.assert_close(to_global(whole.grad), plain.grad)
    return str(layout_of(whole.grad)), whole.grad.to_local(), plain.grad


def test_anchor_22_a_norm_of_sharded_heads_has_a_partial_gradient_of_its_weight(pool):
    by_rank = pool.run(norms_of_heads, ranks=2)
    assert [layout for layout, _, _ in by_rank] == ["tp: P(sum)"] * 2
    torch.testing.assert_close(by_rank[0][1] + by_rank[1][1], by_rank[0][2])
    assert not torch.allclose(by_rank[0][1], by_rank[0][2])


def learned_positions():
    """GPT-2's sum of the rows of tokens and of their places, tokens sharded over dp and places over cp."""
    mesh = ProcessMesh.grid(dp=2, cp=2)
    tokens, table, places = ints(7, 4, 6), normal(7, 3), normal(8, 3)
    positions = torch.tensor([0, 5, 1, 4, 2, 3])  # in the order in which cp distributes them
    laid = distribute(places, Layout(mesh)).requires_grad_()
    with Collectives() as seen:
        rows = kernels.embedding(
            distribute(tokens, Layout(mesh, "dp: S(0), cp: S(1)")), distribute(table, Layout(mesh))
        )
        output = kernels.add(rows, kernels.embedding(distribute(positions, Layout(mesh, "cp: S(0)")), laid))
        output.backward(distribute(upstream_of(output.shape), layout_of(output)))
    assert seen.kinds == []
    plain = places.clone().requires_grad_()
    expected = F.embedding(tokens, table) + F.embedding(positions, plain)
    expected.backward(upstream_of(expected.shape))
    assert str(layout_of(laid.grad)) == "dp: P(sum), cp: P(sum)"
    torch.testing.assert_close(to_global(output), expected)
    torch.testing.assert_close(to_global(laid.grad), plain.grad)


def test_the_table_of_learned_positions_has_a_partial_gradient_over_context(pool):
    pool.run(learned_positions)


def tables_of_positions():
    """The same results as torch's, for positions in any layout."""
    positions, frequencies = ints(9, 4, 5), torch.tensor([1.0, 0.3])
    angles = positions.unsqueeze(-1) * frequencies
    for text in ("", "tp: S(0)", "dp: S(0), tp: S(1)"):
        layout = Layout(GRID, text)
        for scale in (1.0, 1.25):
            tables = kernels.rope_tables(distribute(positions, layout), frequencies, scale=scale)
            for table, wanted in zip(tables, (angles.cos() * scale, angles.sin() * scale), strict=True):
                assert layout_of(table) == layout
                assert torch.equal(to_global(table), wanted)
    with pytest.raises(LayoutError) as caught:
        kernels.rope_tables(distribute(positions, Layout(GRID, "tp: P(sum)")), frequencies)
    return str(caught.value)


def test_tables_of_positions_lie_as_the_positions(pool):
    for message in pool.run(tables_of_positions):
        assert_names_a_remedy(message)


def minor_axis_first():
    """Tokens cut by tp first, then dp, beside tensors on the same mesh."""
    x, weight = normal(7, 3), normal(4, 3)
    a = distribute(x, Layout(GRID, "tp: S(0), dp: S(0)")).requires_grad_()
    b = distribute(weight, Layout(GRID)).requires_grad_()
    output = kernels.linear(a, b)
    torch.testing.assert_close(to_global(output), F.linear(x, weight))
    output.backward(distribute(upstream_of(output.shape), layout_of(output)))
    torch.testing.assert_close(to_global(a.grad), upstream_of(output.shape) @ weight)
    torch.testing.assert_close(to_global(b.grad), upstream_of(output.shape).T @ x)
    classes = normal(2, 7)
    target = torch.tensor([3, 6])
    logits = distribute(classes, Layout(GRID, "tp: S(1), dp: S(1)"))
    loss = kernels.cross_entropy(logits, distribute(target, Layout(GRID)))
    torch.testing.assert_close(to_global(loss), F.cross_entropy(classes, target))


def test_a_shard_order_with_the_minor_axis_first(pool):
    pool.run(minor_axis_first)


OUTSIDE = {
    "linear": (kernels.linear, (normal(2, 4), normal(6, 4), normal(6)), ("tp: S(1)", "tp: S(1)", "")),
    "linear-plain-bias": (kernels.linear, (normal(2, 4), normal(6, 4), normal(6)), ("", "", None)),
    "embedding": (kernels.embedding, (ints(5, 2), normal(5, 4)), ("", "tp: S(0)")),
    "embedding-positions": (kernels.embedding, (ints(5, 3), normal(5, 4)), ("tp: S(0)", "")),
    "rms_norm": (kernels.rms_norm, (normal(2, 4), normal(4)), ("tp: S(0)", "")),
    "rms_norm-heads": (partial(kernels.rms_norm, head_dim=2), (normal(2, 4), normal(2)), ("tp: S(1)", "")),
    "layer_norm": (kernels.layer_norm, (normal(2, 4), normal(4), normal(4)), ("tp: S(0)", "", "")),
    "gelu": (kernels.gelu, (normal(2, 4),), ("tp: S(1)",)),
    "add-repeated": (kernels.add, (normal(2, 4), normal(4)), ("tp: S(0)", "")),
    "rope": (kernels.rope, (normal(2, 3, 8), normal(3, 2), normal(3, 2)), ("tp: S(2)", None, None)),
    "attention": (
        partial(kernels.attention, head_dim=2),
        (normal(1, 3, 8), normal(1, 3, 4), normal(1, 3, 4)),
        ("tp: S(2)",) * 3,
    ),
    "swiglu": (kernels.swiglu, (normal(2, 4), normal(2, 4)), ("tp: S(1)",) * 2),
    "add": (kernels.add, (normal(2, 4), normal(2, 4)), ("tp: P(sum)",) * 2),
    "dropout": (partial(kernels.dropout, p=0.25, key=7), (normal(2, 4),), ("tp: S(0)",)),
    "cross_entropy": (
        kernels.cross_entropy,
        (normal(4, 5).bfloat16(), torch.tensor([1, 4, -100, 0])),
        ("tp: S(1)", ""),
    ),
    "linear_cross_entropy": (
        kernels.linear_cross_entropy,
        (normal(4, 3).bfloat16(), normal(5, 3).bfloat16(), torch.tensor([1, 4, -100, 0])),
        ("", "tp: S(0)", ""),
    ),
    "cross_entropy-tokens": (kernels.cross_entropy, (normal(4, 5).bfloat16(), ints(5, 4)), ("tp: S(0)", "tp: S(0)")),
}


def with_a_rank_outside(name):
    """Metadata and local sizes of the output and the gradients, and this rank's communication."""
    op, wholes, placements = OUTSIDE[name]
    mesh = ProcessMesh([0, 2], ["tp"])
    tensors = [
        tensor.clone() if text is None else distribute(tensor, Layout(mesh, text))
        for tensor, text in zip(wholes, placements, strict=True)
    ]
    wanted = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point() and name != "rope"]
    if name == "rope":
        wanted = [tensors[0].requires_grad_()]
    with Collectives() as seen:
        output = op(*tensors)
        layout = layout_of(output)
        whole_there = layout.replace(**{a: "R" for a in mesh.axis_names if isinstance(layout[a], Partial)})
        output.backward(distribute(torch.ones(output.shape, dtype=output.dtype), whole_there))
    grads = [tensor.grad for tensor in wanted]
    described = [
        (tuple(t.shape), t.dtype, str(layout_of(t)), str(t.device)) for t in (output, *grads) if isinstance(t, DTensor)
    ]
    held = [t.to_local().numel() if isinstance(t, DTensor) else t for t in (output, *grads)]
    return described, held, seen.kinds


@pytest.mark.parametrize("name", OUTSIDE)
def test_paddle_58126_a_rank_outside_the_mesh_knows_all_and_does_nothing(pool, name):
    first, outside, last = pool.run(with_a_rank_outside, name, ranks=3)
    assert first[0] == outside[0] == last[0]
    assert all(held == 0 or held is None for held in outside[1])
    assert outside[2] == []
    assert all(isinstance(held, Tensor) or held > 0 for held in (*first[1], *last[1]))


def in_two_worlds(store):
    """Vocab-parallel, before and after the processes have left their groups and changed places in new ones."""
    losses = []
    for world in range(2):
        if world:
            rank = 1 - dist.get_rank()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        logits, target = distribute(normal(3, 8), Layout(TWO, "tp: S(1)")), distribute(ints(8, 3), Layout(TWO))
        losses.append(kernels.cross_entropy(logits, target).to_local())
    return losses


def test_an_ops_groups_are_of_this_world(pool, tmp_path):
    expected = F.cross_entropy(normal(3, 8), ints(8, 3))
    for losses in pool.run(in_two_worlds, str(tmp_path / "store"), ranks=2):
        for loss in losses:
            torch.testing.assert_close(loss, expected)
