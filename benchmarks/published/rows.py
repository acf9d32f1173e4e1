"""Published training steps as values: `rows.toml`, read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from weft.mesh import ProcessMesh
from weft.models.config import ModelConfig
from weft.models.gpt.config import GPTConfig
from weft.models.llama.config import LlamaConfig

GIB = 2**30
ROWS = Path(__file__).with_name("rows.toml")
FAMILIES: Mapping[str, type[ModelConfig]] = {"llama": LlamaConfig, "gpt": GPTConfig}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A step that was published, as `rows.toml` describes each field."""

    name: str
    source: str
    chip: str
    stack: str
    model: ModelConfig
    mesh: ProcessMesh
    rows: int
    tokens: int
    microbatches: int
    dtype: torch.dtype
    recompute: Literal["none", "selective", "alternate", "full"]
    zero: Literal[0, 1, 2, 3]
    products: Literal["", "float8"] = ""
    schedule: Literal["1f1b", "interleaved", ""] = ""
    chunks: int = 1
    stages: tuple[tuple[int, int], ...] | None = None  # the blocks of each, [start, stop); None: as even as can be
    sequence: bool = True
    low_rank: int = 0
    seconds: float | None = None
    memory_gib: float | None = None
    activations_gib: float | None = None
    takes: tuple[str, ...] = field(default=())
    held_out: bool = False

    @property
    def tokens_of_a_device(self) -> float:
        """Tokens of a step, divided by the devices."""
        return self.rows * self.tokens / self.mesh.size

    def axis(self, name: str) -> int:
        """The size of a mesh axis; 1 without the axis."""
        return self.mesh.axis_size(name) if name in self.mesh.axis_names else 1


@cache
def published_rows() -> tuple[Row, ...]:
    """All rows of `rows.toml`, in its order."""
    content = tomllib.loads(ROWS.read_text())
    models = {name: _config(options) for name, options in content["models"].items()}
    return tuple(_row(options, models) for options in content["rows"])


def _config(options: Mapping[str, Any]) -> ModelConfig:
    family = FAMILIES[options["family"]]
    sizes = {name: size for name, size in options.items() if name != "family"}
    if family is GPTConfig:
        sizes["tie_embeddings"] = True
    return family(**sizes)


def _row(options: dict[str, Any], models: Mapping[str, ModelConfig]) -> Row:
    options = dict(options)
    speed, teraflops = options.pop("tokens_per_second", None), options.pop("teraflops", None)
    options["model"] = model = models[options["model"]]
    options["mesh"] = mesh = ProcessMesh.grid(**options["mesh"])
    options["dtype"] = getattr(torch, options["dtype"])
    options["takes"] = tuple(options.get("takes", ()))
    if "layers" in options:
        counts = [count for count, times in options.pop("layers") for _ in range(times)]
        options["stages"] = tuple(pairwise(accumulate(counts, initial=0)))
    tokens = options["rows"] * options["tokens"] / mesh.size
    if speed is not None:
        options["seconds"] = tokens / speed
    if teraflops is not None:
        options["seconds"] = tokens * flops_of_a_token(model, options["tokens"]) / (teraflops * 1e12)
    return Row(**options)


def flops_of_a_token(model: Any, tokens: int) -> float:
    """Operations of the model for a token of training: products, and causal attention in rows of `tokens`."""
    products = model.num_parameters - model.num_looked_up
    width = model.head_dim * model.num_heads
    return 6.0 * float(products + model.num_layers * width * tokens)
