"""Models are written for one device: their code does not lay out tensors."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch import nn
from weft.models import blocks, layers
from weft.models.families import FAMILIES, make_model
from weft.models.train.recipes import TINY

from tests.architecture.rules import ROOT, imported, module_name

MODELS = ROOT / "packages/models/src/weft/models"
FILES = [*(MODELS / name for name in ("layers.py", "blocks.py", "decoder.py")), *sorted(MODELS.glob("*/model.py"))]
PARALLEL = ("mesh", "rank", "group", "stage", "world", "placement", "tp", "dp", "cp", "pp", "parallel")


@pytest.mark.parametrize("path", [pytest.param(path, id=path.relative_to(MODELS).as_posix()) for path in FILES])
def test_paddlenlp_9412_a_models_files_know_no_processes(path: Path) -> None:
    found = imported(path.read_text(), module_name(path))
    assert not [each for each in found if each.startswith(("torch.distributed", "weft.mesh", "weft.reshard"))]


def test_paddlenlp_9412_no_layer_has_a_parallel_argument() -> None:
    assert len(FILES) >= 2 + len({family.folder for family in FAMILIES.values()})
    classes = {type(module) for recipe in TINY.values() for module in make_model(recipe.model).modules()}
    names_of = {**vars(layers), **vars(blocks)}
    classes |= {each for each in names_of.values() if isinstance(each, type) and issubclass(each, nn.Module)}
    for each in classes:
        if each.__module__.startswith("weft"):
            names = {*inspect.signature(each).parameters, *inspect.signature(each.forward).parameters}
            assert not [name for name in names if any(name == word or name.startswith(f"{word}_") for word in PARALLEL)]
