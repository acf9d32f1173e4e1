"""Arguments of a wrong kind, of the losses over process groups and of pack and unpack, which only packages call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from weft import kernels
from weft.kernels.extension import pack, unpack

from tests.kernels.test_arguments import CLASSES, COUNT, INT, NAN, TWO, WEIGHT, X
from tests.support.pool import Pool

PARTS = (*COUNT, 3)
WIDTHS: tuple[Any, ...] = (
    "44", None, 8, (4.0, 4.0), (True, 7), (NAN, 8), (4, None), (-1, 9), (0, 8), (), [], (4, 3), torch.tensor([4, 4])
)  # fmt: skip
GROUP: tuple[Any, ...] = (None, "WORLD", 1, True, [0], {}, TWO, 1.0)
CLASS, CLASSES_IN_ALL = (*INT, -1, 1), (*INT, -1, 0, 7, 9)


IN_GROUPS: dict[str, tuple[Tensor, ...]] = {
    "vocab_parallel_cross_entropy": (X, CLASSES), "vocab_parallel_linear_cross_entropy": (X, WEIGHT, CLASSES)
}  # fmt: skip


def refused_in_a_group(name: str) -> list[str]:
    """The errors of wrong groups and of wrong classes of a rank, on a rank that holds the vocabulary alone."""
    op, right = getattr(kernels, name), {"group": dist.group.WORLD, "vocab_start": 0, "vocab_size": 8}
    assert op(*IN_GROUPS[name], **right).isfinite()
    found = []
    for argument, values in (("group", GROUP), ("vocab_start", CLASS), ("vocab_size", CLASSES_IN_ALL)):
        for value in values:
            with pytest.raises(ValueError, match=rf"{argument} is|hold .*classes") as error:
                op(*IN_GROUPS[name], **(right | {argument: value}))
            found.append(str(error.value))
    return found


@pytest.mark.parametrize("name", IN_GROUPS)
def test_groups_and_classes_of_a_wrong_kind_are_refused(name: str, pool: Pool) -> None:
    (found,) = pool.run(refused_in_a_group, name, ranks=1)
    assert all("\n" not in each and "; " in each for each in found), found


@pytest.mark.parametrize("parts", PARTS, ids=repr)
def test_parts_that_pack_refuses(parts: Any) -> None:
    with pytest.raises(
        ValueError, match=r"pack: (parts is .*; give an int|the last dim must be a multiple of 3 above 0)"
    ):
        pack(X, WEIGHT[:4], parts=parts)


@pytest.mark.parametrize("widths", WIDTHS, ids=repr)
def test_widths_that_unpack_refuses(widths: Any) -> None:
    packed = pack(X[:, :4], X[:, 4:], parts=1)
    assert len(unpack(packed, [4, 4])) == 2
    with pytest.raises(ValueError, match=r"unpack: (widths is .*; give ints|the widths .* sum to)"):
        unpack(packed, widths)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pack(parts=2), lambda: pack(X.tolist(), parts=2), lambda: pack(X.sum(), parts=1),
        lambda: pack(X[:, :0], parts=2), lambda: unpack(X.tolist(), (4, 4)), lambda: unpack(X[0], (4, 4)),
    ],
    ids=["no-tensors", "a-list", "a-scalar", "no-width", "packed-list", "packed-vector"],
)  # fmt: skip
def test_tensors_that_pack_and_unpack_refuse(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"^(pack|unpack)"):
        call()
