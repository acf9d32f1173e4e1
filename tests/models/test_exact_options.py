"""The command's options with `plan.exact`: what cannot be kept is refused in one line, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from weft.mesh import ProcessMesh
from weft.models import LlamaConfig, ParallelPlan
from weft.models.train.config import DataConfig, MeshConfig, PlanConfig, TrainConfig
from weft.models.train.digests import arithmetic_of, end_of_bits
from weft.models.train.results import Results
from weft.models.train.run import complete_plan
from weft.models.train.saved_run import ARITHMETIC

SIZES: dict[str, Any] = {"vocab_size": 33, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16}


def config_of(model: Any = None, mesh: Any = None, **plan: Any) -> TrainConfig:
    model = model or LlamaConfig(**SIZES, intermediate_size=48)
    plan = {"exact": "dp=2,tp=2", **plan}
    mesh = mesh or MeshConfig(dp=1, tp=1)
    return TrainConfig(
        model=model, mesh=mesh, plan=PlanConfig(**plan), data=DataConfig(batch_size=8, sequence_length=8)
    )


def complete(config: TrainConfig) -> PlanConfig:
    return complete_plan(config.plan, config, dp=config.mesh.dp or 1, cp=config.mesh.cp, tp=config.mesh.tp or 1)


PIPELINE = MeshConfig(pp=2, dp=1, tp=1)


def test_a_pipeline_needs_the_number_of_microbatches() -> None:
    with pytest.raises(ValueError, match=r"give --plan\.microbatches, the same on every mesh: 1, 2, 4, 8;"):
        complete(config_of(mesh=PIPELINE))
    assert complete(config_of(mesh=PIPELINE, microbatches=4)).microbatches == 4
    assert complete(config_of(mesh=PIPELINE, exact=None)).microbatches == 8


@pytest.mark.parametrize(
    ("change", "line"),
    [
        pytest.param({"microbatches": 2}, "microbatches is 2, and was 4", id="microbatches"),
        pytest.param({"zero": 2}, "the ranks' sum is of each microbatch, and was of all microbatches", id="zero"),
        pytest.param({"exact": "dp=4"}, "exact is dp=4, and was dp=2,tp=2", id="mesh"),
        pytest.param({"zero": 1, "recompute": "full"}, None, id="free"),
        pytest.param({"exact": "tp=2, cp=1, dp=2"}, None, id="another-spelling"),
    ],
)
def test_a_run_resumed_with_another_arithmetic_says_where_its_bits_end(change: Any, line: str | None) -> None:
    device = torch.device("cpu")
    saved = {"config": "", ARITHMETIC: arithmetic_of(config_of(microbatches=4), device)}
    lines = end_of_bits(saved, arithmetic_of(config_of(**{"microbatches": 4, **change}), device), 7)
    assert len(lines) == (line is not None)
    if line is not None:
        assert "end at step 7: " in lines[0]
        assert line in lines[0]


def test_the_folder_of_a_run_has_the_facts_on_which_the_bits_depend(tmp_path: Path) -> None:
    for exact in ("dp=2,tp=2", None):
        config, folder = config_of(exact=exact), tmp_path / str(exact)
        facts = arithmetic_of(config, torch.device("cpu"))
        with Results(folder, writes=True) as results:
            results.begin("llama-tiny", config, ParallelPlan(), ProcessMesh.grid(dp=1), [], arithmetic=facts)
        lines = (folder / "plan.txt").read_text().splitlines()
        assert ("exact: dp=2,tp=2" in lines) == (f"threads: {torch.get_num_threads()}" in lines) == (exact is not None)
