"""Each rank's parameters own memory of their shards' size, and no more: they can be copied, saved and freed alone."""

import copy
import io

import pytest
import torch
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.models import GPT, GPTConfig, from_pretrained, initialize, parallelize, save_checkpoint, save_pretrained

from tests.models.cases import SMALL, make

MESHES = {"tp4": {"tp": 4}, "dp2-tp2": {"dp": 2, "tp": 2}, "dp4": {"dp": 4}}
DOORS = ["folder", "checkpoint", "parallelized"]


def gpt():
    model = GPT(GPTConfig(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, max_seq_len=16))
    initialize(model, 0)
    return model


KINDS = {"llama": lambda: make(SMALL), "gpt": gpt}


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def memory_of(kind, door, axes, folder):
    """By parameter, the bytes of its storage and of its values; and the bytes that torch.save adds to the values'."""
    mesh = ProcessMesh.grid(**axes) if axes else None
    if door == "parallelized":
        model = parallelize(KINDS[kind](), mesh)
    else:
        model = from_pretrained(folder, mesh)
    copied = copy.deepcopy(model)
    shards = {name: local(each).detach() for name, each in model.named_parameters()}
    for name, each in copied.named_parameters():
        assert torch.equal(local(each), shards[name]), name
    written = io.BytesIO()
    torch.save(shards, written)
    storages = {name: (each.untyped_storage().nbytes(), each.nbytes) for name, each in shards.items()}
    return storages, written.getbuffer().nbytes - sum(each.nbytes for each in shards.values())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", MESHES)
def test_storages_are_of_the_shards_size(pool, tmp_path, kind, door, axes):
    save = {"folder": save_pretrained, "checkpoint": save_checkpoint}.get(door)
    if save is not None:
        save(KINDS[kind](), tmp_path / "saved")
    for storages, beyond in pool.run(memory_of, kind, door, MESHES[axes], tmp_path / "saved", ranks=4):
        assert {name: sizes for name, sizes in storages.items() if sizes[0] != sizes[1]} == {}
        assert beyond < 500 * (len(storages) + 10)  # names and alignment


@pytest.mark.parametrize("door", ["folder", "checkpoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_one_process_owns_its_parameters(tmp_path, kind, door):
    {"folder": save_pretrained, "checkpoint": save_checkpoint}[door](KINDS[kind](), tmp_path / "saved")
    storages, _ = memory_of(kind, door, {}, tmp_path / "saved")
    assert {name: sizes for name, sizes in storages.items() if sizes[0] != sizes[1]} == {}
