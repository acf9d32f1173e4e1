"""The files of a precomputed reference (reference.py): log-probabilities under an identity, a SHA-256.

A file beside the data, for all runs, has the log-probabilities of a source; `find_identities` gives the identity, and
the identity gives the file's name. `TABLE` in a run's folder has the log-probabilities of all the run's sources, for
`--resume`; `run_identity` gives the identity.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..checkpoint.configs import base_folder, is_adapter_folder
from ..checkpoint.huggingface import attempt
from ..data.examples.source import ExampleMixture, Examples
from ..data.manifest import file_sha256
from ..safe_files import read_plain, write_first, write_shared
from .config import TrainConfig
from .run import Run
from .saved_run import as_json

TABLE = "reference.npy"  # in the run's folder
_FORMAT = 1  # a number in every identity; raise the number when the files or the computing change


def sources_of(data: Examples | ExampleMixture) -> list[Examples]:
    """The sources of a run's examples, in the order of the table: a source's rows follow the previous source's rows."""
    return [source for source, _ in data.parts] if isinstance(data, ExampleMixture) else [data]


def find_data_file(source: Examples, identity: str) -> Path:
    """The file beside a source's data. Hidden, since a run reads all visible files of a folder as data."""
    folder = source.folder if source.folder.is_dir() else source.folder.parent
    return folder / f".reference-{identity[:16]}.npy"


def find_identities(run: Run) -> list[str]:
    """The identity of each source's log-probabilities under the run's reference.

    An identity is a SHA-256 of: the reference's weights (every byte of its folder, or the seed), its config, the
    examples as tokenized and cut, the tokenizer, task and dtype. Mesh, packing and batch size are left out: these
    change the numbers by rounding alone. The losses' options do not change the numbers.
    Communication: an all-gather of checksums; each rank reads a share of the files and of the sources. Raises OSError
    and ValueError, on every rank, for a file that cannot be read.
    """
    config, sources = run.config, sources_of(run.corpus)  # type: ignore[arg-type]
    folder = run.reference or run.origin or run.resume
    paths = [] if folder is None else _files_of(folder)
    sums = _sums_by_all_ranks(
        [*(partial(file_sha256, path) for path in paths), *(partial(_examples_sha256, source) for source in sources)]
    )
    weights: list[list[str | int]] = [[path.name, each] for path, each in zip(paths, sums, strict=False)]
    shared = [_FORMAT, weights or [["seed", config.seed]], as_json(config)["model"], config.dtype, config.task]
    return [
        hashlib.sha256(json.dumps([*shared, source.tokenizer.sha256, of_examples]).encode()).hexdigest()
        for source, of_examples in zip(sources, sums[len(paths) :], strict=True)
    ]


def run_identity(config: TrainConfig, data_sha256: str) -> str:
    """The identity in `TABLE`: a SHA-256 of the options and data that must be equal in a resumed run.

    data_sha256: the checksum of the run's data.
    """
    content = [data_sha256, config.task, config.data.sequence_length, str(config.reference_from)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_table(path: Path, identity: str, table: Tensor) -> None:
    """Read a file into `table`: float32 [examples, segments], with a segment for each text of an example.

    Raises FileNotFoundError for a missing file, and ValueError or OSError for a file that is damaged, of another
    identity or of another size.
    """
    parts = read_plain(path).split(b"\n", 2)
    if len(parts) != 3 or hashlib.sha256(parts[2]).hexdigest().encode() != parts[1]:
        raise ValueError("it was changed after it was written")
    if parts[0] != identity.encode():
        raise ValueError("it was computed for other data or another reference")
    found = torch.from_numpy(np.load(io.BytesIO(parts[2]), allow_pickle=False))
    if found.shape != table.shape:
        raise ValueError(f"it has {list(found.shape)} numbers, and the data {list(table.shape)}")
    table.copy_(found)


def write_table(path: Path, identity: str, table: Tensor) -> None:
    """Write a file, complete or not at all, even while other runs write the same file. Raises OSError."""
    write_shared(path, _content_of(identity, table))


def share_table(path: Path, identity: str, table: Tensor) -> bool:
    """Write a file unless another run has written it by now, whose numbers then replace those in `table`.

    All runs thus take the numbers of the first run; a further run's may differ by rounding. Returns whether the file
    has this run's numbers. A damaged file is replaced. Raises OSError for a file that cannot be written.
    """
    content = _content_of(identity, table)
    try:
        write_first(path, content)
        return True
    except FileExistsError:
        pass
    try:
        read_table(path, identity, table)
    except (OSError, ValueError):
        write_shared(path, content)
        return True
    return _content_of(identity, table) == content


def _content_of(identity: str, table: Tensor) -> bytes:
    content = io.BytesIO()
    np.save(content, table.numpy(), allow_pickle=False)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    return b"\n".join((identity.encode(), digest.encode(), content.getvalue()))


def _files_of(folder: Path) -> list[Path]:
    """The files of a model's folder; of a folder of adapters also those of the base.

    Raises ValueError as `base_folder`.
    """
    folders = [folder, base_folder(folder)] if is_adapter_folder(folder) else [folder]
    return [
        path for each in folders for path in sorted(each.iterdir()) if path.is_file() and not path.name.startswith(".")
    ]


def _sums_by_all_ranks(functions: Sequence[Callable[[], str]]) -> list[str]:
    """The results of the functions, each called on one rank. Communication: an all-gather.

    Raises, on every rank, the OSError or ValueError of the first rank with one.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own: dict[int, str] = {}

    def call_own() -> None:
        own.update({number: functions[number]() for number in range(rank, len(functions), world)})

    of_ranks: list[tuple[dict[int, str], Exception | None]] = [({}, None)] * world
    dist.all_gather_object(of_ranks, (own, attempt(call_own)))
    for of_rank, error in of_ranks:
        if error is not None:
            raise error
        own |= of_rank
    return [own[number] for number in range(len(functions))]


def _examples_sha256(source: Examples) -> str:
    """The SHA-256 of a source's examples as tokenized, of the length of the cut, and of the examples kept."""
    digest = hashlib.sha256(f"{source.length} {len(source)}\n".encode())
    for part in source.parts:
        arrays = part.arrays
        for each in (arrays.tokens, arrays.masks, arrays.ends, arrays.labels, source.numbers):
            digest.update(f"{each.dtype} {each.size}\n".encode())
            digest.update(np.ascontiguousarray(each).data if each.size else b"")
    return digest.hexdigest()
