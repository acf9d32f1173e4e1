"""Plans for torch's distributed checkpoint (DCP): which rank writes which part of a tensor, and reads which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from ..initialization import local_slices


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """This rank's part of a tensor, to be written to a checkpoint or filled from one. Made by `part_of`.

    No DTensor, because `values` may be a copy on another device than the mesh's.
    """

    shape: tuple[int, ...]  # of the global tensor
    offsets: tuple[int, ...]  # where `values` begins in the global tensor
    values: Tensor

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)

    def copy_to_cpu(self, into: TensorPart | None = None) -> TensorPart:
        """A copy of the part in CPU memory, safe from later training steps.

        into: an earlier copy of the same part to overwrite: allocating memory takes longer than copying. None: in new
        memory.
        """
        if into is None:
            on_gpu = self.values.is_cuda
            into = TensorPart(self.shape, self.offsets, torch.empty_like(self.values, device="cpu", pin_memory=on_gpu))
        into.values.copy_(self.values)
        return into


def part_of(tensor: Tensor) -> TensorPart:
    """This rank's part of a DTensor; all of a plain tensor, which is assumed to be equal on all ranks."""
    local = tensor.detach()
    return TensorPart(
        tuple(tensor.shape),
        tuple(each.start for each in local_slices(tensor)),
        local.to_local() if isinstance(local, DTensor) else local,
    )


class PartSavePlanner(DefaultSavePlanner):
    """Plans a save in which each part is written once. Made by `Snapshot.write` on every rank, for torch's `save`.

    Each rank plans all of its parts that have elements. Of the ranks with the same part, torch's `create_global_plan`
    then picks, on rank 0, the rank with the fewest bytes to write. While writing, `lookup_object` returns the values of
    a part.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        parts: Mapping[str, TensorPart] = self.state_dict
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, torch.Size(part.offsets)),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=part.chunk(),
                        properties=TensorProperties(dtype=part.values.dtype),
                        size=torch.Size(part.shape),
                    ),
                )
                for name, part in parts.items()
                if part.values.numel()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].values


class PartLoadPlanner(DefaultLoadPlanner):
    """Plans a load in which each rank reads only the overlap of the stored parts with the rank's own parts.

    Made by `fill_from` on every rank, for torch's `load`. While reading, `lookup_tensor` returns the tensor to fill.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner was called"
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), "a checkpoint holds tensors alone"
            if part.values.numel():
                own = create_read_items_for_chunk_list(name, stored, [part.chunk()])
                read = sum(torch.Size(item.lengths).numel() for item in own)
                assert read == part.values.numel(), "the parts in the manifest cover the tensor once"
                items += own
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        values: Tensor = self.state_dict[index.fqn].values
        return values
