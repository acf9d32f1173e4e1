"""Ways to read a number from a DTensor: from a Partial they would give an addend, so each raises or is named for it."""

import json
import math

import numpy
import pytest
import torch
import torch.distributed as dist
from weft.mesh import Layout, LayoutError, ProcessMesh
from weft.reshard import distribute, layout_of, reshard
from weft.reshard.moving.dtensor import wrap

GRID = ProcessMesh.grid(dp=2, tp=1)
CALLS = {
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "index": lambda x: range(9)[wrap(x.to_local().int(), layout_of(x), x.shape)],
    "detached": lambda x: x.detach().item(),
    "data": lambda x: x.data.item(),
    "another-dtype": lambda x: x.double().item(),
    "math": math.log,
    "condition": lambda x: 1 if x else 0,
}
REFUSED_BY_TORCH = {  # for every DTensor, whatever its layout
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": numpy.asarray,
    "in-a-list": lambda x: torch.tensor([x]),
    "format": lambda x: f"{x:.4f}",
    "json": json.dumps,
    "round": round,
}


def addend(op, shape=()):
    return wrap(torch.full(shape, 1.0 + dist.get_rank()), Layout(GRID, f"dp: P({op})"), shape)


def refusals(op):
    found = {}
    for shape in ((), (1,)):
        for name, call in CALLS.items():
            try:
                found[name, shape] = call(addend(op, shape))
            except LayoutError as error:
                found[name, shape] = str(error)
    return found


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
def test_no_number_leaves_a_partial_tensor(pool, op):
    for found in pool.run(refusals, op, ranks=2):
        for call, said in found.items():
            assert "a number was asked of a DTensor that is Partial over 'dp'" in said, call
            assert "reshard(x)" in said, call
            assert "to_local()" in said, call


def refusals_of_torch():
    both = {"addend": addend("sum"), "whole": reshard(addend("sum"))}
    return {(name, of): refuses(call, x) for name, call in REFUSED_BY_TORCH.items() for of, x in both.items()}


def refuses(call, x):
    try:
        call(x)
    except (RuntimeError, TypeError):
        return True
    return False


def test_the_other_ways_are_closed_by_torch(pool):
    for found in pool.run(refusals_of_torch, ranks=2):
        assert all(found.values()), found


def printed():
    return [repr(addend("sum")), str(addend("sum")), f"{addend('sum')}"]


def test_a_printed_partial_says_partial(pool):
    for texts in pool.run(printed, ranks=2):
        assert all("Partial(sum)" in text for text in texts)


def numbers():
    """A whole tensor gives its number: after a reshard, or a comparison, which DTensor reduces first.

    An addend is given on explicit request.
    """
    loss = addend("sum")
    return reshard(loss).item(), float(reshard(loss)), bool(loss > 2.5), loss.to_local().item()


def test_a_whole_tensor_gives_its_number(pool):
    assert pool.run(numbers, ranks=2) == [(3.0, 3.0, True, 1.0), (3.0, 3.0, True, 2.0)]


def alone():
    """On an axis with one process the addend is the sum."""
    x = distribute(torch.tensor(5.0), Layout(ProcessMesh.grid(dp=1), "dp: P"))
    return x.item()


def test_an_addend_of_one_is_the_sum(pool):
    assert pool.run(alone, ranks=1) == [5.0]


def outside():
    """A rank outside the mesh holds no number, and gets an error instead of an invented number."""
    x = wrap(torch.tensor(7.0) if dist.get_rank() == 1 else torch.empty(0), Layout(ProcessMesh([1], ["dp"])), ())
    return x.item() if dist.get_rank() == 1 else refuses(lambda x: x.item(), x)


def test_a_rank_outside_has_no_number(pool):
    assert pool.run(outside, ranks=2) == [True, 7.0]
