"""The weight files of a Hugging Face folder: opened, read, and checked against config.json and checksums.json.

checksums.json is a manifest in Weft's folders, written with the weights, and ignored by transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from weft.mesh import ProcessMesh
from weft.reshard.extension import as_process_mesh, axis_group, device_mesh

from ..safe_files import as_type, check_plain_name, read_json, read_plain
from .fields import Repeats, Stored, common_dtype
from .manifest import CHECKSUMS, CONFIG, DamagedCheckpoint, Manifest, StoredFile, StoredPart, StoredTensor
from .shards import NAMES, open_safetensors, positional_sum, read_header, write_safetensors
from .storage import Piece, check_sums

INDEX_FILE = "model.safetensors.index.json"


def write_with_checksums(
    path: Path, shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]], tensors: Iterable[Tensor]
) -> tuple[StoredFile, dict[str, StoredTensor]]:
    """Writes a safetensors file by `write_safetensors`. Returns the manifest's entries: the file's, and by name the
    tensors'.
    """
    stored: dict[str, StoredTensor] = {}

    def add_checksums() -> Iterable[Tensor]:
        each = iter(tensors)  # `zip` would keep a tensor alive until the next is made
        for name, (dtype, sizes) in shapes.items():
            shape = tuple(sizes)
            starts = (0,) * len(shape)
            tensor = next(each)
            part = StoredPart(starts, shape, path.name, positional_sum(tensor, shape, starts))
            stored[name] = StoredTensor(NAMES[dtype], shape, (part,))
            yield tensor
            del tensor

    return write_safetensors(path, shapes, add_checksums()), stored


class FolderChecksums:
    """Verifies reads from a Hugging Face folder against the folder's checksums.json; does nothing without this file.

    The caller reads tensors through `of`, and calls `check` after the last read.
    Raises DamagedCheckpoint where config.json or the index was changed, and where a file is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = Manifest.read(folder, CHECKSUMS) if (folder / CHECKSUMS).is_file() else None
        self._pieces: dict[tuple[str, int, Piece], int] = {}
        for name in (CONFIG, INDEX_FILE):
            if (folder / name).is_file():
                self.check_content(name, read_plain(folder / name))

    def check_content(self, name: str, content: bytes) -> None:
        """Raises DamagedCheckpoint where a file without tensors was changed after the save."""
        if self._manifest is not None and name in self._manifest.files:
            self._manifest.check(self._folder, name, content)

    def check_header(self, filename: str) -> None:
        """Raises DamagedCheckpoint where the header of a safetensors file was changed after the save."""
        if self._manifest is not None and filename in self._manifest.files:
            self._manifest.check(self._folder, filename, read_header(self._folder / filename))

    def wrap(self, name: str, stored: Any) -> Any:
        """Wraps a tensor's safetensors slices; each read adds a checksum for `check` to compare.

        Raises DamagedCheckpoint where the tensor's dtype or shape in the file differs from checksums.json.
        """
        if self._manifest is None or name not in self._manifest.tensors:
            return stored
        recorded, actual = self._manifest.tensors[name], (stored.get_dtype(), tuple(stored.get_shape()))
        if actual != (recorded.dtype, recorded.shape):
            raise DamagedCheckpoint(
                f"{self._folder} has {name} as {actual}, and {CHECKSUMS} as {(recorded.dtype, recorded.shape)}; "
                f"{self._manifest.remedy}"
            )
        return _ChecksummedSlices(name, stored, self._pieces)

    def check(self, mesh: ProcessMesh | DeviceMesh | None, device: torch.device) -> None:
        """Raises DamagedCheckpoint where a tensor was changed after the save; only tensors read whole, by all ranks
        together, are checked.

        mesh: of the ranks that read the tensors together; None: this process alone.
        Communication: with a mesh and checksums, an all-gather of the checksums along each axis, on `device`.
        """
        if self._manifest is None:
            return
        pieces = self._pieces
        process_mesh = None if mesh is None or not dist.is_initialized() else as_process_mesh(mesh)
        if process_mesh is not None and process_mesh.coordinate(dist.get_rank()) is not None:
            groups = device_mesh(process_mesh, device.type)
            for axis in process_mesh.axis_names:
                of_ranks: list[dict[tuple[str, int, Piece], int]] = [{} for _ in range(process_mesh.axis_size(axis))]
                dist.all_gather_object(of_ranks, pieces, group=axis_group(groups, axis))
                pieces = {key: each for of_rank in of_ranks for key, each in of_rank.items()}
        check_sums(self._folder, self._manifest, pieces)


