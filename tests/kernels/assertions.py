"""The PTX of the kernels that look at targets, without and with Triton's debug mode."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import triton
from weft.kernels.launching.aot import Variant, compile_variant, variants

NAMES = ("cross_entropy.statistics/bf16-contiguous", "cross_entropy.statistics_and_gradient/bf16-contiguous")


def ptx(variant: Variant, debug: bool) -> str:
    """The PTX of a variant for sm_90. debug: the option that a launch under TRITON_DEBUG=1 sets."""
    made: list[str] = []

    def compiled(*arguments: Any, options: dict[str, Any], **given: Any) -> Any:
        kernel = compile_(*arguments, options=options | {"debug": debug}, **given)
        made.append(kernel.asm["ptx"])
        return kernel

    compile_ = triton.compile
    with patch.object(triton, "compile", compiled):
        compile_variant(variant, "sm_90")
    return made[0]


def compiled() -> dict[str, list[str]]:
    return {each.name: [ptx(each, debug) for debug in (False, True)] for each in variants() if each.name in NAMES}
