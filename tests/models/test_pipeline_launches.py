"""Each rank of a pipeline launches the ops of its own stages, each once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import PipelinePlan, forward_backward, parallelize

from tests.models.test_pipeline import MICROBATCHES, batch, make


class Launched(TorchDispatchMode):
    """Records ops by name: those on tensors with data, and those on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.on_shapes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted = self.on_shapes if any(issubclass(kind, FakeTensor) for kind in types) else self.ops
        counted[func._opname] += 1
        return func(*args, **(kwargs or {}))


def launched(axes: dict[str, int], schedule: str) -> Counter[str]:
    model = make("llama")
    if axes:
        plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=MICROBATCHES, schedule=schedule))
        parallelize(model, ProcessMesh.grid(**axes), plan)
    tokens, targets = batch()
    # Makes everything that is made once.
    forward_backward(model, cross_entropy, tokens, targets, microbatches=MICROBATCHES)
    with Launched() as mode:
        forward_backward(model, cross_entropy, tokens, targets, microbatches=MICROBATCHES)
    return mode.ops


def embeddings_on_shapes() -> list[int]:
    """In each of two steps."""
    model = make("llama")
    plan = replace(model.parallel_plan(), pipeline=PipelinePlan(microbatches=MICROBATCHES))
    parallelize(model, ProcessMesh.grid(pp=2), plan)
    found = []
    for _ in range(2):
        with Launched() as mode:
            forward_backward(model, cross_entropy, *batch())
        found.append(mode.on_shapes["embedding"] + mode.on_shapes["index_select"])
    return found


@pytest.mark.exhaustive
def test_modules_of_other_stages_run_on_shapes_once(pool) -> None:
    first, last = pool.run(embeddings_on_shapes, ranks=2)
    assert first == [0, 0]
    assert last == [1, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
def test_a_rank_launches_nothing_of_other_stages_and_nothing_twice(schedule: str, pool) -> None:
    alone = launched({}, schedule)
    first, last = pool.run(launched, {"pp": 2}, schedule, ranks=2)
    assert alone["mm"] > 100
    for op in ("mm", "bmm", "rsqrt", "silu", "sigmoid", "embedding", "index_select", "embedding_dense_backward"):
        assert first[op] + last[op] == alone[op], op
    embedding = {op: alone[op] for op in ("embedding", "index_select", "embedding_dense_backward") if alone[op]}
    assert embedding
    assert {op: first[op] for op in embedding} == embedding
    assert first["mm"] < last["mm"]  # the head