class _ChecksummedSlices:
    """A tensor's safetensors slices. Each read records a checksum in `pieces`."""

    def __init__(self, name: str, stored: Any, pieces: dict[tuple[str, int, Piece], int]) -> None:
        self._name, self._stored, self._pieces = name, stored, pieces

    def get_shape(self) -> list[int]:
        shape: list[int] = self._stored.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._stored.get_dtype()
        return dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self._stored[part]
        starts = tuple(each.start for each in part)
        piece = starts, tuple(tensor.shape)
        self._pieces[self._name, 0, piece] = positional_sum(tensor, self.get_shape(), starts)
        return tensor


SINGLE_FILE = "model.safetensors"
WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS = 1 << 14  # rows in memory at a time, of each of two compared tensors

OpenTensor = Callable[[], Any]  # returns the slices of a tensor


def open_tensors(folder: Path, files: ExitStack, prefix: str, sums: FolderChecksums) -> dict[str, OpenTensor]:
    """{name of a stored tensor: function returning the tensor's slices}. `sums` records each read.

    files: closes the files. prefix: the family's, as "transformer.", before all tensor names of a model with a head,
    except the head's. Where no stored name has this prefix, the file holds the model without a head, like the published
    GPT-2, and the prefix is put before every name.
    Raises ValueError for a missing file, a file in another format, and a tensor in two files.
    """
    tensors: dict[str, OpenTensor] = {}
    file_of: dict[str, str] = {}
    for filename in weight_files(folder):
        if not (folder / filename).is_file():
            raise ValueError(f"{folder} has no {filename}, which {INDEX_FILE} names; fetch it again")
        sums.check_header(filename)
        file = files.enter_context(open_safetensors(folder / filename, "fetch it again"))
        for name in file.keys():  # noqa: SIM118  safe_open is not iterable
            if name in file_of:
                raise ValueError(
                    f"{folder} holds {name} twice, in {file_of[name]} and in {filename}; remove the file of the older "
                    f"save"
                )
            file_of[name] = filename
            tensors[name] = partial(_slices, sums, file, name)
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files of a folder's model.

    Files outside the index are ignored, as in transformers.
    Raises ValueError for a folder without weights; for a folder with two sets of weights, model.safetensors beside an
    index of further files; and for a file name in the index with a folder.
    """
    single = (folder / SINGLE_FILE).is_file()
    if (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE, "fetch or save it again").get("weight_map")
        if not isinstance(index, dict):
            raise ValueError(f"{folder / INDEX_FILE} has no weight_map; fetch or save it again")
        names = sorted(set(as_type(dict[str, str], index, f"{folder / INDEX_FILE}: weight_map").values()))
        for name in names:
            check_plain_name(name, str(folder / INDEX_FILE))
        if single and SINGLE_FILE not in names:
            raise ValueError(
                f"{folder} has two sets of weights: {SINGLE_FILE}, and "
                f"{', '.join(names[:2])}{', …' * (len(names) > 2)}, which {INDEX_FILE} names; remove {SINGLE_FILE}, "
                f"or {INDEX_FILE} and its files: transformers would take {SINGLE_FILE}"
            )
        return names
    if single:
        return [SINGLE_FILE]
    raise ValueError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; "
        f"save the model with save_pretrained(..., safe_serialization=True)"
    )


def _slices(sums: FolderChecksums, file: Any, name: str) -> Any:
    return sums.wrap(name, file.get_slice(name))


def check_tensors(model: nn.Module, tensors: Mapping[str, OpenTensor], folder: Path, weights: Any) -> None:
    """Raises ValueError if the files do not fit the model. Called before any weight is loaded or converted.

    Refused are a missing tensor of the model, a tensor of a wrong shape or with a dtype outside WEIGHT_DTYPES, and a
    further tensor that is no repetition. A repetition has values that follow from the config or from a second tensor,
    like the head of a tied model. The values are read and compared, because different values would mean a network not
    described by config.json. A tensor of zeros is accepted as an unfilled placeholder.
    weights: the module of the model's family, with the functions `stored` and `repetition`.
    """
    shapes, experts = {}, {}
    for name, parameter in model.named_parameters():
        stored, whole_shape = weights.stored(name), tuple(parameter.shape)
        for i, stored_name in enumerate(stored.names(whole_shape)):
            shapes[stored_name] = stored.shape(whole_shape)
            if stored.stacked:
                experts[stored_name] = f"expert {i} of {whole_shape[0]} in {name.partition('.mlp.')[0]}"
    missing = [name for name in shapes if name not in tensors]
    if missing:
        found = list(dict.fromkeys(experts[name] for name in missing if name in experts))
        lost = f", of {_list_names(found, 'experts')}" if found else ""
        raise ValueError(f"{folder} lacks {_list_names(missing)}{lost}; check config.json against the files")
    repetitions = {name: weights.repetition(name, model.config) for name in tensors if name not in shapes}
    unexpected = [name for name, repeats in repetitions.items() if repeats is None]
    if unexpected:
        raise ValueError(f"{folder} holds {_list_names(unexpected)}, which config.json's model does not have; check it")
    for name, shape in shapes.items():
        stored = tensors[name]()
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{folder}: {name} has shape {tuple(stored.get_shape())}, but config.json makes it {shape}; check it"
            )
        if stored.get_dtype() not in WEIGHT_DTYPES:
            raise ValueError(f"{folder}: {name} is {stored.get_dtype()}; save it as one of {', '.join(WEIGHT_DTYPES)}")
    for name, repeats in repetitions.items():
        if not _is_repetition(tensors[name](), repeats, tensors):
            raise ValueError(f"{folder}: {name} is not {repeats.what}; {repeats.remedy}")


def _is_repetition(stored: Any, repeats: Repeats, tensors: Mapping[str, OpenTensor]) -> bool:
    shape = stored.get_shape()
    if repeats.tensor is None:
        values = _rows(stored, 0, None)
        return repeats.accepts(values) or not values.any()
    repeated = tensors[repeats.tensor]()
    if shape != repeated.get_shape():
        return False
    is_equal = is_zero = True
    for start in range(0, shape[0], _ROWS):
        values, expected = (_rows(each, start, min(start + _ROWS, shape[0])) for each in (stored, repeated))
        is_equal, is_zero = is_equal and bool((values == expected).all()), is_zero and not values.any()
    return is_equal or is_zero


def _rows(stored: Any, start: int, stop: int | None) -> Tensor:
    """Rows `start` to `stop` of a stored tensor (to the end where None); all of a scalar."""
    first, *further = stored.get_shape() or [0]
    part = (slice(start, first if stop is None else stop), *(slice(0, size) for size in further))
    tensor: Tensor = stored[part if stored.get_shape() else ...]
    return tensor


def _list_names(names: list[str], what: str = "tensors") -> str:
    more = f" and {len(names) - 3} more {what}" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_parameter(
    stored: Stored,
    tensors: Mapping[str, OpenTensor],
    part: tuple[slice, ...],
    shape: tuple[int, ...],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read the slices `part` of a parameter of `shape` from the files; a stack expert by expert.

    dtype: of the result. None: the stored dtype; for a stack, the narrowest dtype for all stored values.
    """
    names = stored.names(shape)
    if not stored.stacked:
        file = tensors[names[0]]()
        values = stored.to_parameter_orientation(read_slices(file, stored.slices(part, shape)))
        return values.to(device, dtype or WEIGHT_DTYPES[file.get_dtype()])
    files = [tensors[name]() for name in names]
    dtype = dtype or common_dtype(WEIGHT_DTYPES[file.get_dtype()] for file in files)
    stack = torch.empty([each.stop - each.start for each in part], dtype=dtype, device=device)
    for entry, file in zip(stack, files[part[0]], strict=True):
        entry.copy_(read_slices(file, part[1:]))
    return stack


def read_slices(stored: Any, part: tuple[slice, ...]) -> Tensor:
    """A slice of a stored tensor, copied if safetensors returns a view of the whole tensor's memory."""
    shape = [s.stop - s.start for s in part]
    if 0 in shape:
        return torch.empty(shape, dtype=WEIGHT_DTYPES[stored.get_dtype()])
    tensor: Tensor = stored[part].contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
