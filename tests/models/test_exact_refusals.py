"""What `exact` cannot keep is refused alike on every mesh, in one line, before a process or a group is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh, Shard
from weft.models import (
    LlamaConfig,
    ParallelPlan,
    PipelinePlan,
    forward_backward,
    initialize,
    lay_out_batch,
    parallelize,
)
from weft.models.cli.command import call
from weft.models.config import ModelConfig
from weft.models.exact import check_cut, fitting_part
from weft.models.families import make_model
from weft.reshard import distribute

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 16}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48)


def meshes_within(named: dict[str, int]) -> list[ProcessMesh]:
    """All meshes with sizes that divide the named ones, without and with a pipeline; cp has the named size."""
    of = {axis: [n for n in (1, 2, 4) if size % n == 0 and (axis != "cp" or n == size)] for axis, size in named.items()}
    flat = [dict(zip(of, sizes, strict=True)) for sizes in product(*of.values())]
    return [ProcessMesh.grid(**axes) for sizes in flat for axes in (sizes, {"pp": 2, **sizes})]


def cuts(size: int, ways: int) -> list[int]:
    """Where torch cuts a dim into parts, a border for each rank."""
    step = math.ceil(size / ways)
    return [min(size, step * n) for n in range(ways + 1)]


@pytest.mark.parametrize("named", [1, 2, 4, 8])
def test_a_size_is_refused_where_a_smaller_mesh_cuts_it_elsewhere(named: int) -> None:
    for size in range(40):
        ways = [n for n in (1, 2, 4, 8) if n <= named]
        fits = all(cuts(size, named)[:: named // n] == cuts(size, n) for n in ways)
        try:
            check_cut({"dp": named}, "dp", size, f"{size} rows")
        except ValueError as error:
            assert not fits, f"{size} over {named}"
            assert f"give a multiple of {named}" in str(error)
        else:
            assert fits, f"{size} over {named}"


@pytest.mark.parametrize(("rows", "part"), [(8, 8), (7, 7), (6, 3), (5, 4), (2, 1), (1, 1), (0, 0)])
def test_rows_left_over_are_read_in_parts_that_every_mesh_cuts_alike(rows: int, part: int) -> None:
    assert fitting_part({"dp": 4}, rows) == part


def refusal(refused: Callable[[], Any]) -> str:
    assert not dist.is_initialized(), "no group can be used here"
    with pytest.raises(ValueError) as error:
        refused()
    assert "\n" not in str(error.value)
    return str(error.value)


def refusal_of_model(config: ModelConfig, mesh: ProcessMesh, named: dict[str, int], **options: Any) -> str:
    """The error of `parallelize` under `exact`. options: further ones of the plan."""
    with torch.device("meta"):
        model = make_model(config)
    pipeline = PipelinePlan(microbatches=2) if "pp" in mesh.axis_names else None
    plan = replace(model.parallel_plan(), exact=named, pipeline=pipeline, **options)
    return refusal(lambda: parallelize(model, mesh, plan))


TABLE: list[tuple[str, ModelConfig, dict[str, int], str]] = [
    ("kv-heads", replace(LLAMA, num_kv_heads=2), {"dp": 1, "tp": 4}, "name tp=2 or less"),
    ("heads", replace(LLAMA, num_heads=2, num_kv_heads=2, head_dim=16), {"tp": 4}, "sizes that work: 1, 2"),
    ("vocabulary", replace(LLAMA, vocab_size=33), {"dp": 2, "tp": 4}, "dim 0 of embed_tokens.weight of size 33"),
    ("width", replace(LLAMA, intermediate_size=50), {"tp": 4}, "dim 0 of layers.0.mlp.gate_proj.weight of size 50"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "named", "words"), [pytest.param(*rest, id=name) for name, *rest in TABLE])
def test_a_model_that_the_named_mesh_cannot_cut_is_refused_on_every_mesh(
    config: ModelConfig, named: dict[str, int], words: str
) -> None:
    for mesh in meshes_within(named):
        message = refusal_of_model(config, mesh, named)
        assert words in message, mesh
        assert "exact" in message or "'tp' of size 4" in message


@pytest.mark.parametrize(
    ("named", "words"),
    [
        pytest.param({"cp": 4, "tp": 2}, "tp x cp = 2 x 4", id="heads-that-do-not-divide"),
        pytest.param({"cp": 2, "tp": 2}, "exact cp=2,tp=2 cannot be kept with the context ulysses", id="heads-over-tp"),
    ],
)
def test_ulysses_that_the_named_mesh_cannot_have_is_refused_on_every_mesh(named: dict[str, int], words: str) -> None:
    for mesh in meshes_within(named):
        assert words in refusal_of_model(LLAMA, mesh, named, context="ulysses"), mesh


@pytest.mark.parametrize(
    ("named", "shape", "words"),
    [
        pytest.param({"dp": 4}, (6, 8), "6 rows", id="rows"),
        pytest.param({"dp": 1, "tp": 4}, (4, 10), "10 tokens", id="tokens"),
        pytest.param({"cp": 2, "tp": 4}, (4, 12), "6 tokens", id="tokens-of-a-cp-rank"),
    ],
)
def test_a_batch_that_meshes_cut_in_places_of_their_own_is_refused_on_every_mesh(
    named: dict[str, int], shape: tuple[int, int], words: str
) -> None:
    plan = ParallelPlan(exact=named, context="all_gather" if "cp" in named else None)
    for mesh in meshes_within(named):
        message = refusal(lambda mesh=mesh: lay_out_batch(mesh, plan, torch.zeros(shape, dtype=torch.int64)))
        assert words in message, mesh
        assert "give a multiple of 4" in message


@pytest.mark.parametrize("whole", [None, {"dp": 4}], ids=["unnamed", "other"])
def test_a_part_of_a_merged_plan_cannot_name_a_mesh_of_its_own(whole: dict[str, int] | None) -> None:
    own = make_model(LLAMA).parallel_plan()
    plans = {"first": replace(own, exact={"dp": 2}), "second": own}
    outer = {} if whole is None else {"": ParallelPlan(exact=whole)}
    message = refusal(lambda: ParallelPlan.merge({**outer, **plans}))
    assert "'first' names exact dp=2" in message


@pytest.mark.parametrize("exact", ["dp=2", 2, [("dp", 2)]], ids=["text", "number", "pairs"])
def test_exact_is_a_mapping(exact: Any) -> None:
    assert "give the sizes of axes" in refusal(lambda: ParallelPlan(exact=exact))


def laid_out_in_microbatches(dp: int, rows: int, count: int) -> str:
    model = make_model(LLAMA)
    initialize(model, seed=1)
    mesh = ProcessMesh.grid(dp=dp)
    parallelize(model, mesh, replace(model.parallel_plan(), exact={"dp": 4}))
    tokens = distribute(torch.zeros(rows, 8, dtype=torch.int64), mesh, {"dp": Shard(0)})
    with pytest.raises(ValueError) as error:
        forward_backward(model, cross_entropy, tokens, tokens, microbatches=count)
    return str(error.value)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    ("rows", "count", "words"), [(6, 1, "6 rows"), (16, 2, "plain tokens")], ids=["rows", "microbatches"]
)
def test_tokens_laid_out_before_are_checked_too(pool: Any, dp: int, rows: int, count: int, words: str) -> None:
    for message in pool.run(laid_out_in_microbatches, dp, rows, count, ranks=dp):
        assert words in message
        assert "exact dp=4" in message


COMMANDS = {
    "rows": ("dp=4", "--data.batch-size 6 --mesh.tp 1", "dp", "6 rows"),
    "microbatches": ("dp=4", "--data.batch-size 12 --plan.microbatches 2 --mesh.tp 1", "dp", "6 rows"),
    "tokens": ("tp=4", "--data.sequence-length 10 --model.vocab-size 260 --mesh.dp 1", "tp", "10 tokens"),
    "vocabulary": ("tp=4", "--mesh.dp 1", "tp", "of size 257"),
    "kv-heads": ("tp=4", "--model.vocab-size 260 --model.num-kv-heads 2 --mesh.dp 1", "tp", "name tp=2 or less"),
    "cp": ("cp=2", "--mesh.dp 1 --mesh.cp 1", "tp", "give the mesh cp=2"),
}


@pytest.mark.few(1)
@pytest.mark.every_value
@pytest.mark.parametrize("case", COMMANDS)
@pytest.mark.parametrize("command", ["train", "explain", "check --hangs"])
def test_a_command_refuses_bad_input_alike_on_every_mesh(
    capsys: pytest.CaptureFixture[str], case: str, command: str, tmp_path: Any
) -> None:
    exact, options, axis, words = COMMANDS[case]
    sizes = [n for n in (1, 2, 4) if int(exact[-1]) % n == 0] if axis in exact else [1]
    for size in sizes:
        arguments = [
            *command.split(),
            "llama-tiny",
            "--plan.exact",
            exact,
            *options.split(),
            f"--mesh.{axis}",
            str(size),
        ]
        if command == "train":
            arguments += ["--output", str(tmp_path / "run"), "--steps", "1"]
        with pytest.raises(SystemExit) as ended:
            call(arguments[0], arguments[1:])
        assert ended.value.code == 2
        printed = capsys.readouterr()
        assert words in printed.err, f"{axis}={size}"
        assert printed.err.count("\n") == 1, printed.err
    assert not (tmp_path / "run").exists()
