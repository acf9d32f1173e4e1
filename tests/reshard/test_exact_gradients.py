"""Inside `exact_sums`, GradientSync gives the named mesh's gradients on any smaller mesh, to the bit.

The truth is the definition on lists: each rank of the named mesh adds gradients over microbatches, and a tree adds the
sums of the ranks. Where every pass sends, the tree first adds the ranks' gradients of each pass.
"""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from weft.mesh import Layout, ProcessMesh
from weft.reshard import GradientSync, distribute, exact_sums, layout_of, to_global
from weft.reshard.extension import ParameterSlot, dtensor_spec, gather_when_called, local_grad_callback, memory_of
from weft.reshard.moving.dtensor import wrap
from weft.reshard.planning.layouts import shard_replicated_axes
from weft.reshard.training.buckets import observing_buckets

from tests.reshard.test_exact_reshard import NAMED, local_of, reduced, value_of
from tests.reshard.test_exact_tree import same_bits
from tests.support.collectives import Collectives

# name: shape, layout of the parameter, layouts of the gradients in a pass
PARAMETERS = {
    "norm": ((6,), "", ["dp: P, tp: P"]),
    "column": ((4, 3), "tp: S(0)", ["dp: P, tp: S(0)"]),
    "row": ((3, 8), "tp: S(1)", ["dp: P, tp: S(1)"]),
    "tied": ((8, 2), "tp: S(0)", ["dp: P, tp: S(0)", "dp: P, tp: S(0)"]),
    "replica": ((5, 3), "", ["dp: P"]),
    "whole": ((2, 3), "", ["dp: R, tp: R"]),
    "number": ((), "", ["dp: P, tp: P"]),
    "outer": ((16, 3), "", ["tp: P"]),
    "ways": ((4, 4), "", ["dp: P, tp: P"]),  # see `layouts_of`
}


def layouts_of(name, number):
    """The layouts of a parameter's gradients in a pass."""
    return ["dp: P"] if name == "ways" and number == 1 else PARAMETERS[name][2]


class Give(torch.autograd.Function):
    """A function of a parameter, with the gradient returned by `gradient()`."""

    @staticmethod
    def forward(ctx, weight, gradient):
        ctx.gradient = gradient
        return torch.ones(())

    @staticmethod
    def backward(ctx, grad):
        return ctx.gradient(), None


class Model(nn.Module):
    """A model whose backward gives each parameter the gradients in PARAMETERS."""

    def __init__(self, mesh, dtype):
        super().__init__()
        self.mesh, self.dtype, self.keep = mesh, dtype, []
        for name, (shape, layout, _) in PARAMETERS.items():
            self.register_parameter(
                name, nn.Parameter(distribute(torch.zeros(shape, dtype=dtype), Layout(mesh, layout)))
            )

    def forward(self, number):
        outputs = []
        for name in PARAMETERS:
            for i in range(len(layouts_of(name, number))):
                outputs.append(Give.apply(getattr(self, name), lambda name=name, i=i: self.gradient(name, i, number)))
        return sum(outputs)

    def gradient(self, name, i, number):
        value, layout = addends(name, i, number, self.dtype), Layout(self.mesh, layouts_of(name, number)[i])
        grad = wrap(local_of(value, layout, NAMED, dist.get_rank()), layout, PARAMETERS[name][0])
        self.keep.append(grad)  # autograd then copies the gradient
        return grad


def addends(name, i, number, dtype):
    """The gradient's addends on the named mesh."""
    seed = 1000 * number + 10 * list(PARAMETERS).index(name) + i
    layout = Layout(ProcessMesh.grid(dp=4, tp=2), layouts_of(name, number)[i])
    return value_of(layout, NAMED, PARAMETERS[name][0], dtype, seed).nan_to_num(0.5, 2.0, -2.0)


def truth(name, passes, dtype, each_pass, summed_in=None):
    """The whole gradient; None for gradients of several layouts. each_pass: whether each pass is summed by itself."""
    if len({tuple(layouts_of(name, number)) for number in range(passes)}) > 1:
        return None
    of_passes = []
    for number in range(passes):
        given = [addends(name, i, number, dtype) for i in range(len(layouts_of(name, number)))]
        of_passes.append(given[0] if len(given) == 1 else given[0] + given[1])
    cast = dtype if summed_in is None else summed_in
    if not each_pass:
        total = of_passes[0]
        for each in of_passes[1:]:
            total = total + each
        of_passes = [total]
    total = None
    for each in of_passes:
        own = reduced(each.to(cast), [0, 1])[0, 0]
        total = own if total is None else total + own
    return total.to(dtype)


def step(model, sync, passes, paused=True):
    for number in range(passes):
        with sync.paused() if paused and number < passes - 1 else nullcontext():
            model(number).backward()
    sync.wait()


def check(model, each_pass, passes, dtype, target_axes=(), summed_in=None):
    gradients = {}
    for name, parameter in model.named_parameters():
        target = shard_replicated_axes(layout_of(parameter), parameter.shape, target_axes)
        grad = parameter.grad
        assert layout_of(grad) == target, name
        assert tuple(grad.to_local().shape) == target.local_shape(parameter.shape, dist.get_rank()), name
        expected = truth(name, passes, dtype, each_pass, summed_in)
        gradients[name] = to_global(grad).clone()
        if expected is not None:
            assert same_bits(gradients[name], expected), name
    return gradients


