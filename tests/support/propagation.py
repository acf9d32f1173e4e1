"""A cache of DTensor's sharding propagation that survives the calls of a worker process.

A worker clears torch's own cache after each call, because its entries hold meshes of destroyed groups. To fill torch's
cache again takes half the time of a small model's first step: for the sum of two gradients on three axes, torch tries
thousands of placements, in 0.3 s. This cache keeps answers without meshes, and puts in the question's meshes when an
answer is read. Slow answers are also kept in files, for other workers and the next run.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from weft.reshard.moving.dtensor import as_process_mesh

ask = ShardingPropagator.propagate_op_sharding_non_cached
LONG = 0.0005  # seconds; slower answers are kept in files


def keep_answers(folder: Path | None = None) -> None:
    """Cache answers in this process from now on.

    folder: where to keep slow answers, in a subfolder per version of torch; None to keep no files.
    """
    answers = _Answers(None if folder is None else folder / f"{torch.__version__}-{torch.version.git_version}")

    def asked_once(self: ShardingPropagator, op_schema: OpSchema) -> OutputSharding:
        if _sharding_prop._are_we_tracing():  # type: ignore[attr-defined]
            return ask(self, op_schema)
        question = _Writer.text_of((str(op_schema.op), op_schema.args_schema, op_schema.kwargs_schema))
        if question is None:
            return ask(self, op_schema)
        text, meshes = question
        if (kept := answers.to(text)) is not None:
            return _read(kept, meshes)
        start = time.process_time()
        found = ask(self, op_schema)
        seconds = time.process_time() - start
        if (
            found.redistribute_schema is None
            and (written := _Writer.text_of(found))
            and written[1].items() <= meshes.items()
        ):
            answers.keep(text, written[0], seconds)
        return found

    ShardingPropagator.propagate_op_sharding_non_cached = asked_once  # type: ignore[method-assign]


class _Answers:
    """Answers by question, both pickled: in this process, and in files."""

    def __init__(self, folder: Path | None) -> None:
        self._here: dict[bytes, bytes] = {}
        self._folder = folder

    def to(self, question: bytes) -> bytes | None:
        if question not in self._here and self._folder is not None:
            with suppress(OSError):
                self._here[question] = self._file(self._folder, question).read_bytes()
        return self._here.get(question)

    def keep(self, question: bytes, answer: bytes, seconds: float) -> None:
        self._here[question] = answer
        if self._folder is not None and seconds > LONG:
            with suppress(OSError):  # without a writable folder, only time is lost
                self._folder.mkdir(parents=True, exist_ok=True)
                file = self._file(self._folder, question)
                part = file.with_suffix(f".{os.getpid()}")
                part.write_bytes(answer)
                part.replace(file)  # atomic: other workers find the complete file or none

    @staticmethod
    def _file(folder: Path, question: bytes) -> Path:
        return folder / hashlib.sha256(question).hexdigest()


class _Writer(pickle.Pickler):
    """Pickles equal values as equal bytes: a mesh as its axes and ranks, a spec as its constructor's arguments."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True  # no memo: equal objects are written alike, whether or not they are the same object
        self.meshes: dict[str, DeviceMesh] = {}

    @classmethod
    def text_of(cls, value: Any) -> tuple[bytes, dict[str, DeviceMesh]] | None:
        """The pickled value, and the meshes named in the pickle.

        None for a value that cannot be kept, such as a size not known yet.
        """
        file = io.BytesIO()
        writer = cls(file)
        try:
            writer.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
            return None
        return file.getvalue(), writer.meshes

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DeviceMesh):
            name = _name_of(value)
            self.meshes[name] = value
            return _mesh_named, (name,)
        if isinstance(value, Tensor):
            raise pickle.PicklingError("a tensor cannot be part of a question")
        if isinstance(value, DTensorSpec):
            order = None if value.use_strided_shard_as_shard_order else value.shard_order
            strided = value.use_strided_shard_as_shard_order
            return DTensorSpec, (value.mesh, value.placements, value.tensor_meta, order, strided)
        return NotImplemented


def _name_of(mesh: DeviceMesh) -> str:
    """The mesh's device, axes and ranks as text, which is kept in the mesh."""
    name: str | None = vars(mesh).get("_name_in_questions")
    if name is None:
        axes = mesh.mesh_dim_names, tuple(mesh.shape)  # a permuted mesh differs in these
        name = f"{mesh.device_type} {axes} {as_process_mesh(mesh)!r}"
        vars(mesh)["_name_in_questions"] = name
    return name


_meshes: dict[str, DeviceMesh] = {}  # of the question whose answer is being read


def _mesh_named(name: str) -> DeviceMesh:
    return _meshes[name]


def _read(text: bytes, meshes: dict[str, DeviceMesh]) -> OutputSharding:
    """Unpickles an answer, with the meshes of the question in place of their names."""
    _meshes.update(meshes)
    try:
        answer: OutputSharding = pickle.loads(text)
        return answer
    finally:
        _meshes.clear()
