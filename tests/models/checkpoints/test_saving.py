"""Checkpoints: their contents, how much a load reads, and training while a save is under way."""

from __future__ import annotations

import json
import pickletools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weft.kernels import cross_entropy
from weft.models import forward_backward, from_pretrained, load_checkpoint, read_run, save_checkpoint
from weft.models.checkpoint.manifest import Manifest
from weft.models.checkpoint.shards import positional_sum
from weft.models.checkpoint.states import snapshot

from tests.models.checkpoints.states import CASES, Case, fill_state, held, make
from tests.support.pool import Pool

WIDE: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_kv_heads": 4}


def made(seed: int = 1, **config: Any) -> tuple[Any, torch.optim.Optimizer]:
    model, optimizer = make(Case(), seed=seed, **config)
    fill_state(model, optimizer, seed)
    return model, optimizer


def test_anchor_31_what_changes_after_the_copy_does_not_show_in_the_file(tmp_path: Path) -> None:
    model, optimizer = made()
    truth = held(model, optimizer)
    copy = snapshot(model, optimizer).copy_to_cpu()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(each for state in optimizer.state.values() for each in state.values())):
            tensor.add_(1)
    copy.write(tmp_path / "saved")
    model, optimizer = make(Case(), seed=2)
    load_checkpoint(model, tmp_path / "saved", optimizer)
    loaded = held(model, optimizer)
    assert [name for name in truth if not torch.equal(truth[name], loaded[name])] == []


UNEVEN = Case(axes={"dp": 3}, plan={"zero": 3})  # of 16 rows ranks have 6, 6 and 4


def losses_of(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of steps whose batches are the same in every run."""
    found = []
    for step in steps:
        tokens = torch.randint(0, 33, (6, 9), generator=torch.Generator().manual_seed(step))
        found.append(forward_backward(model, cross_entropy, tokens[:, :-1], tokens[:, 1:]).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def went_on(folder: Path) -> tuple[tuple[int, ...], list[float]]:
    """This rank's shape of a weight, and the losses after a second snapshot, which reused the first copy's memory."""
    model, optimizer = make(UNEVEN, seed=1, num_layers=1)
    losses_of(model, optimizer, range(1))
    copy = snapshot(model, optimizer).copy_to_cpu()
    losses_of(model, optimizer, range(1, 2))
    snapshot(model, optimizer).copy_to_cpu(copy).write(folder)
    return tuple(model.layers[0].self_attn.q_proj.weight.to_local().shape), losses_of(model, optimizer, range(2, 5))


def resumed(case: Case, folder: Path) -> list[float]:
    model, optimizer = make(case, seed=2, num_layers=1)
    load_checkpoint(model, folder, optimizer)
    return losses_of(model, optimizer, range(2, 5))


def test_anchor_31_uneven_shards_resume_to_the_losses_of_the_run_that_went_on(tmp_path: Path, pool: Pool) -> None:
    """The same bits on the same mesh; on one process up to rounding."""
    shapes, losses = zip(*pool.run(went_on, tmp_path / "saved", ranks=3), strict=True)
    assert shapes == ((6, 16), (6, 16), (4, 16))
    assert list(losses) == pool.run(resumed, UNEVEN, tmp_path / "saved", ranks=3)
    assert resumed(Case(), tmp_path / "saved") == pytest.approx(losses[0], rel=1e-5)


def test_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    save_checkpoint(*made()[:1], tmp_path / "saved", run={"step": 3})
    for path in (tmp_path / "saved").iterdir():
        if path.suffix == ".safetensors":
            assert load_file(path)
        else:
            json.loads(path.read_text())
        with pytest.raises(ValueError):
            list(pickletools.genops(path.read_bytes()))
    assert read_run(tmp_path / "saved") == {"step": 3}


def bytes_read(case: Case, folder: Path) -> tuple[int, int]:
    """Bytes that a rank has read, and bytes that it holds."""
    model, optimizer = make(case, seed=2, **WIDE)
    reader = load_checkpoint(model, folder, optimizer)
    return reader.nbytes, sum(each.nbytes for each in held(model, optimizer).values())


@pytest.mark.parametrize("dst", ["tp2", "zero3-dp4", "pp2-other-sizes-dp2"])
@pytest.mark.parametrize("src", ["one", "zero1-dp2-tp2"])
def test_paddlenlp_9412_a_rank_reads_its_bytes_of_a_checkpoint_and_no_more(
    src: str, dst: str, tmp_path: Path, pool: Pool
) -> None:
    pool.run(save_wide, CASES[src], tmp_path / "saved", ranks=CASES[src].ranks)
    for nbytes, own in pool.run(bytes_read, CASES[dst], tmp_path / "saved", ranks=CASES[dst].ranks):
        assert own <= nbytes <= 1.1 * own


def save_wide(case: Case, folder: Path) -> None:
    model, optimizer = make(case, seed=1, **WIDE)
    fill_state(model, optimizer, 1)
    save_checkpoint(model, folder, optimizer)


def test_a_checkpoint_is_read_as_a_model_too(tmp_path: Path) -> None:
    model, optimizer = made(tie_embeddings=True)
    save_checkpoint(model, tmp_path / "saved", optimizer)
    read = from_pretrained(tmp_path / "saved")
    assert read.config == model.config
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(read(tokens), model(tokens))
    assert next(from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_training_waits_for_less_than_a_tenth_of_what_saving_computes(tmp_path: Path) -> None:
    """Both are processor time, without the disk's: in wall time the share of a synchronous save is smaller still."""
    model, optimizer = made(vocab_size=8192, hidden_size=128, intermediate_size=128, num_kv_heads=4)  # 28 MB in all
    copy, shares = None, []
    for number in range(6):
        start = time.thread_time()
        copy = snapshot(model, optimizer).copy_to_cpu(copy)
        copied = time.thread_time()
        copy.write(tmp_path / str(number))
        shares.append((copied - start) / (time.thread_time() - start))
    assert sorted(shares[1:])[2] < 0.1, shares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 3, 5)], ids=str)
def test_sums_of_pieces_add_up_and_show_every_changed_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 100, shape, generator=generator).to(dtype)
    whole = positional_sum(values, shape, [0] * len(shape))
    words = values.reshape(-1).view(torch.uint8).tolist()
    wanted, size = 0, values.element_size()
    for i in range(values.numel()):
        word = int.from_bytes(bytes(words[i * size : (i + 1) * size]), "little", signed=size > 1)
        wanted += word * (2 * i + 1)
    assert whole == wanted % 2**64
    for dim, extent in enumerate(shape):
        cut, starts = extent // 2, [0] * len(shape)
        first, second = values.split([cut, extent - cut], dim)
        starts[dim] = cut
        assert (positional_sum(first, shape, [0] * len(shape)) + positional_sum(second, shape, starts)) % 2**64 == whole
    for bit in range(8 * size):
        changed = values.clone().reshape(-1)
        changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert positional_sum(changed.reshape(shape), shape, [0] * len(shape)) != whole


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    save_checkpoint(made()[0], tmp_path / "saved")
    manifest = Manifest.read(tmp_path / "saved")
    assert manifest.text() == (tmp_path / "saved/manifest.json").read_text()
    assert {tensor.dtype for tensor in manifest.tensors.values()} == {"F32"}
