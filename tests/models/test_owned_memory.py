"""Each rank's parameters own memory of their shards' size, and no more: they can be copied, saved and freed alone."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPT,
    GPTConfig,
    forward_backward,
    from_pretrained,
    initialize,
    parallelize,
    save_checkpoint,
    save_pretrained,
)

from tests.models.cases import SMALL, make, some_tokens

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


def states_of_a_trained_model():
    """Sizes of a state_dict's storages and values after each of two steps, which change no copy of the state_dict."""
    sizes, tokens = {}, some_tokens(SMALL, T=9)
    for zero in (1, 2, 3):
        model = make(SMALL)
        parallelize(model, ProcessMesh.grid(dp=2), replace(model.parallel_plan(), zero=zero))
        optimizer, copies = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(2):
            forward_backward(model, cross_entropy, tokens[:, :-1], tokens[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            state = {name: local(each) for name, each in model.state_dict().items()}
            sizes |= {(zero, step, name): (e.untyped_storage().nbytes(), e.nbytes) for name, e in state.items()}
            copies.append(copy.deepcopy(model.state_dict()))
        for name, each in model.named_parameters():
            assert torch.equal(local(copies[1][name]), local(each)), name
            assert not torch.equal(local(copies[0][name]), local(each)), name
    return sizes


def test_a_state_dict_owns_its_memory_under_zero(pool):
    for sizes in pool.run(states_of_a_trained_model, ranks=2):
        assert {name: each for name, each in sizes.items() if each[0] != each[1]} == {}
