"""Training by Muon equals torch on one process, and one process on every mesh; states, options and errors."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.kernels import cross_entropy
from weft.mesh import ProcessMesh
from weft.models import (
    GPT,
    GPTConfig,
    Llama,
    LlamaConfig,
    PipelinePlan,
    initialize,
    load_checkpoint,
    parallelize,
    predict_memory,
    save_checkpoint,
)
from weft.models.cli import main
from weft.models.losses import local_value
from weft.models.step.find_gradients import find_gradients
from weft.models.step.forward_backward import divide_batch
from weft.models.train.config import MuonConfig, OptimizerConfig
from weft.models.train.optimizer import count_states, find_matrices, make_optimizer
from weft.reshard import GradientSync, Muon, distribute, layout_of, to_global

from tests.support import preloaded
from tests.support.pool import Pool

CONFIG = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=4
)
# The iterations compute in bfloat16. Gradients of two plans differ by 1e-7 of their size, which moves an element to the
# next bfloat16 now and then, by up to 2e-2 of the rate: measured 6e-5 at a rate of 4e-3, and 8e-6 at this one.
MUON = OptimizerConfig(name="muon", lr=4e-4, clip_norm=0.1)
BY_HEADS = replace(MUON, muon=MuonConfig(split_heads=True))
ROWS, LENGTH, STEPS = 8, 12, 3


def make(config: LlamaConfig = CONFIG) -> Llama:
    model = Llama(config)
    initialize(model, seed=3)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range = range(STEPS), microbatches: int = 1) -> None:
    """Steps with clipping, on batches of random tokens."""
    sync, criterion = GradientSync(model), partial(cross_entropy, denominator=float(ROWS * LENGTH))
    for step in steps:
        tokens = torch.randint(0, 31, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        parts = divide_batch(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), microbatches, {})
        find_gradients(model, criterion, parts, sync, clip_norm=MUON.clip_norm)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return to_global(tensor.detach()) if isinstance(tensor, DTensor) else tensor.detach().clone()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_one_process_equals_torchs_muon_and_adamw(family: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
    ours, theirs = (make() if family == "llama" else GPT(GPTConfig(**sizes)) for _ in range(2))
    for model in (ours, theirs):
        initialize(model, seed=3)
    train(ours, make_optimizer(ours, MUON))
    names = dict(theirs.named_parameters())
    tables = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "wpe.weight")
    matrices = {name: each for name, each in names.items() if each.ndim == 2 and name not in tables}
    assert len(matrices) == 2 * (7 if family == "llama" else 6)
    assert [*find_matrices(theirs)] == [*matrices.values()]
    decay = {"lr": MUON.lr, "weight_decay": MUON.weight_decay}
    adamw: dict[str, Any] = {"betas": (MUON.beta1, MUON.beta2), "fused": True}
    remaining = [each for name, each in names.items() if name not in matrices]
    both = _Both(
        torch.optim.Muon(matrices.values(), adjust_lr_fn="match_rms_adamw", **decay),
        torch.optim.AdamW([each for each in remaining if each.ndim == 2], **decay, **adamw),
        torch.optim.AdamW([each for each in remaining if each.ndim < 2], **{**decay, "weight_decay": 0.0}, **adamw),
    )
    train(theirs, both)  # type: ignore[arg-type]
    for name, parameter in ours.named_parameters():
        assert float((whole(parameter) - whole(names[name])).abs().max()) <= 1e-6, name


class _Both:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()


def differences(
    cases: list[tuple[dict[str, int], dict[str, Any], OptimizerConfig]],
) -> list[tuple[float, float]]:
    """For each plan, how far weights of this rank's stage are from one process's after three steps.

    The largest distance of a weight in a matrix of a block, and of any other.
    """
    found = []
    for axes, plan, config in cases:
        alone, model = make(), make()
        train(alone, make_optimizer(alone, config))
        pipeline = {"pipeline": PipelinePlan(microbatches=4)} if "pp" in axes else {}
        parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), **plan, **pipeline))
        train(model, make_optimizer(model, config), microbatches=4 if "pp" in axes else 1)
        trained, matrices = dict(alone.named_parameters()), find_matrices(model)
        worst = [0.0, 0.0]
        for name, parameter in model.named_parameters():
            distance = float((whole(parameter) - whole(trained[name])).abs().max())
            worst[parameter not in matrices] = max(worst[parameter not in matrices], distance)
        found.append((worst[0], worst[1]))
    return found


PLANS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {"sequence": True}),
    ({"dp": 2}, {}),
    *(({"dp": 2, "tp": 2}, {"zero": zero}) for zero in range(4)),
    *(({"dp": 4}, {"zero": zero}) for zero in range(1, 4)),
    ({"cp": 2, "tp": 2}, {"zero": 2, "context": "ulysses"}),
    ({"pp": 2, "dp": 2}, {"zero": 1}),
    ({"pp": 2, "tp": 2}, {}),
    ({"tp": 8}, {}),  # more ranks than key heads
    ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 3, "context": "all_gather"}),
]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_every_plan_equals_one_process(ranks: int, pool: Pool) -> None:
    cases = [(*case, config) for case in PLANS for config in (MUON, BY_HEADS) if math.prod(case[0].values()) == ranks]
    for found in pool.run(differences, cases, ranks=ranks):
        for (axes, plan, config), each in zip(cases, found, strict=True):
            assert max(each) <= 1e-5, f"{axes}, {plan}, {config.muon}"


def equal_gradients(model: nn.Module, step: int) -> None:
    """Gives each parameter a gradient, the same to the bit on every mesh."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute(gradient, layout_of(parameter)) if isinstance(parameter, DTensor) else gradient


