"""Models written for one device, and what trains them on any mesh.

Names are imported when first used, so that the command line answers before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checkpoint import from_pretrained, save_pretrained
    from .communication import Communication
    from .generation import generate, stream
    from .initialization import initialize
    from .llama.config import Llama3RopeScaling, LlamaConfig
    from .llama.model import Llama
    from .parallel import ColwiseParallel, ParallelPlan, RowwiseParallel, VocabParallel, parallelize
    from .patching import Patch, patch
    from .recording import record

_HOMES = {
    "from_pretrained": ".checkpoint",
    "save_pretrained": ".checkpoint",
    "Communication": ".communication",
    "generate": ".generation",
    "stream": ".generation",
    "initialize": ".initialization",
    "Llama3RopeScaling": ".llama.config",
    "LlamaConfig": ".llama.config",
    "Llama": ".llama.model",
    "ColwiseParallel": ".parallel",
    "ParallelPlan": ".parallel",
    "RowwiseParallel": ".parallel",
    "VocabParallel": ".parallel",
    "parallelize": ".parallel",
    "Patch": ".patching",
    "patch": ".patching",
    "record": ".recording",
}
__all__ = [
    "ColwiseParallel",
    "Communication",
    "Llama",
    "Llama3RopeScaling",
    "LlamaConfig",
    "ParallelPlan",
    "Patch",
    "RowwiseParallel",
    "VocabParallel",
    "from_pretrained",
    "generate",
    "initialize",
    "parallelize",
    "patch",
    "record",
    "save_pretrained",
    "stream",
]


__version__: str


def _imported(name: str) -> object:
    if name not in _HOMES:
        from weft.mesh.version import version_of

        return version_of(__name__)(name)
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # to a type checker it would be every name there is
    __getattr__ = _imported
