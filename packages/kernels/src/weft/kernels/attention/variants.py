"""The attention kernels as they are launched, by dtype, head size and options, which `launching.aot` compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..launching.aot import TARGETS, Variant
from . import kernel
from .launch import Kernel, Launch, launch_of, padded

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MASKED = {"softcap", "dropout", "places"}


def _variant(
    of: Kernel,
    dtype: str,
    head_dim: int,
    *features: str,
    precision: str = "ieee",
    launch: Launch | None = None,
) -> Variant:
    """features: any of "softcap", "sinks", "dropout", "places" (dropout by places), "grad_lse", "unaligned"."""
    function: Any = getattr(kernel, of)
    name = "-".join((dtype if precision == "ieee" else precision, str(head_dim), *features))
    stride = "i32" if "unaligned" in features else "i32:16"
    kinds = dict.fromkeys(
        ("grad_ptr", "query_ptr", "key_ptr", "value_ptr", "output_ptr", "dquery_ptr", "dkey_ptr", "dvalue_ptr"),
        f"*{dtype}:16",
    )
    kinds |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32:16") | {"ranges_ptr": "*i32:16"}
    places = "*i32:16" if "places" in features else "None"
    kinds |= {
        "grad_lse_ptr": "*fp32:16" if "grad_lse" in features else "None",
        "sinks_ptr": "*fp32:16" if "sinks" in features else "None",
        "offsets_ptr": "*i64:16" if "dropout" in features or "places" in features else "None",
        "query_places_ptr": places,
        "key_places_ptr": places,
        "softcap": "fp32" if "softcap" in features else "None",
        "scale": "fp32",
        "drop_scale": "fp32",
        "drop_key": "i64",
    }
    constexprs = {
        "PHASED": int("dropout" in features), "PRECISION": precision,
        "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim),
    }  # fmt: skip

    def launched(target: str) -> Variant:
        chosen = launch or launch_of(of, target, BYTES[dtype], padded(head_dim), bool(MASKED & {*features}))
        values = constexprs | {"BLOCK_T": chosen.block_t, "BLOCK_S": chosen.block_s}
        arguments = {
            each: kinds.get(each, "i32" if each in kernel.UNSPECIALIZED else stride)
            for each in function.arg_names
            if each not in values
        }
        return Variant(
            f"attention.{of}/{name}",
            function,
            arguments,
            {each: values[each] for each in function.arg_names if each in values},
            chosen.warps,
            chosen.stages,
        )

    return replace(launched("sm_90"), elsewhere={target: launched(target) for target in TARGETS})


def _variants(dtype: str, head_dim: int, *features: str, precision: str = "ieee") -> tuple[Variant, Variant, Variant]:
    return (
        _variant("forward", dtype, head_dim, *features, precision=precision),
        _variant("backward_queries", dtype, head_dim, *features, precision=precision),
        _variant("backward_keys", dtype, head_dim, *features, precision=precision),
    )


ALL = "softcap", "sinks", "dropout", "grad_lse"
VARIANTS = (*_variants("bf16", 128), *_variants("bf16", 128, *ALL))
EXTRA_VARIANTS = (
    *(variant for head_dim in (64, 256) for options in ((), ALL) for variant in _variants("bf16", head_dim, *options)),
    *(variant for head_dim in (16, 80) for variant in _variants("bf16", head_dim)),
    *_variants("bf16", 128, "places"),
    *_variants("bf16", 128, "softcap"),
    *_variants("bf16", 24, "unaligned", *ALL),
    *_variants("fp16", 128),
    *_variants("fp32", 64),
    *_variants("fp32", 128),
    *_variants("fp32", 128, *ALL),
    *_variants("fp32", 256),
    *_variants("fp32", 128, precision="tf32"),
)
