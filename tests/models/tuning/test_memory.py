"""Memory of dpo and kto: one copy of the base under adapters; a reference model sharded by ZeRO 3; never logits."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from weft.kernels.linear_cross_entropy import chunks
from weft.models.train.run import Run
from weft.models.train.trainer import Trainer

from tests.models.tuning.runs import LENGTH, LORA, first_step, make_run, records, save_model, write
from tests.support.pool import Pool

BESIDE = 192 << 10  # bytes of all else: rotary tables, rows, metrics
REFERENCE = ("--reference", "model", "--reference-zero")


def storages() -> dict[int, int]:
    """The bytes of each storage of a tensor on this process, by its address."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            local = getattr(each, "_local_tensor", each)
            if type(local) in (torch.Tensor, torch.nn.Parameter):
                storage = local.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def held(run: Run) -> dict[str, Any]:
    """Bytes of tensors held after step 1; and of the trained parameters, of all parameters, and of optimizer states."""
    trainers: list[Trainer] = []
    before = storages()
    first_step(run, at_trainer=trainers.append)
    after = storages()
    (trainer,) = trainers
    parameters = [(each.requires_grad, getattr(each, "_local_tensor", each)) for each in trainer.model.parameters()]
    states = [v for each in trainer.optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
    return {
        "held": sum(size for address, size in after.items() if address not in before),
        "trained": sum(each.nbytes for trained, each in parameters if trained),
        "all": sum(each.nbytes for _, each in parameters),
        "states": sum(getattr(each, "_local_tensor", each).nbytes for each in states),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folders")
    save_model(path / "model", 1, hidden_size=256, intermediate_size=512)
    write(path / "dpo.jsonl", records("dpo", messages=True))
    return path


def made(folders: Path, *options: str, ranks: int = 1) -> Run:
    output = folders / f"run-{len(list(folders.iterdir()))}"
    options = (*options, "--mesh.dp", str(ranks), "--mesh.tp", "1", "--no-check")
    return make_run(folders / "model", folders / "dpo.jsonl", "dpo", *options, output=output, batch=4)


class Logits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the most elements of a tensor with a dim of the vocabulary's size; tensors on meta take no memory."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size, self.most = vocab_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor) and not each.is_meta and self.vocab_size in each.shape:
                self.most = max(self.most, each.numel())
        return found


def most_logits(run: Run) -> tuple[int, int, int]:
    """(most elements of a tensor as wide as the vocabulary in step 1, the vocabulary's size, the tokens of a batch)."""
    before, chunks.HELD_BYTES_ON_CPU = chunks.HELD_BYTES_ON_CPU, 1 << 16  # a hundredth of the logits
    try:
        with Logits(run.config.model.vocab_size) as watch:
            first_step(run)
    finally:
        chunks.HELD_BYTES_ON_CPU = before  # the worker goes on to later tests, whose sums depend on the chunks
    width = LENGTH * (2 if run.config.task == "dpo" else 1)
    return watch.most, watch.vocab_size, run.config.data.batch_size * width


@pytest.mark.exhaustive
@pytest.mark.parametrize("reference", [("model",), ("precomputed",), ("adapters", *LORA)], ids=lambda each: each[0])
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_log_probabilities_are_found_without_logits(
    task: Any, reference: tuple[str, ...], tmp_path: Path, pool: Pool
) -> None:
    """Of the model, its reference and kto's mismatched rows, in forward and backward."""
    base = save_model(tmp_path / "model", 1)
    data = write(tmp_path / "data.jsonl", records(task, messages=True, count=24))
    run = make_run(base, data, task, "--reference", *reference, "--no-check", output=tmp_path / "run", batch=8)
    ((most, vocab_size, tokens),) = pool.run(most_logits, run, ranks=1)
    assert most < tokens * vocab_size / 8
    assert most >= vocab_size * 32  # the head's weight was seen


@pytest.mark.exhaustive
def test_adapters_hold_one_copy_of_the_base(folders: Path, pool: Pool) -> None:
    (found,) = pool.run(held, made(folders, *LORA), ranks=1)
    assert found["trained"] < found["all"] / 20
    assert found["states"] <= 2 * found["trained"] + 4096
    assert 0 <= found["held"] - found["all"] - found["states"] <= found["trained"] + BESIDE


@pytest.mark.exhaustive
@pytest.mark.parametrize(("zero", "share"), [("3", 2), ("0", 1)])
def test_a_reference_model_adds_its_shards(zero: str, share: int, folders: Path, pool: Pool) -> None:
    alone = pool.run(held, made(folders, *LORA, ranks=2), ranks=2)
    beside = pool.run(held, made(folders, *LORA, *REFERENCE, zero, ranks=2), ranks=2)
    for one, both in zip(alone, beside, strict=True):
        base = one["all"] - one["trained"]
        assert both["held"] - one["held"] == pytest.approx(base / share, abs=BESIDE)
