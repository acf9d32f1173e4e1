"""Times meshes, layouts and layout inference on the host: costs paid by every op and every step of a program."""

from __future__ import annotations

import pytest
from weft.mesh import Layout, ProcessMesh, infer

from benchmarks.conftest import Tell
from benchmarks.timing import Host, in_turn

MESH = ProcessMesh.grid(pp=16, dp=64, cp=8, tp=16)  # 131,072 ranks
INPUT, WEIGHT = Layout(MESH, "dp: S(0), cp: S(1), tp: S(2)"), Layout(MESH, "tp: S(0)")
SHAPE = (512, 8192, 8192)


def make_and_slice() -> tuple[str, int]:
    """Makes a mesh, and returns the digest and the hash of one pipeline stage's mesh."""
    stage = ProcessMesh.grid(pp=16, dp=64, cp=8, tp=16).get_mesh_with_dim("pp", 3)
    return stage.digest, hash(stage)


def new_layout() -> Layout:
    return Layout(MESH, {"dp": "S(0)", "cp": "S(1)", "tp": "S(2)"})


CASES = {  # the call, and the budget in microseconds
    "local_slices, cached": (lambda: INPUT.local_slices(SHAPE, 77), 5),
    "infer.einsum, cached": (lambda: infer.einsum("btk,kn->btn", INPUT, WEIGHT), 5),
    "infer.einsum, new": (lambda: infer.einsum.__wrapped__("btk,kn->btn", INPUT, WEIGHT), 1000),
    "a layout on 131,072 ranks, new": (new_layout, 1000),
    "a mesh of 131,072 ranks made, sliced and hashed": (make_and_slice, 1000),
}


@pytest.mark.parametrize("name", CASES)
def test_mesh_time(name: str, tell: Tell) -> None:
    call, budget = CASES[name]
    timed = tell.measuring(in_turn, {"Weft": call}, Host(), rounds=50, calls=200)["Weft"]
    tell(name, "Weft", "host_time", **timed.figures)
    print(f"\n{name}: {timed.median * 1e6:.2f} us, budget {budget} us, CPU time")
    assert timed.median * 1e6 < budget
