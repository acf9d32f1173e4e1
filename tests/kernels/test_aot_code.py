"""Facts read from a kernel's assembly: the width of its accesses, its loops, and its matrix instructions."""

from __future__ import annotations

import pytest
from weft.kernels.launching.aot import accesses, inner_loops, instructions, loops, tensor_core


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        pytest.param("ld.global.v4.b32 {%r1}, [%rd1];", {"load 128": 1}, id="v4"),
        pytest.param("@%p1 ld.global.L1::evict_last.b16 %rs1, [%rd1];", {"load 16": 1}, id="cache-hint"),
        pytest.param("st.global.b32 [%rd1], %r1;", {"store 32": 1}, id="store"),
        pytest.param("buffer_load_dwordx4 v[0:3], v1, s[0:3], 0", {"load 128": 1}, id="amd"),
        pytest.param("global_store_short v0, v1, s[0:1]", {"store 16": 1}, id="amd-short"),
        pytest.param("ld.shared.b32 %r1, [%r2];", {}, id="shared"),
        pytest.param("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", {"load 128": 1}, id="async"),
        pytest.param("cp.async.ca.shared.global [%r1], [%rd1], 4;", {"load 32": 1}, id="async-narrow"),
        pytest.param("cp.async.commit_group;", {}, id="async-commit"),
    ],
)
def test_accesses_are_counted_by_width(code, counted):
    assert accesses(code) == counted


PTX = """
// %bb.0:
	ld.global.b64 %rd1, [%rd2];
$L__BB0_1:                              // %.lr.ph
                                        // =>This Inner Loop Header: Depth=1
	ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd3];
$L__tmp1:
	@%p1 bra 	$L__BB0_1;
// %bb.2:                               // %.loopexit
	st.global.b32 [%rd4], %r5;
"""
AMD = """
.LBB0_7:                                ; %.lr.ph
                                        ; =>This Inner Loop Header: Depth=1
	s_cbranch_execz .LBB0_9
; %bb.8:                                ;   in Loop: Header=BB0_7 Depth=1
	global_load_dwordx4 v[4:7], v[2:3], off
.LBB0_9:                                ; %Flow13
	global_store_dword v0, v1, s[0:1]
	s_branch .LBB0_7
"""


NESTED = """
$L__BB0_2:                              // =>This Loop Header: Depth=1
                                        //     Child Loop BB0_12 Depth 2
	st.global.b32 [%rd4], %r5;
$L__BB0_12:                             // %.lr.ph
                                        //   Parent Loop BB0_2 Depth=1
                                        // =>  This Inner Loop Header: Depth=2
	.loc	1 67 34                         // kernel.py:67:34
	wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1}, %rd1;
	// begin inline asm
{
	.reg .pred complete;
	waitLoop:
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;
	@!complete bra.uni waitLoop;
}
// %bb.13:                              //   in Loop: Header=BB0_12 Depth=2
	wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1}, %rd2;
	@%p1 bra 	$L__BB0_12;
// %bb.14:                              //   in Loop: Header=BB0_2 Depth=1
	wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%r1}, %rd3;
	st.global.v4.b32 [%rd4], {%r5};
"""


@pytest.mark.parametrize(
    ("code", "within", "counted"),
    [
        pytest.param(NESTED, {"wgmma.mma_async bf16": 2}, 5, id="nested"),
        pytest.param(PTX, {}, 2, id="ptx"),
        pytest.param(AMD, {}, 2, id="amd"),
        pytest.param("// %bb.0:\n	ret;\n", {}, 0, id="none"),
    ],
)
def test_the_instructions_of_inner_loops_are_told_apart(code, within, counted):
    """Loop header 1 is not header 12; instructions of an outer loop beside the inner loop are not counted."""
    assert tensor_core(inner_loops(code)) == within
    assert instructions(inner_loops(code)) == counted
    assert instructions(code) > counted


@pytest.mark.parametrize("code", [pytest.param(PTX, id="ptx"), pytest.param(AMD, id="amd")])
def test_the_accesses_of_loops_are_told_apart(code):
    assert accesses(loops(code)) == {"load 128": 1}
    assert sum(accesses(code).values()) > 1


@pytest.mark.parametrize(
    ("code", "counted"),
    [
        pytest.param("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, …;", {"mma.sync bf16": 1}, id="mma"),
        pytest.param(
            "wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, …;\n"
            "wgmma.commit_group.sync.aligned;",
            {"wgmma.mma_async bf16": 1},
            id="wgmma",
        ),
        pytest.param(
            "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 {%r1}, …;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 …;",
            {"wgmma.mma_async e4m3": 1, "wgmma.mma_async tf32": 1},
            id="wgmma-dtypes",
        ),
        pytest.param(
            "cp.async.bulk.tensor.2d.shared [%r1];\nsetmaxnreg.dec 24;",
            {"cp.async.bulk.tensor": 1, "setmaxnreg": 1},
            id="tma",
        ),
        pytest.param(
            "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], …;\ntcgen05.commit.cta_group::1.b64 [%r2];",
            {"tcgen05.mma f16": 1},
            id="tcgen05",
        ),
        pytest.param("v_mfma_f32_32x32x8_bf16 v[2:17], …\n" * 2, {"v_mfma bf16": 2}, id="mfma"),
        pytest.param("v_mfma_f32_32x32x8bf16_1k v[2:17], …", {"v_mfma bf16": 1}, id="mfma-glued"),
        pytest.param("v_mfma_f32_32x32x16_fp8_fp8 v[2:17], …", {"v_mfma fp8": 1}, id="mfma-fp8"),
        pytest.param("v_mfma_f32_32x32x4_xf32 v[2:17], …", {"v_mfma xf32": 1}, id="mfma-tf32"),
        pytest.param("fma.rn.f32 %f1, %f2, %f3, %f4;\nv_fma_f32 v0, v1, v2, v3", {}, id="none"),
    ],
)
def test_tensor_core_instructions_are_counted_by_kind(code, counted):
    assert tensor_core(code) == counted
