"""A user's own autograd function on local tensors, which declares its layouts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard
from weft.kernels import on_local_tensors
from weft.mesh import Layout, LayoutError, ProcessMesh, Shard
from weft.reshard import GradientSync, distribute, layout_of, reshard, to_global

from tests.support.collectives import Collectives


class Gate(torch.autograd.Function):
    """relu(x)**2 * scale, with a backward of its own. x [..., H], scale [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        assert type(x) is Tensor
        ctx.save_for_backward(x, scale)
        return x.relu().square() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * 2 * x.relu() * scale, (grad * x.relu().square()).flatten(0, -2).sum(0)


OVER = {"dp": "S(0)", "tp": "S(-1)"}


@on_local_tensors(in_layouts={"x": OVER, "scale": {"tp": TorchShard(0)}}, out_layouts=OVER)
def gate(x: Tensor, scale: Tensor, power: int = 1) -> Tensor:
    """The user's own words."""
    return Gate.apply(x, scale) ** power


@on_local_tensors(
    in_layouts=[{"tp": "S(1)"}, {"tp": "S(1)"}], out_layouts={"tp": "P"}, out_shapes=lambda x, w: (x[0], w[0])
)
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


@on_local_tensors(in_layouts={"x": {"tp": Shard(-1)}}, out_layouts=[{"tp": "S(-1)"}, {"tp": "S(-1)"}])
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), torch.stack([x, x * x])


@on_local_tensors(in_layouts={"x": OVER}, out_layouts=OVER, reshard_inputs=True)
def bringing(x: Tensor) -> Tensor:
    return x.exp()


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((3, 5, 7), (7,), (3, 5, 7))  # nothing divides evenly
    x, scale, grad = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return x, scale, grad


def on_a_mesh(mesh: ProcessMesh, layout: str, scale_layout: str) -> None:
    x, scale, grad = tensors()
    alone = [x.clone().requires_grad_(), scale.clone().requires_grad_()]
    expected = gate(*alone, power=2)
    expected.backward(grad)
    dx = distribute(x, Layout(mesh, layout)).requires_grad_()
    module = torch.nn.Module()
    module.scale = torch.nn.Parameter(distribute(scale, Layout(mesh, scale_layout)))
    sync = GradientSync(module)
    with Collectives() as seen:
        y = gate(dx, scale=module.scale, power=2)
        y.backward(distribute(grad, layout_of(y)))
    assert seen.kinds == []
    sync.wait()
    assert layout_of(y) == layout_of(dx) == layout_of(dx.grad)
    torch.testing.assert_close(to_global(y), expected)
    torch.testing.assert_close(to_global(dx.grad), alone[0].grad)
    torch.testing.assert_close(to_global(module.scale.grad), alone[1].grad)


def test_paddlenlp_9412_a_users_autograd_function_takes_part_by_declaring_its_layouts(pool) -> None:
    grid = ProcessMesh.grid(dp=2, tp=2)
    pool.run(on_a_mesh, grid, "dp: S(0), tp: S(2)", "tp: S(0)")
    pool.run(on_a_mesh, ProcessMesh.grid(dp=4), "dp: S(0)", "")  # an axis that the mesh has not
    fine = ProcessMesh.grid(tp_heads=2, tp_copies=2)  # tp is meant by its parts
    pool.run(on_a_mesh, fine, "tp_heads: S(2), tp_copies: S(2)", "tp_heads: S(0), tp_copies: S(0)")


def more() -> None:
    mesh = ProcessMesh.grid(tp=2)
    x, _, _ = tensors()
    x = x[0]  # [5, 7]
    w = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    laid = [distribute(each, Layout(mesh, "tp: S(1)")).requires_grad_() for each in (x, w)]
    (product(*alone) * 2).sum().backward()
    y = product(*laid)
    assert str(layout_of(y)) == "tp: P(sum)"
    y = reshard(y)
    y.backward(distribute(torch.full((5, 4), 2.0, dtype=torch.float64), layout_of(y)))
    for ours, theirs in zip(laid, alone, strict=True):
        torch.testing.assert_close(to_global(ours.grad), theirs.grad)

    alone, dx = [x.clone().requires_grad_()], laid[0].detach().requires_grad_()
    for a, b in zip(halves(*alone), halves(dx), strict=True):
        torch.testing.assert_close(to_global(b), a)
    halves(*alone)[1].sum().backward()  # of two outputs one has no gradient
    second = halves(dx)[1]
    second.backward(distribute(torch.ones_like(second.to_local().new_empty(2, 5, 7)), layout_of(second)))
    torch.testing.assert_close(to_global(dx.grad), alone[0].grad)

    with torch.no_grad():
        torch.testing.assert_close(to_global(halves(dx)[0]), x.sin())
        thin = distribute(x, Layout(ProcessMesh.grid(dp=1, tp=2), "tp: S(1)"))  # an axis of size 1 does nothing
        torch.testing.assert_close(
            to_global(gate(thin, distribute(w[0], Layout(thin.device_mesh, "tp: S(0)")))), gate(x, w[0])
        )
    whole = distribute(x, Layout(mesh)).requires_grad_()
    brought = bringing(whole)
    assert str(layout_of(brought)) == "tp: S(1)"
    brought.backward(distribute(x, layout_of(brought)))
    torch.testing.assert_close(to_global(whole.grad), x * x.exp())


