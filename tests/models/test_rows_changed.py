"""Modules computed on local tensors and changed after a first call: the next call sees the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from weft.mesh import ProcessMesh
from weft.models import lay_out_batch, parallelize
from weft.reshard import to_global

from tests.models.test_rows import PLAN, TOLERANCE, batch, freeze, hook, made, put_own, seeing, wrap_forward


def of_another_class(model: Any) -> None:
    mlp = model.layers[0].mlp
    mlp.__class__ = type("Other", (type(mlp),), {})


def with_other_numbers(model: Any) -> None:
    """Give a parameter different local tensors, of the parameter's own class."""
    norm = model.norm
    norm.weight = nn.Parameter(norm.weight.detach() * 2)


def swapped(model: Any) -> None:
    """The same parameter, with all that another has."""
    weight = model.norm.weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))


def written(model: Any) -> None:
    with torch.no_grad():
        model.norm.weight.mul_(2)


def compiled(model: Any) -> None:
    model.layers[0].mlp.compile(backend="eager")


# By name: the change to a model that has computed before, and the types that its blocks see afterwards.
LATER: dict[str, tuple[Callable[[Any], None], set[str]]] = {
    "hooked": (hook, {"DTensor"}),
    "own-module": (put_own, {"DTensor"}),
    "own-forward": (wrap_forward, {"DTensor"}),
    "own-class": (of_another_class, {"DTensor"}),
    "compiled": (compiled, {"DTensor"}),
    "own-parameter": (with_other_numbers, {"plain"}),
    "swapped-parameter": (swapped, {"plain"}),
    "written-parameter": (written, {"plain"}),
    "frozen": (freeze, {"plain"}),
}


def changed_later() -> None:
    tokens, _ = batch()
    for name, (change, sees) in LATER.items():
        model, alone = made(), made()
        parallelize(model, ProcessMesh.grid(dp=2), PLAN)
        laid = lay_out_batch(ProcessMesh.grid(dp=2), PLAN, tokens).tokens
        for _ in range(2):
            to_global(model(laid))
        change(model)
        change(alone)
        with seeing() as seen:
            found = to_global(model(laid))
        assert seen == sees, name
        torch.testing.assert_close(found, alone(tokens), **TOLERANCE, msg=name)


@pytest.mark.exhaustive
def test_a_change_after_a_call_is_seen_by_the_next_call(pool: Any) -> None:
    pool.run(changed_later, ranks=2)
