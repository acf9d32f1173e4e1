"""The memory that a plan predicts for a step, against the bytes alive while the step runs."""

import itertools
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from weft.mesh import Layout, Partial, ProcessMesh
from weft.reshard import plan, reshard
from weft.reshard.moving.dtensor import wrap
from weft.reshard.world.world import world

from tests.support.shards import every_layout, split, whole_of

GRID = ProcessMesh.grid(dp=2, tp=2)


class Alive(TorchDispatchMode):
    """`peak`: the most bytes alive at once, of the storages given and of storages made since."""

    def __init__(self, *given):
        super().__init__()
        self._storages = {}
        self.peak = 0
        self._see(given)

    def _see(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        alive = {at: (ref, size) for at, (ref, size) in self._storages.items() if not ref.expired()}
        self._storages = alive
        self.peak = max(self.peak, sum(size for _, size in alive.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        caller = sys._getframe(1)
        while caller.f_back is not None and "/torch/" in caller.f_code.co_filename:
            caller = caller.f_back
        if caller.f_code.co_name not in (
            "wait",
            "wait_for",
        ):  # there gloo makes copies of its own, as it does not scatter sums
            self._see(tree_iter(out))
        return out


def peaks(shape, ops, every, portion):
    """Pairs whose plan predicted less memory than was alive, with the backend's own all-gather and reduce-scatter.

    gloo's exchanges are faster, but hold buffers besides the sent and received data.
    """
    world().prefers_all_to_all = False
    try:
        return promised_too_little(shape, ops, every, portion)
    finally:
        world().prefers_all_to_all = True


def promised_too_little(shape, ops, every, portion):
    whole = whole_of(shape, torch.float64)
    wrong = []
    layouts = every_layout(GRID, len(shape), [Partial(op) for op in ops])
    for src, dst in portion.of(itertools.islice(itertools.product(layouts, repeat=2), 0, None, every), every=5):
        made = plan(src, dst, shape, whole.dtype)
        mine = split(whole, src)[dist.get_rank()].clone()
        x = wrap(mine, src, shape)
        measured = []
        for _ in range(3):  # gloo's thread may let go of a step's buffers a moment after the next has begun
            with Alive(mine) as alive:
                reshard(x, placements=dst)
            measured.append(alive.peak)
        order = 8 * GRID.size  # bytes of the index by which parts are put in order
        if min(measured) > made.peak_bytes + order:
            wrong.append((str(made), measured, made.peak_bytes))
    return wrong


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "shape, ops, every",
    [
        pytest.param((64, 64), ["sum"], 2, id="even"),
        pytest.param((63, 61), ["sum"], 3, id="uneven"),
        pytest.param((64, 64), ["max"], 3, id="another-reduction"),
        pytest.param((62, 62), ["avg"], 3, id="average"),
    ],
)
def test_no_rank_holds_more_than_the_plan_says(pool, portion, shape, ops, every):
    for wrong in pool.run(peaks, shape, ops, every, portion, ranks=4):
        assert wrong == []


class Copied(TorchDispatchMode):
    """Elements that copies wrote."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.elements += args[0].numel() if func._opname == "copy_" else 0
        return func(*args, **(kwargs or {}))


def copied(src: Layout, dst: Layout):
    """The numbers of elements that a rank copies, and that it holds at once."""
    whole, rank = torch.arange(64.0).reshape(8, 8), dist.get_rank()
    x = wrap(split(whole, src)[rank].clone() if rank in src.mesh else torch.empty(0), src, whole.shape)
    reshard(x, mesh=dst)  # makes the groups
    with Copied() as copies, Alive(x.to_local()) as alive:
        y = reshard(x, mesh=dst)
    if rank in dst.mesh:
        assert torch.equal(y.to_local(), whole[dst.local_slices(whole.shape, rank)])
    return copies.elements, alive.peak // 4


@pytest.mark.parametrize(
    ("src", "dst", "copies", "held"),
    [
        pytest.param("S(0)", "S(0)", [16, 0, 0, 0], [48, 48, 16, 16], id="rows-sent-and-received"),
        pytest.param("S(1)", "S(0)", [8 + 24, 8 + 24, 0, 0], [16 + 32 + 24, 16 + 32 + 24, 16, 16], id="rows-sent"),
        # Rank 1 keeps the rows between the rows that it receives.
        pytest.param(
            "S(0)", "S(1)", [16, 16 + 24, 16, 16], [16 + 8 + 32, 16 + 8 + 32 + 24, 32, 32], id="rows-received"
        ),
    ],
)
def test_messages_that_lie_in_a_row_are_sent_from_there_and_received_there(pool, src, dst, copies, held):
    """From four ranks to the first two: contiguous messages are not copied; a rank's own part is."""
    before = Layout(ProcessMesh.grid(dp=4), f"dp: {src}")
    after = Layout(ProcessMesh.grid(dp=2), f"dp: {dst}")
    found = pool.run(copied, before, after, ranks=4)
    assert [each for each, _ in found] == copies
    assert [each for _, each in found] == held
    assert plan(before, after, (8, 8), torch.float32).peak_bytes == 4 * max(held)


def test_a_plan_that_moves_nothing_holds_its_input_and_result():
    assert plan(Layout(GRID), Layout(GRID, "dp: S(0)"), (8, 8), torch.float32).peak_bytes == 4 * (64 + 32)
    assert plan(Layout(GRID), Layout(GRID), (8, 8), torch.float32).peak_bytes == 4 * 64