def test_products_that_are_sums_several_outputs_and_inputs_that_are_brought(pool) -> None:
    pool.run(more, ranks=2)


class SummedScale(torch.autograd.Function):
    """x * scale for a rank's rows of x, with a backward that sums the gradient of scale over all ranks by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        of_scale = (grad * x).flatten(0, -2).sum(0)
        dist.all_reduce(of_scale)
        return grad * scale, of_scale


def summed(declared: dict[str, Any]) -> tuple[str, bool]:
    """The layout of scale's gradient, and whether the numbers are those of a single process."""
    mesh = ProcessMesh.grid(dp=2)
    x, scale, grad = tensors()
    call = on_local_tensors(in_layouts={"x": {"dp": "S(0)"}, "scale": {}}, out_layouts={"dp": "S(0)"}, **declared)(
        lambda x, scale: SummedScale.apply(x, scale)
    )
    laid = distribute(x, Layout(mesh, "dp: S(0)")), distribute(scale, Layout(mesh)).requires_grad_()
    y = call(*laid)
    y.backward(distribute(grad, layout_of(y)))
    found = laid[1].grad
    return str(layout_of(found)), torch.allclose(to_global(found), (grad * x).flatten(0, -2).sum(0))


def test_a_declared_gradient_of_a_function_that_sums_by_itself_is_not_summed_again(pool) -> None:
    declared = {"grad_layouts": {"scale": {"dp": "R"}}}
    assert pool.run(summed, declared, ranks=2) == [("dp: R", True)] * 2
    # The derived layout: each rank's output is taken for an addend.
    assert pool.run(summed, {}, ranks=2) == [("dp: P(sum)", False)] * 2


def outside() -> None:
    mesh = ProcessMesh.grid(tp=2, first_rank=2)
    x = distribute(tensors()[0], Layout(mesh, "tp: S(2)")).requires_grad_()
    scale = distribute(tensors()[1], Layout(mesh, "tp: S(0)"))
    y = gate(x, scale)
    assert y.shape == x.shape and y.dtype == torch.float64 and layout_of(y) == layout_of(x)
    y.backward(distribute(tensors()[2], layout_of(y)))
    assert x.grad.shape == x.shape


def test_ranks_outside_the_mesh_know_the_shape(pool) -> None:
    pool.run(outside)