def resumed_elsewhere(folder: Path, config: OptimizerConfig) -> list[tuple[bool, float]]:
    """Differences from one process's weights after two steps on a mesh, and one on another mesh after a checkpoint.

    For each parameter: whether it is a matrix of a block, and the largest difference.
    """

    def laid_out(axes: dict[str, int], zero: int) -> nn.Module:
        model = make()
        return parallelize(model, ProcessMesh.grid(**axes), replace(model.parallel_plan(), zero=zero))

    models = [make(), laid_out({"dp": 4}, 3), laid_out({"dp": 2, "tp": 2}, 1), make()]
    alone, first, second, one = models
    optimizers = [make_optimizer(model, config) for model in models]
    for step in range(2):
        for number in (0, 1):
            equal_gradients(models[number], step)
            optimizers[number].step()
    save_checkpoint(first, folder / "saved", optimizers[1])
    for number in (2, 3):
        load_checkpoint(models[number], folder / "saved", optimizers[number])
    for number in (0, 2, 3):
        equal_gradients(models[number], 2)
        optimizers[number].step()
    return [
        (truth in find_matrices(alone), float((whole(parameter) - whole(truth)).abs().max()))
        for model in (second, one)
        for parameter, truth in zip(model.parameters(), alone.parameters(), strict=True)
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [MUON, BY_HEADS], ids=["whole", "heads"])
def test_a_checkpoint_of_a_mesh_goes_on_under_another(config: OptimizerConfig, tmp_path: Path, pool: Pool) -> None:
    for found in pool.run(resumed_elsewhere, tmp_path, config, ranks=4):
        assert len(found) == 2 * len([*make().parameters()])
        assert all(difference == 0 for is_matrix, difference in found if is_matrix)
        assert max(difference for _, difference in found) <= 1e-6, "AdamW's vectors end elsewhere in a shard"


def test_a_checkpoint_of_adamw_is_refused(tmp_path: Path) -> None:
    model = make()
    optimizer = make_optimizer(model, OptimizerConfig(name="adamw"))
    equal_gradients(model, 0)
    optimizer.step()
    save_checkpoint(model, tmp_path / "saved", optimizer)
    with pytest.raises(ValueError, match="has the state of AdamW, and the optimizer is Muon"):
        load_checkpoint(model, tmp_path / "saved", make_optimizer(model, MUON))


def states_held(zero: int) -> tuple[int, int]:
    """Bytes of optimizer state on this rank: held, and predicted."""
    mesh, model = ProcessMesh.grid(dp=2, tp=2), make()
    plan = replace(model.parallel_plan(), zero=zero)
    rank = torch.distributed.get_rank()
    predicted = predict_memory(model, mesh, plan, rank=rank, states=count_states(model, MUON)).states
    optimizer = make_optimizer(parallelize(model, mesh, plan), MUON)
    equal_gradients(model, 0)
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    return sum(local_value(each).nbytes for each in states), predicted


@pytest.mark.parametrize("zero", [0, 3])
def test_states_are_predicted(zero: int, pool: Pool) -> None:
    for held, predicted in pool.run(states_held, zero, ranks=4):
        assert held == predicted > 0


def test_a_matrix_keeps_one_state_and_all_else_two() -> None:
    model = make()
    counts, matrices = count_states(model, MUON), find_matrices(model)
    assert counts == {name: 1 if each in matrices else 2 for name, each in model.named_parameters()}
    assert {name for name, each in model.named_parameters() if each.ndim == 2 and each not in matrices} == {
        "embed_tokens.weight",
        "lm_head.weight",
    }


