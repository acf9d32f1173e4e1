"""Placements: values that print as they are written; torch's own placements are accepted."""

import pytest
import torch.distributed.tensor as torch_tensor
from weft.mesh import Partial, Replicate, Shard, as_placement

TEXTS = [
    pytest.param("S(0)", Shard(0), id="shard"),
    pytest.param("S(12)", Shard(12), id="shard-12"),
    pytest.param("R", Replicate(), id="replicate"),
    pytest.param("S(-1)", Shard(-1), id="shard-last"),
    *(pytest.param(f"P({op})", Partial(op), id=op) for op in ("sum", "avg", "min", "max", "product")),
]


@pytest.mark.parametrize("text, placement", TEXTS)
def test_text_parses_to_what_prints_as_it(text, placement):
    assert as_placement(text) == placement
    assert str(placement) == text
    assert as_placement(placement) is placement


def test_partial_is_a_sum_unless_said_otherwise():
    assert Partial() == Partial("sum") == as_placement("P")


def test_prod_is_product():
    assert Partial("prod") == Partial("product") == as_placement("P(prod)")
    assert str(Partial("prod")) == "P(product)"


@pytest.mark.parametrize(
    "theirs, ours",
    [
        pytest.param(torch_tensor.Shard(1), Shard(1), id="shard"),
        pytest.param(torch_tensor.Shard(-1), Shard(-1), id="shard-last"),
        pytest.param(torch_tensor.Replicate(), Replicate(), id="replicate"),
        pytest.param(torch_tensor.Partial(), Partial("sum"), id="partial"),
        pytest.param(torch_tensor.Partial("max"), Partial("max"), id="partial-max"),
    ],
)
def test_torch_placements_are_taken(theirs, ours):
    assert as_placement(theirs) == ours


def test_placements_are_values():
    assert len({Shard(0), Shard(0), Shard(1), Replicate(), Replicate(), Partial("sum"), Partial()}) == 4
    with pytest.raises(AttributeError):
        Shard(0).dim = 1


@pytest.mark.parametrize(
    "call, message",
    [
        pytest.param(lambda: Shard(True), "the dim of Shard is True, which is not an int", id="bool-dim"),
        pytest.param(lambda: Shard(0.0), "the dim of Shard is 0.0, which is not an int", id="float-dim"),
        pytest.param(lambda: Partial("mean"), "no op 'mean'; use one of sum, avg", id="op"),
        pytest.param(lambda: as_placement("S"), "'S' is not a placement; write R", id="text"),
        pytest.param(lambda: as_placement("S(--1)"), "'S\\(--1\\)' is not a placement", id="text-negative"),
        pytest.param(lambda: as_placement("R(0)"), "'R\\(0\\)' is not a placement", id="text-replicate"),
        pytest.param(lambda: as_placement("P(mean)"), "no op 'mean'", id="text-op"),
        pytest.param(lambda: as_placement(0), "0 is not a placement; give Shard", id="int"),
    ],
)
def test_a_bad_placement_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