def unsharded(mesh_shape, dtype_name, passes):
    """Without ZeRO, whole and sharded over dp, with buckets of several sizes; returns the gradients, equal for all."""
    mesh, dtype = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), getattr(torch, dtype_name)
    found = []
    with exact_sums(NAMED):
        for bucket_bytes, axes in itertools.product((1, 100, 2**20), ((), ("dp",))):
            model = Model(mesh, dtype)
            sync = GradientSync(model, bucket_bytes=bucket_bytes, shard_over=axes)
            for _ in range(2):
                step(model, sync, passes)
                found.append(check(model, False, passes, dtype, axes))
                model.zero_grad()
            sync.close()
    for other in found:
        assert all(same_bits(found[0][name], other[name]) for name in other)
    return found[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_are_the_named_meshes(pool, passes, dtype):
    meshes = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
    results = [pool.run(unsharded, mesh, dtype, passes, ranks=math.prod(mesh)) for mesh in meshes]
    for of_ranks in results:
        for gradients in of_ranks:
            assert all(same_bits(gradients[name], results[0][0][name]) for name in gradients)


def on_the_named_mesh():
    return unsharded((4, 2), "bfloat16", 3), unsharded((4, 2), "float32", 1)


@pytest.mark.exhaustive
def test_the_named_mesh_itself(pool):
    pool.run(on_the_named_mesh, ranks=8)


def gathered(mesh_shape, dtype_name, passes):
    """The four values of zero, the last two of which send every pass."""
    mesh, dtype = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), getattr(torch, dtype_name)
    with exact_sums(NAMED):
        for zero, bucket_bytes in itertools.product((1, 2, 3), (1, 2**20)):
            model = Model(mesh, dtype)
            slots = []
            for name, (shape, text, _) in PARAMETERS.items():
                full = Layout(mesh, text)
                shards = shard_replicated_axes(full, shape, ("dp",))
                setattr(model, name, nn.Parameter(distribute(torch.zeros(shape, dtype=dtype), shards)))
                slots.append(
                    ParameterSlot(
                        module=model, name=name, layout=full, keep_between_calls=zero < 3, accumulate_grad=zero == 1
                    )
                )
            gather_when_called(model, {model: slots}, keep_for_backward=lambda _: True)
            sync = GradientSync(model, bucket_bytes=bucket_bytes)
            for _ in range(2):
                step(model, sync, passes)
                check(model, zero > 1, passes, dtype)
                model.zero_grad()
            sync.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)], ids=str)
def test_gathered_parameters(pool, mesh, passes):
    for dtype in ("float32", "bfloat16"):
        pool.run(gathered, mesh, dtype, passes, ranks=math.prod(mesh))


def unpaused(mesh_shape):
    """Each pass outside `paused()` is summed over ranks separately, also with a bucket still open."""
    mesh = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1])
    with exact_sums(NAMED):
        for bucket_bytes in (1, 2**20):
            model = Model(mesh, torch.float32)
            sync = GradientSync(model, bucket_bytes=bucket_bytes)
            step(model, sync, 2, paused=False)
            for name, parameter in model.named_parameters():
                if name != "ways":
                    assert same_bits(to_global(parameter.grad), truth(name, 2, torch.float32, True)), name
            sync.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_passes_that_are_not_paused(pool, mesh):
    pool.run(unpaused, mesh, ranks=math.prod(mesh))


def in_another_dtype(mesh_shape):
    mesh = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1])
    with exact_sums(NAMED):
        model = Model(mesh, torch.bfloat16)
        sync = GradientSync(model, dtype=torch.float32)
        step(model, sync, 2)
        check(model, False, 2, torch.bfloat16, summed_in=torch.float32)


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (4, 1)], ids=str)
def test_sums_in_another_dtype_cast_first(pool, mesh):
    pool.run(in_another_dtype, mesh, ranks=math.prod(mesh))


def handed_over(mesh_shape):
    """Stacked addends of a gradient that bypasses `.grad` are added before the gradient waits in a bucket."""
    mesh, rank = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), dist.get_rank()
    shape, layout = (4, 3), Layout(mesh, "dp: P, tp: S(0)")
    largest = []
    with exact_sums(NAMED), observing_buckets(lambda tensors: largest.append(max(each.numel() for each in tensors))):
        model = nn.Module()
        model.weight = nn.Parameter(distribute(torch.zeros(shape), Layout(mesh, "tp: S(0)")))
        sync = GradientSync(model)
        value = value_of(layout, NAMED, shape, torch.float32, 5)
        grad = wrap(local_of(value, layout, NAMED, rank), layout, shape)
        accepted = local_grad_callback(model.weight)(model.weight, memory_of(grad), dtensor_spec(grad))
        assert accepted == (mesh_shape[0] > 1), "nothing is sent on one rank: such a gradient goes by .grad"
        if accepted:
            sync.wait()
            assert same_bits(to_global(model.weight.grad), reduced(value, [0, 1])[0, 0])
            assert max(largest) == math.prod(layout.local_shape(shape, rank)), "no addend waits in a bucket"


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_gradients_beside_grad(pool, mesh):
    pool.run(handed_over, mesh, ranks=math.prod(mesh))


