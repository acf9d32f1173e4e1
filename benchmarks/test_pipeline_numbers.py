"""Compares counted costs of pipelines and sharded optimizers with the papers' formulas and with predictions.

Counted are the idle slots and microbatches in flight of executed schedules, the bytes of a step over dp at each ZeRO
level, and the memory of pipeline stages. No time is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

pytest.importorskip("safetensors", reason="checkpoints are written with safetensors")

from weft.mesh import ProcessMesh
from weft.models import Llama, PipelinePlan
from weft.models.parallel.pipeline.run import stage_mesh_of
from weft.models.schedules.schedule import NAMES, ScheduleName, bubble_formula, simulate
from weft.models.step.followed_step import Memory
from weft.models.step.memory import predict_memory

from benchmarks.conftest import Tell
from tests.models.test_pipeline import MICROBATCHES, one_step
from tests.models.test_pipeline_memory import BATCH, CONFIG, measured, plan_of
from tests.models.test_zero_numbers import bytes_of_steps, make
from tests.support.pool import Pool

STAGES, RANKS = 4, 4
LEVELS = range(4)
TIMES = {0: 2, 1: 2, 2: 2, 3: 3}  # by ZeRO level: how often (n - 1) / n of the parameters' bytes are received


@dataclass(frozen=True, slots=True)
class Ran:
    """A schedule executed on processes."""

    idle: list[int]  # idle slots of each rank
    slots: int  # slots in all
    formula: tuple[int, int]  # idle and slots by the formula
    in_flight: list[int]  # the most microbatches in flight on each rank


def schedules(pool: Pool) -> dict[ScheduleName, Ran]:
    found: dict[ScheduleName, Ran] = {}
    for name in NAMES:
        of_ranks = pool.run(one_step, {"pp": STAGES}, "llama", {}, {"schedule": name}, ranks=STAGES)
        planned = PipelinePlan(schedule=name).make_schedule(STAGES, MICROBATCHES)
        timeline = simulate(replace(planned, actions=tuple(tuple(each["ran"]) for each in of_ranks)))
        idle = [int(timeline.idle(rank)) for rank in range(STAGES)]
        formula = bubble_formula(name, ranks=STAGES, microbatches=MICROBATCHES, chunks=planned.chunks)
        found[name] = Ran(idle, int(timeline.length), formula, [each["in_flight"] for each in of_ranks])
    return found


def test_bubbles_and_activations_in_flight(pool: Pool, tell: Tell) -> None:
    found = tell.measuring(schedules, pool)
    print(
        f"\n{STAGES} stages, {MICROBATCHES} microbatches: idle slots of a rank, and microbatches in flight at the most"
    )
    print(f"{'schedule':14}{'of what ran':>12}{'the formula':>14}   in flight, by rank")
    for name, ran in found.items():
        idle, slots = ran.formula
        counted, said = f"{ran.idle[0]} of {ran.slots}", f"{idle} of {slots}"
        print(f"{name:14}{counted:>12}{said:>14}   {', '.join(map(str, ran.in_flight))}")
        case, most = f"{name} on {STAGES} stages", ran.in_flight[0]
        tell(case, "Weft", "count", idle_slots=ran.idle[0], slots=ran.slots, in_flight=most)
        assert (ran.idle, ran.slots) == ([idle] * STAGES, slots)
    assert found["1f1b"].in_flight[0] <= STAGES
    assert 3 * found["zero_bubble"].idle[0] <= found["1f1b"].idle[0]


def bytes_by_level(pool: Pool) -> dict[int, list[int]]:
    return {
        zero: [steps[-1] for steps in pool.run(bytes_of_steps, {"dp": RANKS}, {"zero": zero}, 1, ranks=RANKS)]
        for zero in LEVELS
    }


def test_bytes_of_a_step_over_dp(pool: Pool, tell: Tell) -> None:
    whole = sum(parameter.nbytes for parameter in make().parameters())
    found = tell.measuring(bytes_by_level, pool)
    print(f"\nbytes that a rank receives in a step, dp={RANKS}, parameters of {whole:,} bytes")
    for zero, nbytes in found.items():
        said = TIMES[zero] * (RANKS - 1) * whole // RANKS
        print(f"zero={zero}{nbytes[0]:>12,}   {TIMES[zero]} (n - 1) / n of them: {said:,}")
        tell(f"a step with zero={zero}, dp={RANKS}", "Weft", "count", bytes_received=max(nbytes), bytes_said=said)
        assert nbytes == [said] * RANKS


Held = dict[tuple[int, int], tuple[dict[str, int], Memory]]


def memory_of_stages(pool: Pool) -> Held:
    """Measured and predicted bytes, by ZeRO level and by the first rank of each stage."""
    axes = {"pp": 2, "dp": 2}
    mesh = ProcessMesh.grid(**axes)
    firsts = tuple(stage_mesh_of(mesh, stage).ranks[0] for stage in range(axes["pp"]))
    found: Held = {}
    for zero in LEVELS:
        plan = plan_of(zero, {"schedule": "1f1b"})
        of_ranks = pool.run(measured, axes, plan, CONFIG, firsts, ranks=mesh.size)
        for rank in firsts:
            found[zero, rank] = of_ranks[rank], predict_memory(Llama(CONFIG), mesh, plan, rank=rank, batch=BATCH)
    return found


@pytest.mark.timeout(600)
def test_memory_of_stages_beside_what_is_predicted(pool: Pool, tell: Tell) -> None:
    found = tell.measuring(memory_of_stages, pool)
    print("\nbytes on the first rank of each stage, pp=2 x dp=2, 1F1B: measured / predicted")
    print(f"{'':16}{'parameters, gradients, states':>32}{'activations':>24}")
    for (zero, rank), (held, said) in found.items():
        stays = said.between_steps
        both = [f"{held['stays']:,} / {stays:,}", f"{held['activations']:,} / {said.activations:,}"]
        print(f"zero={zero}, rank {rank}  {both[0]:>30}{both[1]:>24}")
        total = held["stays"] + held["activations"]
        case = f"memory of a stage, zero={zero}, rank {rank}"
        tell(case, "Weft", "count", measured_bytes=total, predicted_bytes=stays + said.activations)
        assert held["stays"] == pytest.approx(stays, rel=0.05)
        assert held["activations"] == pytest.approx(said.activations, rel=0.05)
    of_first = [said.between_steps + said.activations for (_, rank), (_, said) in found.items() if rank == 0]
    assert of_first == sorted(of_first, reverse=True), "no level needs more memory than the level before"
