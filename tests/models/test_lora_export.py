"""A model with adapters, saved for programs without adapters: the adapters are folded into the saved weights."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.mesh import ProcessMesh
from weft.models import LlamaConfig, PipelinePlan, from_pretrained, lora, merge_lora, parallelize, save_pretrained

from tests.models.test_lora import ALPHA, CONFIG, RANK, TARGETS, batch, make, stirred


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def exported(folder: Path, config: LlamaConfig, axes: dict[str, int], plan: dict[str, Any]) -> None:
    """Save the model with its adapters beside its weights; then, except with stages, with the adapters folded in."""
    model = stirred(lora(make(config), RANK, ALPHA, TARGETS))
    if axes:
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan))
    before = [local(each).clone() for each in model.parameters()]
    save_pretrained(model, folder / "model", shard_bytes=10_000)
    assert all(torch.equal(local(each), was) for each, was in zip(model.parameters(), before, strict=True))
    assert any(name.endswith("lora.A") for name, _ in model.named_parameters())
    if "pp" not in axes:
        save_pretrained(merge_lora(model), folder / "merged", shard_bytes=10_000)


@pytest.mark.parametrize(
    ("change", "axes", "plan"),
    [
        pytest.param({}, {}, {}, id="one"),
        pytest.param({"tie_embeddings": True}, {"dp": 2, "tp": 2}, {"zero": 3}, id="zero3"),
        pytest.param({}, {"pp": 2}, {"pipeline": PipelinePlan(microbatches=2)}, id="stages"),
        pytest.param({"num_kv_heads": 1}, {"tp": 4}, {"sequence": True}, id="copies", marks=pytest.mark.exhaustive),
    ],
)
def test_an_export_has_the_adapters_folded_in_and_the_model_stays(
    change: dict[str, Any], axes: dict[str, int], plan: dict[str, Any], tmp_path: Path, pool
) -> None:
    """The files have the same bits as those of a model whose adapters were folded before."""
    config = replace(CONFIG, **change)
    pool.run(exported, tmp_path, config, axes, plan, ranks=math.prod(axes.values()))
    if "pp" in axes:
        save_pretrained(
            merge_lora(stirred(lora(make(config), RANK, ALPHA, TARGETS))), tmp_path / "merged", shard_bytes=10_000
        )
    files = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "model").iterdir())
    assert len(files) > 4
    for name in files:
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes(), name


def test_an_exported_model_computes_the_same(tmp_path: Path) -> None:
    model = stirred(lora(make(), RANK, ALPHA, TARGETS))
    save_pretrained(model, tmp_path / "model")
    tokens, _ = batch()
    read = from_pretrained(tmp_path / "model")
    torch.testing.assert_close(read(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert torch.equal(read(tokens), merge_lora(model)(tokens))
