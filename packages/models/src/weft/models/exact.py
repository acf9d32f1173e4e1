"""A plan's `exact`, the sizes of the named mesh: read from text, checked, compared with a run's mesh. Without torch.

`weft.reshard.exact_sums` takes the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AXES = ("dp", "cp", "tp")  # the axes allowed in exact


def parse_exact(text: str) -> dict[str, int]:
    """The sizes in a text like "dp=4,tp=2". Raises ValueError for malformed text, and as `check_sizes`."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (part.strip() for part in item.partition("="))
        if not size.isdecimal() or axis in sizes:
            raise ValueError(f"exact is {text!r}; give each axis once with its size, as in dp=4,tp=2")
        sizes[axis] = int(size)
    check_sizes(sizes)
    return sizes


def check_sizes(exact: Mapping[str, Any]) -> None:
    """Raise ValueError for an axis outside of `AXES`, and for a size other than a power of two."""
    for axis, size in exact.items():
        if axis not in AXES:
            raise ValueError(f"exact names the axis {axis!r}; it can name {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size & (size - 1):
            raise ValueError(f"exact names {axis}={size!r}; sums are taken in pairs, so give a power of two")


def check_exact(sizes: Mapping[str, int], exact: Mapping[str, int]) -> None:
    """Raise ValueError for a mesh on which sums cannot be taken as on the mesh named by `exact`.

    sizes: of the mesh's axes; absent axes have size 1. The axis "pp" is free.
    """
    shown = in_words(exact)
    for axis, size in sizes.items():
        named = exact.get(axis, 1)
        if axis == "pp" or size == 1 == named:
            continue
        if axis == "ep":
            raise ValueError(f"exact {shown} cannot be kept with experts over ep={size}; leave out the axis ep")
        if named % size:
            raise ValueError(
                f"exact {shown} means {axis}={named}, and {axis}={size} of the mesh does not divide it; choose a "
                f"divisor of {named}, or name {axis}={size}"
            )
        if axis == "cp" and named != size:
            raise ValueError(
                f"exact {shown} means {axis}={named}, and the mesh has {axis}={size}: the tokens of a row are ordered "
                f"for one number of ranks; give the mesh {axis}={named}"
            )
    if exact.get("cp", 1) != sizes.get("cp", 1):
        raise ValueError(
            f"exact {shown} names cp={exact['cp']}, and the mesh has no cp; give the mesh cp={exact['cp']}"
        )


def refuse_compiled(exact: Mapping[str, int]) -> None:
    """Raise ValueError, for a model whose blocks are compiled."""
    raise ValueError(
        f"the model is compiled, but the numbers of a compiled block depend on its shapes, and exact {in_words(exact)} "
        f"promises the same on each mesh; leave out one of the two"
    )


def check_task(exact: Mapping[str, int], task: str) -> None:
    """Raise ValueError for a task whose loss each rank computes of all its rows at once."""
    if task in ("dpo", "kto"):
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with the task {task}: each rank computes the loss of all its rows "
            f"at once; leave out exact"
        )


def check_microbatches(exact: Mapping[str, int], microbatches: int | None, rows: int) -> None:
    """Raise ValueError for a pipeline with an unnamed number of microbatches, which would depend on the mesh.

    rows: of the batch, for the remedy.
    """
    if microbatches is None:
        fit = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise ValueError(
            f"exact {in_words(exact)} adds one microbatch after another, and a pipeline chooses their number by its "
            f"mesh; give --plan.microbatches, the same on every mesh: {fit}; without a pipeline it is 1"
        )


def check_schedule(exact: Mapping[str, int], schedule: str, zero: int) -> None:
    """Raise ValueError for the schedule whose order of sums differs from exact's under zero 2 and 3: zero_bubble."""
    if schedule == "zero_bubble" and zero > 1:
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with schedule zero_bubble and zero={zero}: the gradients of norms "
            f"wait for the delayed gradients of matrices, so that those of several microbatches are added before the "
            f"ranks' sum; take another schedule, or zero 0 or 1"
        )


def check_shared(exact: Mapping[str, int], name: str, pp: int) -> None:
    """Raise ValueError for a trained parameter that several stages of a pipeline share, such as a tied table.

    name: of the parameter. pp: the ranks of the pipeline.
    """
    if pp > 1:
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with pp={pp} and {name} on several stages: the gradients of its "
            f"uses are added after the ranks' sum there, and before it on one stage; take pp=1, or an untied model"
        )


def in_words(exact: Mapping[str, int]) -> str:
    """The sizes as text for `parse_exact`."""
    return ",".join(f"{axis}={size}" for axis, size in exact.items())
