"""A step's communication, recorded from the model on shapes: for any rank of any mesh, in any process."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft import kernels
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import (
    ColwiseParallel,
    Llama,
    LlamaConfig,
    ParallelPlan,
    RowwiseParallel,
    VocabParallel,
    parallelize,
    record,
)
from weft.models.layers import Embedding, Linear
from weft.models.step.communication import Communication, Entry
from weft.models.train.measure import CollectiveCount
from weft.reshard import Slice, distribute, plan, reshard
from weft.reshard.world.recording import recording

from tests.models.stepping import observed_step

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=8, num_kv_heads=8, max_seq_len=32
)
BATCH = (32, 16)


def on_meta(config: LlamaConfig = CONFIG) -> Llama:
    with torch.device("meta"):
        return Llama(config)


def plan_of(model: Llama, **changes: Any) -> ParallelPlan:
    return replace(model.parallel_plan(), **changes)


class Perceptron(nn.Module):
    """A user's own model: an embedding, two layers of torch's and Weft's ops, and a count that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(24, 16)
        self.up, self.down = Linear(16, 32), Linear(32, 16)
        self.scale = torch.ones(())  # neither a parameter nor a buffer
        self.register_buffer("offset", torch.ones(16))
        self.head = Linear(16, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(kernels.add(x * self.scale, self.down(torch.nn.functional.gelu(self.up(x)))))


PERCEPTRON = ParallelPlan(
    tensor={"table": VocabParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(), "head": ColwiseParallel()}
)


def squared(logits: Tensor, target: Tensor) -> Tensor:
    """A user's own criterion: the sum of the losses and of their squares."""
    return kernels.cross_entropy(logits, target, reduction="sum", z_loss=1e-3)


def own_model(dp: int, tp: int) -> tuple[Communication, Communication]:
    """Recorded and issued, of a model and a criterion that are no part of Weft."""
    mesh = ProcessMesh.grid(dp=dp, tp=tp)
    model = Perceptron()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    recorded = record(model, mesh, PERCEPTRON, batch=(6, 5), criterion=squared, rank=dist.get_rank(), clip_norm=1.0)
    parallelize(model, mesh, PERCEPTRON)
    tokens, target = (
        distribute(
            torch.randint(24, (6, 5), generator=torch.Generator().manual_seed(i)), Layout(mesh, {"dp": Shard(0)})
        )
        for i in range(2)
    )
    return recorded, observed_step(model, squared, tokens, target, clip_norm=1.0)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4), (4, 1)])
def test_a_users_own_model_and_criterion_are_recorded_as_they_run(dp: int, tp: int, pool) -> None:
    for recorded, issued in pool.run(own_model, dp, tp, ranks=4):
        assert recorded == issued
        assert recorded.count


def hidden() -> list[tuple[Counter[str], Counter[str]]]:
    """Communication of ops that torch's DTensor redistributes unasked, and of a direct torch.distributed call.

    Both are recorded, and issued.
    """
    mesh, results = ProcessMesh.grid(dp=2, tp=2), []
    acts: list[Callable[[Any, Any], Any]] = [
        lambda rows, columns: rows + columns,
        lambda rows, columns: rows.full_tensor(),
        lambda rows, columns: dist.all_reduce(rows.to_local(), group=rows.device_mesh.get_group("tp")),
        lambda rows, columns: dist.all_gather(
            [torch.empty_like(rows.to_local())] * 2, rows.to_local(), rows.device_mesh.get_group("dp")
        ),
        lambda rows, columns: rows + rows,
    ]
    for act in acts:
        issued = []
        for device, world in (("meta", recording(mesh, dist.get_rank())), ("cpu", CollectiveCount())):
            with world as seen:
                ones = torch.ones(4, 4, device=device)
                rows, columns = (distribute(ones, Layout(mesh, {"tp": Shard(dim)})) for dim in (0, 1))
                act(rows, columns)
                issued.append(seen.take_each())
        results.append(tuple(issued))
    return results


def test_collectives_issued_outside_of_weft_are_recorded(pool) -> None:
    for results in pool.run(hidden, ranks=4):
        counts = []
        for recorded, issued in results:
            assert recorded == issued
            counts.append(len(recorded))
        assert counts == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("sequence", [False, True])
def test_the_bytes_are_those_that_a_ring_moves(sequence: bool) -> None:
    """By hand, for one decoder block on even sizes in float32."""
    blocks = [
        record(
            model := on_meta(replace(CONFIG, num_layers=layers)),
            ProcessMesh.grid(dp=2, tp=4),
            plan_of(model, sequence=sequence),
            batch=BATCH,
        )
        for layers in (1, 2)
    ]
    stream = BATCH[0] // 2 * BATCH[1] * CONFIG.hidden_size * 4  # bytes of the rows of one dp rank
    for phase in ("forward", "backward"):
        one, two = (each.select(phase=phase, axis="tp") for each in blocks)
        more = two.counts - one.counts
        assert more == Counter({"all-gather": 2, "reduce-scatter": 2} if sequence else {"all-reduce": 2})
        assert two.nbytes - one.nbytes == 2 * 2 * 3 * stream // 4  # two all-reduces: 2 (n - 1) / n of it each


