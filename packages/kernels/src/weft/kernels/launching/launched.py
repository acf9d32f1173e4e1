"""How kernels are launched, as torch ops and in tiles of rows; and tables of measurements, by which ops choose between
two ways to compute.

`launched`: tracing, recomputation and dispatch modes see a single op for each launch. On tensors without data (meta and
fake tensors) nothing is launched. `RowTile`: how many rows and warps a program has, for kernels which read each row
once. `contiguous_rows`: a tensor as rows. `TableRow`: a row of a table of measurements, a JSON file with a line for
each row. A row gives the times of two ways to compute a class of calls; for products, the fastest configuration too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, get_type_hints

import torch
from torch import Tensor, library

from ..dispatch.backend import is_compiling


class TableRow:
    """Base class of rows: dataclasses with a field `of`, a NamedTuple, which is the row's key in the table.

    The other fields are numbers, strings or dataclasses.
    """

    of: Any

    @classmethod
    def read(cls, file: Path) -> dict[Any, Self]:
        """The table in a JSON file, by key."""
        kinds = get_type_hints(cls)
        rows = (
            cls(**{name: kinds[name](**value) if isinstance(value, dict) else value for name, value in row.items()})
            for row in json.loads(file.read_text())
        )
        return {row.of: row for row in rows}

    def as_json(self) -> dict[str, Any]:
        """The fields; a key or a dataclass as a dict."""
        assert is_dataclass(self)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value._asdict() if name == "of" else asdict(value) if is_dataclass(value) else value
            for name, value in values.items()
        }


def write_table(rows: Mapping[Any, TableRow], file: Path) -> None:
    """Writes a table with a line for each row, for short diffs when a measurement changes."""
    lines = [json.dumps(rows[of].as_json()) for of in sorted(rows)]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")


# The longest row in bytes. A program holds rows in registers from load to store; longer rows would spill, and are
# computed in plain torch.
LONGEST_BYTES = 32 * 1024
MOST_WARPS = 16


def block_length(length: int) -> int:
    """A block's length: `length` rounded up to a power of two, at least 16 for tensor cores."""
    return max(16, 1 << (length - 1).bit_length())


@dataclass(frozen=True, slots=True)
class RowTile:
    """How many rows a program holds at once, and with how many warps. `RowTile.of` chooses both for a row length."""

    rows: int  # of a tile; a program computes a tile, or several in turn
    block: int  # the row length, rounded up to a power of two of 16 or more
    warps: int  # of a program, shared by the rows

    @classmethod
    def of(cls, length: int, elements: int) -> RowTile:
        """The tile for rows of `length` elements.

        elements: how many elements of the tile each thread holds. A thread holds more where a row would otherwise take
            more than MOST_WARPS warps.
        """
        block = block_length(length)
        warps = min(MOST_WARPS, max(1, block // (32 * elements)))
        return cls(max(1, 32 * elements // block), block, warps)


def fits(x: Tensor, length: int) -> bool:
    """Whether a row of `length` elements of x's dtype fits into a tile."""
    return 0 < length * x.itemsize <= LONGEST_BYTES


def contiguous_rows(x: Tensor, length: int) -> Tensor:
    """x as [N, length] with contiguous rows: a view if a single stride reaches every row, otherwise a copy."""
    rows = x.reshape(x.numel() // max(1, length), length)
    return rows if rows.stride(-1) == 1 or length < 2 else rows.contiguous()


def vector_of(weight: Tensor | None) -> Tensor | None:
    """A weight or bias [H] made contiguous for a kernel; None stays None."""
    return None if weight is None else weight.contiguous()


def programs_of(tensor: Tensor, tiles: int, warps: int, at_work: int) -> int:
    """The number of programs to launch for `tiles` tiles: as many as run at once on the GPU. Programs loop over tiles.

    tensor: for the device. warps: of a program. at_work: how many warps to run at once on each multiprocessor.
    At least 1 even without tiles, because a program also writes outputs of fixed shape. In Triton's interpreter at
    most 3, so that a program has several tiles.
    """
    if tensor.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(tensor.device).multi_processor_count
        return max(1, min(tiles, multiprocessors * max(1, at_work // warps)))
    return max(1, min(tiles, 3))


LIBRARY = library.Library("weft", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has no types for it


def launched(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator for a function which launches kernels writing into given tensors. Returns a torch op, `weft::<name>`.

    schema: as for torch.library, without namespace and return value; the tensors written are `Tensor(a!)`.

    The caller allocates the written tensors with torch's own ops: the launch needs no shape rule. With
    `torch.library.custom_op` each call would cost the host several times as much.
    """
    name = schema.partition("(")[0]

    def decorator(launch: Callable[..., None]) -> Callable[..., None]:
        LIBRARY.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
        LIBRARY.impl(name, launch, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        library.register_fake(f"weft::{name}", _do_nothing, lib=LIBRARY)
        op: Callable[..., None] = getattr(torch.ops.weft, name).default
        return op

    return decorator


def communicating(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`launched` for a function which communicates: calls go to the torch op while tracing, else to the function.

    Within a torch op, collectives would be hidden from dispatch modes, such as a counter of collectives. Used by the
    products of matmul/sharded/overlapped.py.
    """

    def decorator(run: Callable[..., None]) -> Callable[..., None]:
        op = launched(schema)(run)

        def run_or_trace(*arguments: Any) -> None:
            (op if is_compiling() else run)(*arguments)

        return run_or_trace

    return decorator


def _do_nothing(*arguments: Any, **options: Any) -> None:
    """The op on tensors without data. No shape is inferred: the caller has allocated the tensors to write."""
