"""A plan's `exact`, the sizes of the named mesh: read from text, checked, compared with a run's mesh. Without torch.

`weft.reshard.exact_sums` explains the named mesh. In this file, `exact` is the size of each of the named mesh's axes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weft.mesh.extension import largest_part

from .checks import divisors

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
    """Raise ValueError for no mapping, an axis outside of `AXES`, and a size other than a power of two."""
    if not isinstance(exact, Mapping):
        raise ValueError(f'exact is {exact!r}; give the sizes of axes, as {{"dp": 4, "tp": 2}}')
    for axis, size in exact.items():
        if axis not in AXES:
            raise ValueError(f"exact names the axis {axis!r}; it can name {', '.join(AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size & (size - 1):
            raise ValueError(f"exact names {axis}={size!r}; sums are taken in pairs, so give a power of two")


def check_parts(named: Mapping[str, Mapping[str, int] | None]) -> None:
    """Raise ValueError where a merged plan names another mesh than the whole model's plan, the part "".

    named: `exact` of each part's plan, by the part's name.
    """
    whole = named.get("")
    for name, exact in named.items():
        if exact is not None and exact != whole:
            raise ValueError(
                f"the plan merged for {name!r} names exact {in_words(exact)}, and the whole model's, the part '', "
                f"{'none' if whole is None else in_words(whole)}; name one mesh, in the plan of the part ''"
            )


def check_exact(sizes: Mapping[str, int], exact: Mapping[str, int]) -> None:
    """Raise ValueError for a mesh on which sums cannot be taken as on the named mesh.

    sizes: of the mesh's axes; absent axes have size 1. The axis "pp" may have any size.
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


def check_cut(exact: Mapping[str, int], axis: str, size: int, what: str) -> None:
    """Raise ValueError for a dim that a mesh within the named one cuts elsewhere than the named mesh.

    size: of the dim, cut over `axis`. what: the dim in words, with its size. A multiple of the named size always fits.
    """
    named = exact.get(axis, 1)
    ways = _other_cut(named, size)
    if ways is not None:
        own, count = largest_part(size, ways), named // ways
        of_named = min(size, count * largest_part(size, named))
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with {what}: on a mesh of {axis}={ways} the first rank has {own}, "
            f"and the first {count} of {axis}={named} have {of_named}; give a multiple of {named}, or name a smaller "
            f"{axis}"
        )


def _other_cut(named: int, size: int) -> int | None:
    """The largest divisor of `named`, a power of two, over which a dim is cut elsewhere than over `named`, or None."""
    ways = named // 2
    while ways > 1:
        if size > 1 and largest_part(size, ways) != named // ways * largest_part(size, named):
            return ways
        ways //= 2
    return None


def fitting_part(exact: Mapping[str, int], rows: int) -> int:
    """The most rows in a part, if `rows` are cut into parts that `check_cut` allows, the shorter last part included."""
    named = exact.get("dp", 1)
    fits = (n for n in range(rows, 0, -1) if _other_cut(named, n) is None and _other_cut(named, rows % n) is None)
    return next(fits, 0)


def check_batch(exact: Mapping[str, int], rows: int, tokens: int) -> None:
    """Raise ValueError for a microbatch that a mesh within the named one cuts elsewhere: see `check_cut`.

    rows: over all ranks. tokens: of a row.
    """
    check_cut(exact, "dp", rows, f"{rows} rows in a microbatch")
    most = largest_part(tokens, exact.get("cp", 1))
    for length in (most, tokens % most if most else 0):
        check_cut(exact, "tp", length, f"{length} tokens in a row" + (" of a cp rank" if length < tokens else ""))


def check_laid_out(exact: Mapping[str, int], rows: int, tokens: int, microbatches: int) -> None:
    """As `check_batch`, for a batch laid out before it is divided; raises ValueError for several microbatches, too."""
    if microbatches > 1:
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with {microbatches} microbatches of tokens that are laid out "
            f"already: each rank would divide its own rows, which are other rows on each mesh; give plain tokens [B, T]"
        )
    check_batch(exact, rows, tokens)


def refuse_compiled(exact: Mapping[str, int]) -> None:
    """Raise the ValueError for a model whose blocks are compiled; called for such models alone."""
    raise ValueError(
        f"the model is compiled, but the numbers of a compiled block depend on its shapes, and exact {in_words(exact)} "
        f"promises the same on each mesh; leave out one of the two"
    )


def check_ulysses(exact: Mapping[str, int]) -> None:
    """Raise ValueError for a named mesh with tp and cp; called for plans with context="ulysses" alone.

    Heads are sharded over tp, and within a shard over cp. A rank that stands for several coordinates of tp would have
    heads that are not side by side.
    """
    if exact.get("tp", 1) > 1 and exact.get("cp", 1) > 1:
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with the context ulysses, which cuts heads over tp and then over "
            f"cp: a rank of a smaller tp would have heads that are not side by side; name tp=1 or cp=1, or take the "
            f"context all_gather"
        )


def check_task(exact: Mapping[str, int], task: str) -> None:
    """Raise ValueError for dpo and kto, whose loss each rank computes over all local rows at once."""
    if task in ("dpo", "kto"):
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with the task {task}: each rank computes the loss of all its rows "
            f"at once; leave out exact"
        )


def check_microbatches(exact: Mapping[str, int], microbatches: int | None, rows: int) -> None:
    """Raise ValueError for a pipeline without a given number of microbatches: the default depends on the mesh.

    microbatches: as given; None without a number. rows: of the batch, for the remedy.
    """
    if microbatches is None:
        named = exact.get("dp", 1)
        fit = ", ".join(str(n) for n in divisors(rows) if _other_cut(named, rows // n) is None)
        raise ValueError(
            f"exact {in_words(exact)} adds one microbatch after another, and a pipeline chooses their number by its "
            f"mesh; give --plan.microbatches, the same on every mesh: {fit}; without a pipeline it is 1"
        )


def check_shared(exact: Mapping[str, int], name: str, stages: Sequence[Collection[int]]) -> None:
    """Raise ValueError for a trained parameter that stages of a pipeline share otherwise than a tied table.

    name: of the parameter. stages: for each module that has the parameter, the stages that call the module.
    """
    if len(stages) != 2 or any(len(each) != 1 for each in stages):
        shown = " and ".join(", ".join(map(str, sorted(each))) for each in stages)
        raise ValueError(
            f"exact {in_words(exact)} cannot be kept with {name} on the stages {shown}: the gradients of its uses are "
            f"added in another order than on one stage, but for two modules on one stage each; leave out the pipeline"
        )


def in_words(exact: Mapping[str, int]) -> str:
    """The sizes as text for `parse_exact`."""
    return ",".join(f"{axis}={size}" for axis, size in exact.items())
