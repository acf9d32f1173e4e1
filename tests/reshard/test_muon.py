"""Muon on plain tensors and on shards: equal to torch's, equal on every mesh, and what it sends."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weft.mesh import Layout, ProcessMesh
from weft.reshard import Muon, distribute, layout_of, to_global
from weft.reshard.extension import Collective, recording
from weft.reshard.moving.dtensor import wrap
from weft.reshard.planning.matrices import schedule_rounds, shards_of

from tests.support.pool import Pool

SHAPES = [(12, 8), (8, 12), (6, 6), (8, 12), (1, 5)]  # wide, tall, square, equal, and a single row
RATE = 4e-3


def gradient(shape: tuple[int, ...], step: int, number: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + number))


def fresh(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [gradient(shape, -1, number) for number, shape in enumerate(shapes)]


def take_steps(parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(parameters):
            whole = gradient(tuple(parameter.shape), step, number)
            is_sharded = hasattr(parameter, "device_mesh")
            parameter.grad = distribute(whole, layout_of(parameter)) if is_sharded else whole  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()


OPTIONS: list[Any] = [
    pytest.param({}, id="defaults"),
    pytest.param({"nesterov": False}, id="no-nesterov"),
    pytest.param({"momentum": 0.5, "weight_decay": 0.0}, id="less-momentum"),
    pytest.param({"ns_steps": 2, "eps": 1e-3}, id="two-steps"),
    pytest.param({"ns_coefficients": (2.0, -1.5, 0.5)}, id="coefficients"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_one_process_equals_torch(options: dict[str, Any]) -> None:
    shapes = [*SHAPES, (7,), (), (5, 3)]
    ours, theirs = ([nn.Parameter(each) for each in fresh(shapes)] for _ in range(2))
    matrices = len(SHAPES)
    rest = {"betas": (0.8, 0.9), "weight_decay": 0.3}
    muon = Muon([{"params": ours[:matrices], **options}, {"params": ours[matrices:], "adamw": True, **rest}], lr=RATE)
    take_steps(ours, [muon], range(3))
    reference = [
        torch.optim.Muon(theirs[:matrices], lr=RATE, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(theirs[matrices:], lr=RATE, fused=True, **rest),
    ]
    take_steps(theirs, reference, range(3))
    for a, b, start in zip(ours, theirs, fresh(shapes), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)


def test_each_matrix_of_a_stack_and_each_block_of_rows_is_one_matrix() -> None:
    whole = fresh([(6, 4), (6, 4), (6, 4)])
    stack = nn.Parameter(torch.stack(whole))
    heads = nn.Parameter(torch.cat(whole))
    alone = [nn.Parameter(each.clone()) for each in whole]
    optimizers = [Muon([stack], lr=RATE), Muon([heads], lr=RATE, rows=6)]
    reference = torch.optim.Muon(alone, lr=RATE, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        gradients = [gradient((6, 4), step, number) for number in range(3)]
        stack.grad, heads.grad = torch.stack(gradients), torch.cat(gradients)
        for parameter, each in zip(alone, gradients, strict=True):
            parameter.grad = each
        for optimizer in [*optimizers, reference]:
            optimizer.step()
    for number, parameter in enumerate(alone):
        assert torch.equal(stack[number], parameter)
        assert torch.equal(heads[6 * number : 6 * number + 6], parameter)


def test_an_update_is_as_large_as_by_adamw() -> None:
    """The root mean square of the entries is 0.2 times the rate, within what the iteration leaves."""
    for shape in [(64, 64), (128, 32), (32, 128)]:
        parameter = nn.Parameter(torch.zeros(shape))
        take_steps([parameter], [Muon([parameter], lr=1.0)], range(1))
        assert 0.2 * 0.7 < float(parameter.detach().square().mean().sqrt()) < 0.2 * 1.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_momentum_is_not_overwritten_in_other_dtypes(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = Muon([parameter], lr=RATE, nesterov=False, momentum=0.5)
    parameter.grad = torch.eye(4, dtype=dtype)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], 0.5 * torch.eye(4, dtype=dtype))


def test_parameters_without_gradients_stay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = Muon([{"params": [matrix]}, {"params": [vector], "adamw": True}])
    optimizer.step()
    assert torch.equal(matrix, torch.ones(2, 2)) and torch.equal(vector, torch.ones(2))
    assert not optimizer.state


def test_a_parameter_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"shape \(3,\) and torch.float32, .*; put the parameter in a group with adamw"
    ):
        Muon([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"shape \(3, 2\) and torch.complex64"):
        Muon([nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))])
    for rows in (0, 2):
        with pytest.raises(ValueError, match=rf"rows={rows} for a parameter of shape \(3, 2\); give a number that div"):
            Muon([nn.Parameter(torch.ones(3, 2))], rows=rows)
    with pytest.raises(ValueError, match=r"rows=1 for a parameter of shape \(2, 3, 2\)"):
        Muon([nn.Parameter(torch.ones(2, 3, 2))], rows=1)


def test_a_copy_and_a_read_state_go_on_as_the_optimizer() -> None:
    first, second = ([nn.Parameter(each) for each in fresh(SHAPES)] for _ in range(2))
    ours, again = Muon(first, lr=RATE), Muon(second, lr=1.0)
    take_steps(first, [ours], range(2))
    with torch.no_grad():
        for a, b in zip(first, second, strict=True):
            b.copy_(a)
    again.load_state_dict(copy.deepcopy(ours.state_dict()))
    take_steps(first, [ours], range(2, 3))
    take_steps(second, [again], range(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


LAYOUTS = [
    *("dp: R, tp: S(0)", "dp: R, tp: S(1)", "dp: S(0), tp: S(0)", "tp: S(0), dp: S(0)", "dp: S(0), tp: S(1)"),
    *("dp: S(1), tp: S(0)", "dp: R, tp: R", "dp: S(0), tp: R"),
]
CASES = [*((shape, None) for shape in SHAPES), ((12, 8), 3), ((12, 5), 2), ((3, 6, 4), None), ((4, 5, 7), None)]


def on_shards(mesh: ProcessMesh, cases: list[tuple[tuple[int, ...], int | None]], texts: list[str]) -> list[bool]:
    """Whether the weights after three steps equal one process's to the bit, and those of torch's rank."""
    found = []
    groups: list[dict[str, Any]] = []
    for text in texts:
        for number, (shape, rows) in enumerate(cases):
            layout = Layout(mesh, text)
            parameters = [
                nn.Parameter(each)
                for each in (distribute(gradient(shape, -1, number), layout), gradient(shape, -1, number))
            ]
            groups.append({"params": parameters, "rows": rows})
    sharded, alone = ([group["params"][i] for group in groups] for i in range(2))
    optimizers = [Muon([{**group, "params": [group["params"][i]]} for group in groups], lr=RATE) for i in range(2)]
    take_steps(sharded, optimizers[:1], range(3))
    take_steps(alone, optimizers[1:], range(3))
    for a, b in zip(sharded, alone, strict=True):
        assert layout_of(optimizers[0].state[a]["momentum_buffer"]) == layout_of(a)
        found.append(torch.equal(to_global(a.detach()), b))  # type: ignore[arg-type]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}], ids=str)
def test_weights_on_every_layout_equal_one_process_to_the_bit(sizes: dict[str, int], pool: Pool) -> None:
    for found in pool.run(on_shards, ProcessMesh.grid(**sizes), CASES, LAYOUTS, ranks=math.prod(sizes.values())):
        assert found == [True] * len(CASES) * len(LAYOUTS)


def on_a_part() -> bool:
    """A step where rank 2 is outside the mesh of the parameters."""
    layout = Layout(ProcessMesh.grid(tp=2), "tp: S(0)")
    parameter, alone = nn.Parameter(distribute(gradient((4, 6), -1, 0), layout)), nn.Parameter(gradient((4, 6), -1, 0))
    take_steps([parameter], [Muon([parameter], lr=RATE)], range(2))
    take_steps([alone], [Muon([alone], lr=RATE)], range(2))
    if parameter.to_local().numel() == 0:  # type: ignore[attr-defined]
        return True
    return torch.equal(to_global(parameter.detach()), alone)  # type: ignore[arg-type]


def test_a_rank_outside_the_mesh_does_nothing(pool: Pool) -> None:
    assert pool.run(on_a_part, ranks=3) == [True] * 3


def recorded(mesh: ProcessMesh, rank: int, shapes: list[tuple[int, ...]], text: str) -> list[Collective]:
    """The collectives of `rank` in a step."""
    with recording(mesh, rank) as record, torch.device("meta"):
        parameters = []
        for shape in shapes:
            layout = Layout(mesh, text)
            local = torch.empty(layout.local_shape(shape, rank))
            parameter = nn.Parameter(wrap(local, layout, shape))
            parameter.grad = wrap(torch.empty_like(local), layout, shape)
            parameters.append(parameter)
        record.take_each()
        Muon(parameters).step()
        return record.take_each()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sizes", "text", "axes"),
    [
        pytest.param({"dp": 2, "tp": 4}, "dp: R, tp: S(0)", ("tp",), id="tp"),
        pytest.param({"dp": 2, "tp": 4}, "dp: S(1), tp: S(0)", ("tp", "dp"), id="tp-and-zero"),
        pytest.param({"dp": 8}, "dp: S(0)", ("dp",), id="zero"),
        pytest.param({"dp": 2, "tp": 4}, "dp: R, tp: R", (), id="replicated", marks=pytest.mark.exhaustive),
    ],
)
def test_received_bytes_are_the_lower_bound(sizes: dict[str, int], text: str, axes: tuple[str, ...]) -> None:
    """A matrix's owner receives all shards but one, and each further rank its shard: two bytes an element."""
    mesh, shapes = ProcessMesh.grid(**sizes), [(32, 16), (16, 48), (16, 48), (8, 8)] * 5
    issued = {rank: recorded(mesh, rank, shapes, text) for rank in mesh}
    shards = 1 if not axes else mesh.axis_size(*axes)
    elements = sum(n * m for n, m in shapes)
    copies = mesh.size // shards  # groups of ranks with the same matrices
    bound = 2 * copies * 2 * elements * (shards - 1) // shards  # bring and return, two bytes an element
    assert sum(each.nbytes for of_rank in issued.values() for each in of_rank) == bound
    kinds = {(each.kind, frozenset(each.axes)) for of_rank in issued.values() for each in of_rank}
    assert kinds == ({("all-to-all", frozenset(axes))} if axes else set())
    if axes:
        busiest = max(sum(each.nbytes for each in of_rank) for of_rank in issued.values())
        assert busiest <= 1.15 * bound / mesh.size, "evenly"
        found = [shards_of(Layout(mesh, text), shape, 0) for shape in shapes]
        stacks = [stack for stacks in schedule_rounds(tuple(each for each in found if each)) for stack in stacks]
        assert {len(of_rank) for of_rank in issued.values()} == {2 * len(stacks)}


