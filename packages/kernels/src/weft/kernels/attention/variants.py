"""The attention kernels as launched, by dtype, head size and options, for `launching.aot` to compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..launching.aot import TARGETS, Variant
from ..launching.launched import block_length
from . import kernel
from .launch import AttentionLaunch, Kernel, launch_of

# How many products of tiles a kernel computes for two tiles loaded.
PRODUCTS: dict[Kernel, int] = {"forward": 2, "backward_queries": 3, "backward_keys": 4}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _variant(
    of: Kernel,
    dtype: str,
    head_dim: int,
    *features: str,
    precision: str = "ieee",
    launch: AttentionLaunch | None = None,
) -> Variant:
    """The variant of one kernel.

    features: any of "all" (softcap, sinks, dropout, a logsumexp's gradient), "places" (dropout with tensors of
    places), and "unaligned" (strides which 16 does not divide).
    launch: None chooses for each chip.
    """
    function: Any = getattr(kernel, of)
    name = "-".join((dtype if precision == "ieee" else precision, str(head_dim), *features))
    is_aligned = "unaligned" not in features
    stride = "i32:16" if is_aligned else "i32"
    kinds = dict.fromkeys(
        ("grad_ptr", "query_ptr", "key_ptr", "value_ptr", "output_ptr", "dquery_ptr", "dkey_ptr", "dvalue_ptr"),
        f"*{dtype}:16",
    )
    kinds |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32:16") | {"ranges_ptr": "*i32:16"}
    places = "*i32:16" if "places" in features else "None"
    kinds |= {
        "grad_lse_ptr": "*fp32:16" if "all" in features else "None",
        "sinks_ptr": "*fp32:16" if "all" in features else "None",
        "offsets_ptr": "*i64:16" if {"all", "places"} & {*features} else "None",
        "query_places_ptr": places,
        "key_places_ptr": places,
        "softcap": "fp32" if "all" in features else "None",
        "scale": "fp32",
        "drop_scale": "fp32",
        "drop_key": "i64",
    }
    constexprs: dict[str, int | str | None] = {
        "PHASED": int("all" in features), "PRECISION": precision,
        "HEAD_DIM": head_dim, "BLOCK_D": block_length(head_dim),
    }  # fmt: skip

    def launched(target: str) -> Variant:
        name_of_dtype = "tf32" if precision == "tf32" else DTYPES[dtype]
        is_masked = bool({"all", "places"} & {*features})
        chosen = launch or launch_of(of, target, name_of_dtype, block_length(head_dim), is_masked, is_aligned)
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
            PRODUCTS[of] * (chosen.block_s if of == "backward_keys" else chosen.block_t) / BYTES[dtype],
        )

    return replace(launched("sm_90"), elsewhere={target: launched(target) for target in TARGETS})


def _variants(dtype: str, head_dim: int, *features: str, precision: str = "ieee") -> tuple[Variant, Variant, Variant]:
    """The variants of the three kernels; see `_variant`."""
    return (
        _variant("forward", dtype, head_dim, *features, precision=precision),
        _variant("backward_queries", dtype, head_dim, *features, precision=precision),
        _variant("backward_keys", dtype, head_dim, *features, precision=precision),
    )


VARIANTS = (*_variants("bf16", 128), *_variants("bf16", 128, "all"))
EXTRA_VARIANTS = (
    *_variants("bf16", 64),
    *_variants("bf16", 256, "all"),
    _variant("forward", "fp32", 128),
    _variant("backward_queries", "fp32", 64),
    _variant("backward_keys", "fp32", 128),
)