def test_queries_and_keys_are_split_by_heads_and_nothing_else() -> None:
    model = make()
    optimizer = make_optimizer(model, BY_HEADS)
    names = {each: name for name, each in model.named_parameters()}
    by_rows = {group["rows"]: group["params"] for group in optimizer.param_groups if not group["adamw"]}
    assert {names[each].rpartition(".self_attn.")[2] for each in by_rows[4]} == {"q_proj.weight", "k_proj.weight"}
    assert not any("q_proj" in names[each] or "k_proj" in names[each] for each in by_rows[None])


class Experts(nn.Module):
    """A block with a table, a stack of matrices and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.up = nn.Parameter(torch.ones(3, 6, 4))
        self.bias = nn.Parameter(torch.zeros(4))


def test_a_stack_of_matrices_is_updated_by_muon_and_a_table_is_not() -> None:
    block = Experts()
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    assert [*find_matrices(model)] == [block.up]
    assert isinstance(make_optimizer(model, MUON), Muon)


def test_a_model_without_matrices_in_blocks_is_refused() -> None:
    model = nn.Linear(4, 4)
    for call in (make_optimizer, count_states):
        with pytest.raises(
            ValueError, match=r"optimizer.name is muon, .* blocks, and Linear has none: .*; put the blocks into an nn.M"
        ):
            call(model, MUON)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("muon", {"ns_steps": 0}, "optimizer.muon.ns_steps is 0; it must be 1 or more"),
        ("muon", {"ns_steps": 100}, "optimizer.muon.ns_steps is 100; it must be 99 or less"),
        ("muon", {"momentum": 1.0}, "optimizer.muon.momentum is 1.0; it must be 0 or more, and below 1"),
        ("sgd", {"nesterov": False}, "optimizer.muon.nesterov is False, but optimizer.name is sgd; give"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OptimizerConfig(name=name, muon=MuonConfig(**options))


@pytest.mark.exhaustive
def test_explain_counts_the_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of four ranks receives 3/4 of its own matrices, and then 3/4 of a quarter of all matrices, in bfloat16."""
    sizes = ("--mesh.dp", "2", "--mesh.tp", "2", "--plan.zero", "1")
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--optimizer.name", "muon", *sizes])
    matrices = 4 * 128 * (2 * 128 + 2 * 64 + 3 * 384)
    found = re.search(r"optimizer +dp x tp +\d+ all-to-all +([\d,]+) bytes", capsys.readouterr().out)
    assert found is not None
    assert int(found[1].replace(",", "")) == 2 * 2 * matrices // 4 * 3 // 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["train", "explain"])
def test_the_command_refuses_such_a_model_before_it_starts_processes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare_models.py").write_text(
        "import torch\n"
        "from weft.models import Llama, LlamaConfig, ParallelPlan\n"
        "class Bare(torch.nn.Module):\n"
        "    def __init__(self, config: LlamaConfig):\n"
        "        super().__init__()\n"
        "        self.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)\n"
        "    def forward(self, tokens, positions=None, documents=None):\n"
        "        return torch.nn.functional.linear(self.embed_tokens(tokens), self.embed_tokens.weight)\n"
        "    def parallel_plan(self):\n"
        "        return ParallelPlan()\n"
        "    initial_value = Llama.initial_value\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    sizes = ("--model.vocab-size", "257", "--model.hidden-size", "16", "--model.num-layers", "1")
    options = (*sizes, "--model.num-heads", "2", "--model.intermediate-size", "8", "--mesh.dp", "1", "--mesh.tp", "1")
    with pytest.raises(SystemExit, match="2"):
        main([command, "--model", "bare_models:Bare", *options, "--optimizer.name", "muon"])
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert "optimizer.name is muon, which orthogonalizes the matrices of blocks, and Bare has none" in err


def trained_by_command(folder: Path, *options: str) -> str:
    """What `weft train` prints, of a run of llama-tiny in `folder`."""
    done = preloaded.run((sys.executable, "-m", "weft.models.cli", "train", "--output", str(folder), *options))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_a_run_issues_what_was_predicted_and_is_resumed_on_another_mesh(tmp_path: Path) -> None:
    sizes = ("--data.batch-size", "4", "--data.sequence-length", "16", "--model.num-layers", "1")
    mesh = ("--mesh.dp", "2", "--mesh.tp", "2", "--plan.zero", "2")
    muon = ("--optimizer.name", "muon", "--optimizer.muon.split-heads")
    out = trained_by_command(tmp_path / "run", *sizes, *mesh, *muon, "--steps", "2", "--save-every", "1")
    assert re.search(r"^  optimizer +\d+ all-to-all +[\d,]+ bytes +as predicted$", out, re.MULTILINE)
    assert "NOT as predicted" not in out
    again = ("--resume", "--steps", "3", "--mesh.dp", "1", "--mesh.tp", "2", "--plan.zero", "0")
    assert "step 3/3" in trained_by_command(tmp_path / "run", *again)