def test_the_next_round_is_under_way_before_the_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.reshard.training import muon

    order: list[str] = []
    start, iterate = muon.start_plan, muon._orthogonalized

    def starting(plan: Any, *arguments: Any) -> Any:
        order.append("bring" if plan.dst.mesh.axis_names == ("owner",) else "back")
        return start(plan, *arguments)

    def iterating(*arguments: Any) -> Tensor:
        order.append("iterate")
        return iterate(*arguments)

    monkeypatch.setattr(muon, "start_plan", starting)
    monkeypatch.setattr(muon, "_orthogonalized", iterating)
    recorded(ProcessMesh.grid(tp=2), 0, [(4, 4)] * 6, "tp: S(0)")
    assert order == ["bring", *["bring", "iterate", "back"] * 2, "iterate", "back"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the bfloat16 tensors that are alive after each op; `most` is the largest count."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.dtype == torch.bfloat16:
                storage = each.untyped_storage()
                reference = StorageWeakRef(storage)
                self._alive[reference.cdata] = reference, storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return out


def matrices_alive(count: int, shape: tuple[int, int]) -> float:
    """The most bfloat16 bytes alive in a step of `count` sharded matrices, over the bytes of a whole matrix."""
    layout = Layout(ProcessMesh.grid(dp=dist.get_world_size()), "dp: S(0)")
    matrices = [nn.Parameter(distribute(gradient(shape, 0, number), layout)) for number in range(count)]
    for number, matrix in enumerate(matrices):
        matrix.grad = distribute(gradient(shape, 1, number), layout)  # type: ignore[assignment]
    with LiveBytes() as live:
        Muon(matrices).step()
    return live.most / (2 * math.prod(shape))


@pytest.mark.parametrize(
    ("ranks", "most"),
    [
        pytest.param(2, 6, id="contiguous parts"),
        pytest.param(4, 6 + 4 * 3 / 4, id="two exchanges under way with packed parts, of three quarters each way"),
    ],
)
def test_a_rank_holds_six_matrices_and_packed_parts(ranks: int, most: float, pool: Pool) -> None:
    products = 2 * 8 / 512
    assert max(pool.run(matrices_alive, 6 * ranks, (512, 8), ranks=ranks)) == most + products