def test_the_bytes_of_a_reshard_are_those_of_its_plan() -> None:
    mesh = ProcessMesh.grid(dp=2, tp=4)
    for src, dst in [
        ("tp: S(0)", ""),
        ("tp: P(sum)", "tp: S(1)"),
        ("dp: S(0), tp: S(1)", "dp: S(1), tp: S(0)"),
        ("dp: P(sum), tp: S(0)", ""),
    ]:
        for rank in (0, 5):
            with recording(mesh, rank) as recorded:
                x = distribute(torch.empty(16, 24, device="meta"), Layout(mesh, src))
                reshard(x, placements=dst)
                taken = recorded.take_each()
            steps = plan(Layout(mesh, src), Layout(mesh, dst), (16, 24), torch.float32)
            assert sum(each.nbytes for each in taken) == steps.received_bytes(rank), (src, dst, rank)
            assert len(taken) == sum(not isinstance(step, Slice) for step in steps.steps)


# torch 2.11 lists a mesh's ranks in these functions itself; no other functions are exempt.
TORCHS_MESH = ("_mesh_layout.py", "_pycute/int_tuple.py") if torch.__version__ < "2.12" else ()


@pytest.mark.exhaustive
def test_a_rank_of_16384_is_recorded_with_the_calls_of_a_rank_of_64() -> None:
    """Counts Python calls, generators' too: code that lists ranks would show."""

    def calls(dp: int) -> tuple[int, Communication]:
        mesh, model = ProcessMesh.grid(dp=dp, tp=8), on_meta()
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call" and not frame.f_code.co_filename.endswith(TORCHS_MESH)

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            found = record(model, mesh, batch=(4096, 8), rank=13, clip_norm=1.0)
        finally:
            sys.setprofile(before)
        return counted, found

    calls(4)  # fills caches and imports
    few, small = calls(8)
    many, large = calls(2048)
    assert many < 1.02 * few
    assert large.counts == small.counts
    assert large.select(axis="dp").nbytes > 1.1 * small.select(phase="gradients", axis="dp").nbytes


@pytest.mark.exhaustive
def test_ranks_of_one_mesh_differ_where_their_parts_do() -> None:
    model, mesh = on_meta(replace(CONFIG, vocab_size=31)), ProcessMesh.grid(dp=1, tp=4)
    found = [record(model, mesh, batch=(2, 3), rank=rank) for rank in range(4)]
    assert len({each.counts["all-reduce"] for each in found}) == 1
    assert found[0] == found[1]


def test_a_rank_outside_records_nothing() -> None:
    assert record(on_meta(), ProcessMesh.grid(dp=2, tp=2, first_rank=4), batch=BATCH, clip_norm=1.0) == Communication()


def test_one_process_communicates_nothing() -> None:
    assert record(on_meta(), ProcessMesh.grid(dp=1, tp=1), batch=BATCH, clip_norm=1.0) == Communication()


def test_the_model_is_left_as_it_is_wherever_it_lies() -> None:
    model = Llama(replace(CONFIG, tie_embeddings=True))
    before = dict(model.named_parameters())
    found = record(model, ProcessMesh.grid(dp=2, tp=2), batch=BATCH)
    assert found == record(on_meta(model.config), ProcessMesh.grid(dp=2, tp=2), batch=BATCH)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_batch_may_be_tensors() -> None:
    tokens = torch.zeros(BATCH, dtype=torch.int32)
    mesh = ProcessMesh.grid(dp=2, tp=2)
    assert record(on_meta(), mesh, batch=(tokens, tokens.long())) == record(on_meta(), mesh, batch=BATCH)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight * self.weight.item()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"rank": -1}, r"rank is -1; give one of the ranks of ProcessMesh.grid\(dp=2\)", id="rank"),
        pytest.param({"batch": (8, 0)}, r"batch is \(8, 0\); give the global shape", id="empty"),
        pytest.param({"batch": (torch.ones(2), 3)}, r"give the global shape of tokens and targets", id="neither"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(on_meta(), ProcessMesh.grid(dp=2), **{"batch": BATCH, **options})


def test_a_model_that_reads_values_is_refused() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        record(Reads(), ProcessMesh.grid(dp=2), ParallelPlan(), batch=BATCH, criterion=lambda output, target: output)


def parallel_already() -> str:
    mesh = ProcessMesh.grid(tp=2)
    model = parallelize(Perceptron(), mesh, PERCEPTRON)
    with pytest.raises(ValueError, match=r"parameter table\.weight of Perceptron is a DTensor") as raised:
        record(model, mesh, PERCEPTRON, batch=(6, 5))
    return str(raised.value)


def test_a_parallel_model_is_refused(pool) -> None:
    assert "record it before parallelize" in pool.run(parallel_already, ranks=2)[0]


def test_communication_prints_bytes_along_each_axis() -> None:
    found = Communication(
        (
            Entry(phase="forward", kind="all-reduce", axes=("tp",), nbytes=3000, count=2),
            Entry(phase="forward", kind="all-gather", axes=("tp",), nbytes=96, count=1),
            Entry(phase="gradients", kind="all-reduce", axes=("dp", "tp"), nbytes=7, count=1),
        )
    )
    assert str(found).split("\n") == [
        "forward    tp       1 all-gather, 2 all-reduce  3,096 bytes",
        "gradients  dp x tp  1 all-reduce                    7 bytes",
    ]
    assert str(Communication()) == "none"
    assert found.select(axis="dp").nbytes == 7
    assert found.select(phase="forward", kind="all-reduce").count == 2
    assert math.prod(found.counts.values()) == 3