def refused() -> list[str]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    x, scale, _ = tensors()
    laid = distribute(x, Layout(mesh, "dp: S(0)")), distribute(scale, Layout(mesh, "tp: S(0)"))
    messages = []
    undeclared = on_local_tensors(in_layouts={"x": OVER}, out_layouts=OVER)(lambda x, scale: x * scale)
    shrinking = on_local_tensors(in_layouts={"x": {"dp": "S(0)"}}, out_layouts={"dp": "S(0)"}, out_shapes=lambda x: x)(
        lambda x: x[:, :2]
    )
    hostless = on_local_tensors(in_layouts={"x": {"dp": "S(0)"}}, out_layouts={"dp": "S(0)"})(
        lambda x: torch.from_numpy(x.numpy() * 2)
    )
    one = on_local_tensors(in_layouts={"x": {"dp": "S(0)"}}, out_layouts={"dp": "S(0)"})(lambda x: (x, x))
    for call in (
        lambda: gate(*laid),
        lambda: undeclared(*laid),
        lambda: shrinking(laid[0]),
        lambda: hostless(laid[0]),
        lambda: one(laid[0]),
    ):
        with pytest.raises((LayoutError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_a_layout_that_does_not_fit_is_refused_and_the_reshard_named(pool) -> None:
    for messages in pool.run(refused):
        assert re.search(
            r"gate: 'x' has layout \(dp: S\(0\), tp: R\).*reshard\(x, placements='dp: S\(0\), tp: S\(2\)'\)",
            messages[0],
        )
        assert "a DTensor as 'scale', which in_layouts does not declare" in messages[1]
        assert re.search(r"returned \(\d, 2, 7\) as output 0 on this rank.*it must have \(\d, 5, 7\)", messages[2])
        assert "give on_local_tensors out_shapes=" in messages[3]
        assert "out_layouts declares 1 tensor" in messages[4]


@on_local_tensors(in_layouts={"x": OVER, "scale": {"tp": "S(0)"}}, out_layouts=OVER, reshard_inputs=True)
def bringing_both(x: Tensor, scale: Tensor, *more: Tensor) -> Tensor:
    return x * scale


@on_local_tensors(in_layouts={"x": {"dp": "S(0)"}, "scale": {}}, out_layouts={"dp": "S(0)"}, reshard_inputs=True)
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def plain_tensors_beside() -> list[str]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    x, scale, _ = tensors()
    dx, dscale = distribute(x, Layout(mesh, "dp: S(0), tp: S(2)")), distribute(scale, Layout(mesh, "tp: S(0)"))
    messages = []
    for call in (
        lambda: bringing_both(dx, scale),
        lambda: bringing_both(x, dscale),
        lambda: bringing_both(scale=scale, x=dx),
        lambda: gate(dx, scale),
    ):
        with pytest.raises(LayoutError) as caught:
            call()
        messages.append(str(caught.value))
    # The remedy that the error names is accepted.
    named = bringing_both(dx, distribute(scale, Layout(mesh, "tp: S(0)")))
    torch.testing.assert_close(to_global(named), x * scale)
    part = DTensor.from_local(dscale.to_local(), dscale.device_mesh, dscale.placements, shape=(7,), stride=(1,))
    torch.testing.assert_close(to_global(bringing_both(dx, part)), x * scale)
    torch.testing.assert_close(to_global(scaled(dx, scale)), x * scale)  # declared as replicated
    thin = distribute(x, Layout(ProcessMesh.grid(dp=2, tp=1, first_rank=0), "dp: S(0)"))
    if dist.get_rank() < 2:  # an axis of size 1 cuts nothing
        torch.testing.assert_close(bringing_both(thin, scale).to_local(), (thin.to_local() * scale))
    return messages


def test_a_plain_tensor_is_not_told_to_give_what_it_gave(pool) -> None:
    for messages in pool.run(plain_tensors_beside):
        for number, (name, function) in enumerate(
            [("scale", "bringing_both"), ("x", "bringing_both"), ("scale", "bringing_both"), ("scale", "gate")]
        ):
            wanted = {"scale": "dp: R, tp: S(0)", "x": "dp: S(0), tp: S(2)"}[name]
            assert messages[number] == (
                f"{function}: {name!r} is a plain tensor, which counts as replicated, "
                f"but in_layouts declares ({wanted}); give "
                f"a DTensor: distribute({name}, Layout(mesh, {wanted!r})) of a global tensor, or DTensor.from_local of "
                f"this rank's part"
            )


def evenly(x: Tensor) -> Tensor:
    """Right on a rank that has two rows."""
    return x[:2]


def no_meta(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy()[:2])


def wrong_on_some(function: Any) -> list[str]:
    """The errors where rank 0 has three rows and rank 1 two: for five rows, and for four, which fit."""
    layout = {"dp": "S(0)"}
    called = on_local_tensors(in_layouts={"x": layout}, out_layouts=layout, out_shapes=lambda x: x)(function)
    said = []
    for rows in (5, 4):
        x = distribute(torch.ones(rows, 3), Layout(ProcessMesh.grid(dp=2), "dp: S(0)"))
        try:
            with Collectives() as seen:
                y = called(x)
            said.append(f"{tuple(y.shape)} after {len(seen.kinds)} collectives")
        except LayoutError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(("function", "count", "elsewhere"), [(evenly, 0, "on rank 0"), (no_meta, 1, "of that rank")])
def test_an_output_that_is_wrong_on_one_rank_is_refused_by_all(function: Any, count: int, elsewhere: str, pool) -> None:
    (first, right), (second, too) = pool.run(wrong_on_some, function, ranks=2)
    assert re.search(r"returned \(2, 3\) as output 0 on this rank.*it must have \(3, 3\)", first)
    assert elsewhere in second
    assert right == too == f"(4, 3) after {count} collectives"


def test_on_plain_tensors_it_is_the_function_itself() -> None:
    x, scale, _ = tensors()
    assert torch.equal(gate(x, scale, power=3), Gate.apply(x, scale) ** 3)
    assert (gate.__name__, gate.__doc__) == ("gate", "The user's own words.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            {"in_layouts": {"z": {}}, "out_layouts": {}}, "in_layouts names 'z'; the function takes x, y", id="name"
        ),
        pytest.param({"in_layouts": [{}] * 3, "out_layouts": {}}, "has 3 entries", id="too-many"),
        pytest.param({"in_layouts": {"x": {"tp": "T"}}, "out_layouts": {}}, "'T' is not a placement", id="placement"),
        pytest.param({"in_layouts": {"x": "tp: R"}, "out_layouts": {}}, "give placements by axis", id="text"),
        pytest.param(
            {"in_layouts": {"x": {}}, "out_layouts": {"tp": "S(0)"}}, "where all inputs replicate", id="from-nothing"
        ),
        pytest.param(
            {"in_layouts": {"x": {"tp": "S(0)"}, "y": {}}, "out_layouts": [{"tp": "S(0)"}, {}]},
            "the gradient of 'y', which is R there, has no evident layout; give one in grad_layouts",
            id="gradient",
        ),
    ],
)  # fmt: skip
def test_a_declaration_that_does_not_fit_is_refused_when_it_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        on_local_tensors(**given)(lambda x, y: x)
