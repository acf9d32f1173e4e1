"""The variants of the kernels in the launches, for compilation without a GPU by `launching.aot`.

A variant is a kernel with a configuration (tiles, warps, ...) and an epilogue. A string like "i32:16" is the Triton
type of a kernel's argument; see `launching.aot: Variant.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..launching.aot import Variant
from . import kernel
from .configurations import (
    BY_POINTERS,
    EIGHT_BITS,
    FLAT,
    LARGE,
    MIDDLE,
    NOT_ALIGNED,
    ON_AMD,
    SINGLE,
    Configuration,
    halve_tiles,
)
from .launch import COMBINED

ALIGNED = "i32:16"  # a size or stride divisible by 16
# Separate warps load and multiply.
SPECIALIZED = replace(MIDDLE, stages=3, parts=1, specialized=True)
EIGHT = "fp8e4nv"
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, EIGHT: 1}


def float8_of(target: str) -> str:
    """Triton's name for the 8-bit float a chip multiplies. target: the beginning of the chip's name."""
    return {"sm_80": "fp8e5", "gfx": "fp8e4b8"}.get(target, EIGHT)


def _arguments(
    of: str, to: str, features: tuple[str, ...], aligned: bool, a_transposed: bool, b_transposed: bool
) -> dict[str, str]:
    """The Triton type of each argument of the kernel `product`; parameters as in `_product`.

    a_transposed, b_transposed: whether the factor has contiguous columns.
    """
    size = ALIGNED if aligned else "i32"

    def if_used(name: str, kind: str) -> str:
        return kind if name in features else "None"

    return {
        "a_ptr": f"*{of}:16", "b_ptr": f"*{of}:16", "up_ptr": if_used("gated", f"*{of}:16"),
        "bias_ptr": if_used("bias", f"*{to}:16"), "residual_ptr": if_used("residual", f"*{to}:16"),
        "a_scale_ptr": if_used("scales", "*fp32:16"), "b_scale_ptr": if_used("scales", "*fp32:16"),
        "out_ptr": f"*{to}:16", "z_ptr": if_used("z", f"*{to}:16"),
        "z_up_ptr": f"*{to}:16" if {"gated", "z"} <= set(features) else "None",
        "M": "i32", "N": size, "K": size, "K_SPLIT": size,
        "stride_ab": ALIGNED, "stride_am": "1" if a_transposed else size, "stride_ak": size if a_transposed else "1",
        "stride_bb": ALIGNED, "stride_bk": "1" if b_transposed else size, "stride_bn": size if b_transposed else "1",
        "stride_biasn": "1", "stride_rb": ALIGNED, "stride_rm": size, "stride_rn": "1",
        "stride_sm": "1", "stride_sn": "1", "stride_ob": ALIGNED, "stride_os": ALIGNED,
        "stride_om": size, "stride_on": "1",
        "alpha": "None", "beta": "None",
    }  # fmt: skip


def _product(
    name: str,
    chosen: Configuration,
    *features: str,
    of: str = "bf16",
    to: str = "bf16",
    activation: str | None = None,
    precision: str = "ieee",
    transposed: str = "b",
    aligned: bool = True,
    elsewhere: Mapping[str, Configuration] | None = None,
) -> Variant:
    """A variant of the kernel `product`.

    name: in the reports of `launching.aot`.
    chosen: the configuration on all chips that `elsewhere` does not list.
    features: any of
        "bias", "residual", "scales": the operand is given;
        "gated": two products of the same input, for swiglu;
        "z": also store the pre-activation;
        "sum": add to the output in memory;
        "slope": multiply by the derivative of `activation` at the residual, instead of applying `activation`.
    of, to: dtypes of factors and output.
    transposed: which factors have contiguous columns: "", "a", "b" or "ab".
    aligned: whether sizes and strides are multiples of 16.
    elsewhere: configurations for further chips, by the beginning of the chip's name.
    """
    at, bt = "a" in transposed, "b" in transposed

    def for_configuration(configuration: Configuration, target: str = "") -> Variant:
        return Variant(
            f"matmul.product/{name}",
            kernel.product,
            _arguments(float8_of(target) if of == EIGHT else of, to, features, aligned, at, bt),
            {
                "DESCRIPTORS": int(configuration.descriptors), "A_BY_ROWS": int(not at), "B_BY_ROWS": int(not bt),
                "PRECISION": precision, "ACTIVATION": None if "slope" in features else activation,
                "SLOPE": activation if "slope" in features else None, "ACCUMULATE": int("sum" in features),
                "SPECIALIZED": int(configuration.specialized),
                "TILE_M": configuration.tile_m, "TILE_N": configuration.tile_n, "TILE_K": configuration.tile_k,
                "GROUP_M": configuration.group_m, "PARTS": configuration.parts,
            },
            configuration.warps,
            configuration.stages,
            configuration.flop_per_byte(BYTES[of], 2 if "gated" in features else 1),
        )  # fmt: skip

    on_other_chips = {
        target: for_configuration(configuration, target) for target, configuration in (elsewhere or {}).items()
    }
    return replace(for_configuration(chosen), elsewhere=on_other_chips)


# Configurations on chips without TMA, by the beginning of the chip's name.
NO_TMA = {"sm_80": BY_POINTERS, "gfx": ON_AMD}
GATED = {of: halve_tiles(each) for of, each in NO_TMA.items()}
EPILOGUE = ("bias", "residual", "z")
# The second kernel of a product split over K: adds up the splits' products and applies the epilogue.
COMBINE = Variant(
    "matmul.combine/bf16-bias-gelu",
    kernel.combine,
    {
        "partial_ptr": "*fp32:16", "bias_ptr": "*bf16:16", "residual_ptr": "None",
        "a_scale_ptr": "None", "b_scale_ptr": "None", "out_ptr": "*bf16:16", "z_ptr": "None",
        "M": "i32", "N": ALIGNED, "SPLITS": "i32",
        "stride_ps": ALIGNED, "stride_pb": ALIGNED, "stride_pm": ALIGNED, "stride_biasn": "1",
        "stride_rb": "i32", "stride_rm": "i32", "stride_rn": "i32", "stride_sm": "i32", "stride_sn": "i32",
        "stride_ob": ALIGNED, "stride_om": ALIGNED, "stride_on": "1", "alpha": "None", "beta": "None",
    },
    {"ACTIVATION": "gelu", "SLOPE": None, "ACCUMULATE": 0, "ROWS": COMBINED[0], "COLS": COMBINED[1]},
    4,
)  # fmt: skip

# The main variants: together they contain all code of the launches.
VARIANTS = (
    _product("bf16-bias-gelu-residual", LARGE, "bias", "residual", "z", activation="gelu", elsewhere=NO_TMA),
    _product("bf16-slope-of-gelu", LARGE, "residual", "slope", activation="gelu", transposed="", elsewhere=NO_TMA),
    _product("bf16-transposed-sum", MIDDLE, "sum", to="fp32", transposed="a", elsewhere=NO_TMA),
    # On sm_100, a tcgen05 loop has registers to spare and gains nothing from specialized warps.
    _product("bf16-specialized", SPECIALIZED, "bias", activation="silu", elsewhere=NO_TMA | {"sm_100": MIDDLE}),
    _product("bf16-not-aligned", NOT_ALIGNED, "bias", activation="silu", aligned=False),
    _product("fp16-relu", LARGE, of="fp16", to="fp16", activation="relu", elsewhere=NO_TMA),
    _product("fp32", SINGLE, of="fp32", to="fp32"),
    _product("tf32", SINGLE, of="fp32", to="fp32", precision="tf32"),
    _product("fp8-scales", EIGHT_BITS, "scales", of=EIGHT, elsewhere=NO_TMA),
    _product("bf16-swiglu", halve_tiles(LARGE), "gated", "z", elsewhere=GATED),
    COMBINE,
)


def _combine(name: str, constexprs: dict[str, int | str | None], **types: str) -> Variant:
    """COMBINE with some constexprs and argument types replaced."""
    return replace(
        COMBINE,
        name=f"matmul.combine/{name}",
        arguments=dict(COMBINE.arguments) | types,
        constexprs=dict(COMBINE.constexprs) | constexprs,
    )


# The same code in further configurations chosen by the rules, each with the epilogues that need the most registers.
EXTRA_VARIANTS = (
    *(
        _product(f"bf16-flat-{how or 'none'}", FLAT, *EPILOGUE, activation="gelu", transposed=how, elsewhere=NO_TMA)
        for how in ("b", "", "a", "ab")
    ),
    _product("bf16-flat-slope-of-gelu", FLAT, "residual", "slope", activation="gelu", transposed="", elsewhere=NO_TMA),
    *(
        _product(f"bf16-{activation}", LARGE, *EPILOGUE, activation=activation, elsewhere=NO_TMA)
        for activation in ("gelu_tanh", "silu", "relu2")
    ),
    *(
        _product(
            f"bf16-slope-of-{activation}", LARGE, "residual", "slope",
            activation=activation, transposed="", elsewhere=NO_TMA,
        )
        for activation in ("gelu_tanh", "silu", "relu", "relu2")
    ),
    _product("bf16-both-transposed", LARGE, *EPILOGUE, activation="gelu", transposed="ab", elsewhere=NO_TMA),
    _product("bf16-middle", MIDDLE, *EPILOGUE, activation="gelu", elsewhere=NO_TMA),
    _product("bf16-middle-both-transposed", MIDDLE, *EPILOGUE, activation="gelu", transposed="ab", elsewhere=NO_TMA),
    _product("bf16-part-of-a-sum", MIDDLE, to="fp32", elsewhere=NO_TMA),
    *(
        _product(
            f"bf16-not-aligned-{how or 'none'}", NOT_ALIGNED, *EPILOGUE,
            activation="gelu", transposed=how, aligned=False,
        )
        for how in ("b", "", "a", "ab")
    ),
    _product(
        "bf16-not-aligned-slope-of-gelu", NOT_ALIGNED, "residual", "slope",
        activation="gelu", transposed="", aligned=False,
    ),
    _product("fp16-gelu", LARGE, *EPILOGUE, of="fp16", to="fp16", activation="gelu", elsewhere=NO_TMA),
    _product("fp32-gelu", SINGLE, *EPILOGUE, of="fp32", to="fp32", activation="gelu"),
    _product("fp32-both-transposed", SINGLE, *EPILOGUE, of="fp32", to="fp32", activation="gelu", transposed="ab"),
    _product("tf32-gelu", SINGLE, *EPILOGUE, of="fp32", to="fp32", activation="gelu", precision="tf32"),
    _product("fp8-scales-gelu", EIGHT_BITS, "scales", *EPILOGUE, of=EIGHT, activation="gelu", elsewhere=NO_TMA),
    _product("bf16-swiglu-middle", halve_tiles(MIDDLE), "gated", "z", elsewhere=GATED),
    _product("bf16-swiglu-flat", halve_tiles(FLAT), "gated", "z", elsewhere=GATED),
    _product("bf16-swiglu-not-aligned", halve_tiles(NOT_ALIGNED), "gated", "z", aligned=False),
    _product("fp32-swiglu", halve_tiles(SINGLE), "gated", "z", of="fp32", to="fp32"),
    _combine("bf16-bias-residual-gelu", {}, residual_ptr="*bf16:16", z_ptr="*bf16:16"),
    _combine("bf16-slope-of-gelu", {"ACTIVATION": None, "SLOPE": "gelu"}, bias_ptr="None", residual_ptr="*bf16:16"),
    _combine("bf16-scales", {"ACTIVATION": None}, a_scale_ptr="*fp32:16", b_scale_ptr="*fp32:16"),
    _combine("fp32-sum", {"ACTIVATION": None, "ACCUMULATE": 1}, bias_ptr="None", out_ptr="*fp32:16"),
)  # fmt: skip