def given_to_two_parameters():
    """Both parameters have the same gradient in the first pass, and only one has a gradient in the second pass."""
    mesh = ProcessMesh.grid(dp=1)
    with exact_sums({"dp": 4}):
        model = nn.Module()
        model.first, model.second = (nn.Parameter(distribute(torch.zeros(3), Layout(mesh))) for _ in range(2))
        sync = GradientSync(model)
        ones, twos = (wrap(torch.full((4, 3), number), Layout(mesh, "dp: P"), (3,)) for number in (1.0, 2.0))
        with sync.paused():
            (Give.apply(model.first, lambda: ones) + Give.apply(model.second, lambda: ones)).backward()
            Give.apply(model.first, lambda: twos).backward()
        sync.wait()
        return [to_global(each.grad) for each in (model.first, model.second)]


def test_a_later_pass_is_added_to_one_of_two_parameters_with_the_same_gradient(pool):
    (found,) = pool.run(given_to_two_parameters, ranks=1)
    assert [each.tolist() for each in found] == [[12.0] * 3, [4.0] * 3]


def bytes_of_a_step(mesh_shape):
    """Bytes received in a step outside of `exact_sums` and inside, for gradients without folded outer axes."""
    mesh, sizes = ProcessMesh.grid(dp=mesh_shape[0], tp=mesh_shape[1]), {}
    for named in (None, NAMED):
        with exact_sums(named):
            model = nn.Module()
            for name in ("column", "row", "replica"):
                shape, text, _ = PARAMETERS[name]
                model.register_parameter(name, nn.Parameter(distribute(torch.zeros(shape), Layout(mesh, text))))
            sync = GradientSync(model)
            total = torch.zeros(())
            for name, parameter in model.named_parameters():
                layout = Layout(mesh, PARAMETERS[name][2][0])
                total = total + Give.apply(
                    parameter, lambda layout=layout, p=parameter: distribute(torch.ones(p.shape), layout)
                )
            with Collectives() as seen:
                total.backward()
                sync.wait()
            sizes[named is None] = sum(seen.nbytes), set(seen.kinds)
            elements = sum(p.to_local().numel() for p in model.parameters())
    return sizes[True], sizes[False], elements


@pytest.mark.parametrize("mesh", [(2, 1), (4, 1), (1, 2), (2, 2)], ids=str)
def test_bytes_of_gradients(pool, mesh):
    for (ordinary, kinds), (exact, exact_kinds), _ in pool.run(bytes_of_a_step, mesh, ranks=math.prod(mesh)):
        assert kinds == exact_kinds
        assert ordinary <= exact <= ordinary + 2 * 3 * 4, "at most n - 1 elements of padding, in each half"


def one_gradient(sync, weight, layout, named, seed):
    """A step with a single gradient; returns the gradient, the truth and the collectives."""
    shape, mesh = tuple(weight.shape), layout.mesh
    grid = ProcessMesh.grid(
        **{axis: named.get(axis, size) for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)}
    )
    full = {axis: grid.axis_size(axis) for axis in ("dp", "tp")}
    value = value_of(Layout(grid, str(layout)), full, shape, torch.float32, seed).nan_to_num(0.5, 2.0, -2.0)
    grad = wrap(local_of(value, layout, full, dist.get_rank()), layout, shape)
    with Collectives() as seen:
        Give.apply(weight, lambda: grad).backward()
        sync.wait()
    found, weight.grad = to_global(weight.grad), None
    return found, reduced(value, [0, 1])[0, 0], seen.names


def from_mode_to_mode(elements):
    """The same GradientSync outside `exact_sums` and inside, with several named meshes, in turn."""
    mesh = ProcessMesh.grid(dp=4, tp=1)
    weight = nn.Parameter(distribute(torch.zeros(elements), Layout(mesh)))
    module = nn.Module()
    module.weight = weight
    sync, names = GradientSync(module), []
    for seed, named in enumerate((None, {"dp": 4}, None, {"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 16, "tp": 4}, None)):
        with exact_sums(named):
            found, expected, seen = one_gradient(sync, weight, Layout(mesh, "dp: P, tp: P"), named or {}, seed)
        names.append(seen)
        if named is None:
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-2)
        else:
            assert same_bits(found, expected), named
    assert names[0] == names[2] == names[6] == ["allreduce_"]
    return names


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "elements", [pytest.param(7, id="sockets"), pytest.param(300_001, id="shared-memory"), pytest.param(0, id="empty")]
)
def test_a_sync_in_and_out_of_exact_sums(pool, elements):
    for names in pool.run(from_mode_to_mode, elements, ranks=4):
        if elements == 300_001:
            assert names[1] == ["allreduce_"], "a single number, while the sum goes by shared memory"
        elif elements:
            assert names[1] == ["alltoall_base_"] * 2
