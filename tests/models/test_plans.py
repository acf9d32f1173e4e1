"""Plans: prepared inputs and outputs, merged plans, models called by keywords, and misfits."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate as TorchReplicate
from weft.kernels import add, cross_entropy, on_local_tensors
from weft.mesh import Layout, ProcessMesh, Shard
from weft.models import (
    ColwiseParallel,
    Llama,
    LlamaConfig,
    ParallelPlan,
    PrepareInput,
    PrepareOutput,
    RowwiseParallel,
    VocabParallel,
    initialize,
    parallelize,
)
from weft.models.layers import Embedding, Linear
from weft.models.parallel.resolve import module_plans_of, plans_deciding, resolve
from weft.reshard import GradientSync, distribute, layout_of, reshard

from tests.models.cases import gradients_of, gradients_off, make, whole
from tests.support.collectives import Collectives

CONFIG = LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, max_seq_len=32)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@on_local_tensors(in_layouts={"x": {"dp": "S(0)"}}, out_layouts={"dp": "S(0)"})
def tokens_mixed(x: Tensor) -> Tensor:
    """[B, T, H]: each token beside the mean of all, so all tokens must be here."""
    return x + x.mean(1, keepdim=True)


class Mixer(nn.Module):
    """A user's own layer, which needs whole tokens whatever the layout around it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = Linear(8, 12), Linear(8, 12), Linear(12, 8)

    def forward(self, x: Tensor, *, skip: Tensor | None = None) -> Pair:
        x = tokens_mixed(x)
        y = self.out(input=add(self.left(input=x), self.right(input=x)))  # columns called by keyword
        return Pair(y, y if skip is None else add(y, skip))


class Twice(nn.Module):
    """A model whose layer is used twice, and given its inputs by position and by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Embedding(11, 8)
        self.mixer = Mixer()
        self.head = Linear(8, 11, bias=False)
        for index, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(index))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(input=tokens)
        x = self.mixer(x=x).first
        x = self.mixer(x, skip=x).second
        return self.head(input=x)


def plan_of(sequence: bool) -> ParallelPlan:
    return ParallelPlan(
        tensor={
            "embed": VocabParallel(),
            "mixer.left": ColwiseParallel(),
            "mixer.right": [ColwiseParallel()],
            "mixer.out": [RowwiseParallel(), PrepareOutput({"tp": "S(1)"})],
            "mixer": [
                PrepareInput({"x": {"tp": TorchReplicate()}, "skip": {"tp": Shard(1)}}),
                PrepareOutput({0: {"tp": "S(-2)"}, 1: {"tp": "R"}}),
            ],
            "head": ColwiseParallel(),
        },
        sequence=sequence,
    )


def tokens_and_targets(classes: int = 11) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, classes, (3, 8), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def trained(model: nn.Module, mesh: ProcessMesh, classes: int = 11) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step of a parallel model, by keyword."""
    sync = GradientSync(model)
    tokens, target = (distribute(each, Layout(mesh, {"dp": "S(0)"})) for each in tokens_and_targets(classes))
    loss = reshard(cross_entropy(model(tokens=tokens), target))
    loss.backward()
    sync.wait()
    return loss.item(), {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def alone(model: nn.Module, classes: int = 11) -> tuple[float, dict[str, Tensor]]:
    tokens, target = tokens_and_targets(classes)
    loss = cross_entropy(model(tokens), target)
    loss.backward()
    return loss.item(), gradients_of(model)


def prepared(sequence: bool) -> tuple[float, dict[str, Tensor]]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = parallelize(Twice(), mesh, plan_of(sequence))
    hidden: list[Any] = []
    model.mixer.register_forward_hook(lambda module, args, output: hidden.append(output))
    found = trained(model, mesh)
    assert [str(layout_of(each)) for each in hidden[1]] == ["dp: S(0), tp: S(1)", "dp: S(0), tp: R"]
    assert type(hidden[1]) is Pair
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_prepared_inputs_and_outputs_beside_styles_keywords_and_a_module_used_twice(sequence: bool, pool) -> None:
    loss, gradients = alone(Twice())
    for found_loss, found in pool.run(prepared, sequence):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert not gradients_off(found, gradients)


class Both(nn.Module):
    """A model that contains two models."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = make(CONFIG), make(CONFIG, seed=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return add(self.left(tokens), self.right(tokens))


def merged() -> tuple[float, dict[str, Tensor]]:
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = Both()
    own = model.left.parallel_plan()
    right = ParallelPlan(tensor=own.tensor, sequence=True)
    parallelize(model, mesh, ParallelPlan.merge({"left": own, "right": right}))
    kinds = []
    for part in (model.left, model.right):
        tokens = distribute(tokens_and_targets(31)[0], Layout(mesh, "dp: S(0)"))
        with Collectives() as seen, torch.no_grad():
            part(tokens)
        kinds.append(set(seen.kinds))
    assert kinds[0] == {"all-reduce"} and "all-gather" in kinds[1]  # each keeps its own options
    return trained(model, mesh, 31)


def test_paddlenlp_9412_a_model_that_contains_models_has_their_plans_merged(pool) -> None:
    loss, gradients = alone(Both(), 31)
    for found_loss, found in pool.run(merged):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert not gradients_off(found, gradients)


def test_merged_plans_name_modules_by_prefixes() -> None:
    model, own = Both(), make(CONFIG).parallel_plan()
    plan = ParallelPlan.merge(
        {"left": own, "right": ParallelPlan(tensor={"lm_head": ColwiseParallel()}, sequence=True)}
    )
    styles = resolve(model, plan)
    assert styles["left.embed_tokens"] == VocabParallel() and styles["right.lm_head"] == ColwiseParallel()
    assert "right.embed_tokens" not in styles
    found = [(each.name, each.plan.sequence) for each in module_plans_of(model, plan)]
    assert found == [("left", False), ("right", True)]
    assert "[left]\nembed_tokens: VocabParallel()" in str(plan)
    nested = nn.ModuleDict({"both": model, "other": make(CONFIG)})
    names = [each.name for each in module_plans_of(nested, ParallelPlan.merge({"both": plan, "oth*": own}))]
    assert names == ["both.left", "both.right", "other"]


def test_an_option_holds_within_its_part() -> None:
    model, tensor = nn.ModuleDict({"both": Both()}), {"lm_head": ColwiseParallel()}
    plain, gathers, swaps = (ParallelPlan(tensor=tensor, context=kind) for kind in (None, "all_gather", "ulysses"))

    def of(**plans: ParallelPlan) -> list[str]:
        merged = ParallelPlan.merge({name.replace("_", "."): plan for name, plan in plans.items()})
        return [each.name for each in plans_deciding(module_plans_of(model, merged), "context")]

    assert of(both_left=plain, both_right=gathers) == ["both.left", "both.right"]
    around = ParallelPlan()
    assert of(both=around, both_left=gathers, both_right=swaps) == ["both.left", "both.right"]
    assert of(both=replace(around, context="all_gather"), both_left=gathers) == ["both"]
    for inner in (plain, swaps):
        with pytest.raises(
            ValueError, match=r"the plan of 'both.left' has context=.*, and that of 'both', which contains 'both.left'"
        ):
            of(both=replace(around, context="all_gather"), both_left=inner)


def conflicts() -> list[Any]:
    own = make(CONFIG).parallel_plan()
    head = ParallelPlan(tensor={"left.lm_head": RowwiseParallel()})
    other = ParallelPlan(tensor={"left.lm_head": ColwiseParallel()}, sequence=True)
    misspelt = ParallelPlan(tensor={"layers.*.mlp.upproj": ColwiseParallel()})
    return [
        pytest.param(
            {"left": own, "": head},
            r"'lm_head' and 'left.lm_head' give 'left.lm_head' two styles|"
            r"'left.lm_head' and 'left.lm_head' give .* two styles: ColwiseParallel\(\) and RowwiseParallel\(\); "
            r"the first is of the plan merged for 'left', .* for ''",
            id="two-styles",
        ),
        pytest.param(
            {"left": own, "": other}, "'left' with sequence=False, and by the plan of '' with sequence=True", id="flags"
        ),
        pytest.param(
            {"left": own, "rigth": own},
            "'rigth' was merged for a module that Both does not have; .* right",
            id="no-module",
        ),
        pytest.param(
            {"left": own, "right": misspelt},
            r"'right\.layers\.\*\.mlp\.upproj' matches no module of right, a Llama; .* right\.layers\.0\.mlp\.up_proj",
            id="no-match",
        ),
        pytest.param({"left": own, "l*": own}, "two plans are merged for the module 'left'", id="twice"),
    ]  # fmt: skip


@pytest.mark.parametrize(("plans", "message"), conflicts())
def test_plans_that_contradict_each_other_are_refused_naming_both(plans: dict[str, ParallelPlan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(Both(), ProcessMesh.grid(tp=2), ParallelPlan.merge(plans))


def test_a_merged_plan_has_no_options_of_its_own() -> None:
    own = make(CONFIG).parallel_plan()
    with pytest.raises(
        ValueError, match=r"sequence=True beside its parts; set sequence in the plans of parts, among 'left'"
    ):
        ParallelPlan(parts={"left": own}, sequence=True)
    with pytest.raises(ValueError, match="was given no plans"):
        ParallelPlan.merge({})
    with pytest.raises(ValueError, match="give the ParallelPlan of each module"):
        ParallelPlan.merge({"left": {"lm_head": ColwiseParallel()}})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param({"left": ColwiseParallel}, r"is no style; .*write ColwiseParallel\(\)", id="a-class"),
        pytest.param({"left": "column"}, "given 'column', which is no style", id="text"),
        pytest.param({"left": [ColwiseParallel(), RowwiseParallel()]}, "gives 'left' styles that contradict", id="two"),
        pytest.param(
            {"left": [ColwiseParallel(), PrepareInput({"input": {"tp": "S(1)"}})]},
            "'left' styles that contradict",
            id="cut",
        ),
        pytest.param(
            {"out": RowwiseParallel(), "o*": PrepareInput({0: {"tp": "R"}})},
            "'out' and 'o[*]' give 'out' two styles",
            id="whole",
        ),
        pytest.param(
            {"out": PrepareOutput({"tp": "R"}), "o*": PrepareOutput({"tp": "S(1)"})},
            "give 'out' two styles",
            id="outputs",
        ),
        pytest.param(
            {"": PrepareInput({"z": {"tp": "R"}})}, r"names the input 'z', but Mixer.forward takes \(x", id="input"
        ),
        pytest.param({"": PrepareInput({4: {"tp": "R"}})}, "names the input 4", id="position"),
        pytest.param(
            {"": PrepareInput({"x": {"model": "R"}})}, "names axis 'model'; the mesh has tp, and the names", id="axis"
        ),
        pytest.param({"": PrepareOutput({"model": "R"})}, "names axis 'model'", id="output-axis"),
    ],
)  # fmt: skip
def test_styles_that_a_module_cannot_have_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(Mixer(), ProcessMesh.grid(tp=2), ParallelPlan(tensor=given))


@pytest.mark.parametrize(
    ("style", "given", "message"),
    [
        pytest.param(PrepareInput, {"tp": "R"}, "placements by axis", id="no-input"),
        pytest.param(PrepareInput, {}, "placements by input and axis", id="nothing"),
        pytest.param(PrepareInput, {"x": {"tp": "Q"}}, "'Q' is not a placement", id="placement"),
        pytest.param(PrepareOutput, {0: {"tp": "R"}, "tp": "R"}, "of one output and of several", id="both"),
        pytest.param(PrepareOutput, {0: {0: "R"}}, "names axis 0", id="axis-number"),
    ],
)
def test_preparations_are_checked_when_they_are_made(style: type, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        style(given)


def test_preparations_print_as_they_are_written() -> None:
    style = PrepareInput({"x": {"tp": TorchReplicate(), "dp": Shard(0)}, 1: {"tp": "S(1)"}})
    assert repr(style) == "PrepareInput({'x': {'tp': 'R', 'dp': 'S(0)'}, 1: {'tp': 'S(1)'}})"
    assert eval(repr(style)) == style
    assert repr(PrepareOutput({"tp": Shard(1)})) == "PrepareOutput({'tp': 'S(1)'})"
    assert "mixer.out: RowwiseParallel(), PrepareOutput({'tp': 'S(1)'})" in str(plan_of(True))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        pytest.param(
            ProcessMesh.grid(dp=2, model=2), "an axis 'model', which a plan does not know; the names are tp", id="name"
        ),
        pytest.param(ProcessMesh.grid(tp_heads=2), "an axis 'tp_heads'", id="part"),
        pytest.param(
            ProcessMesh.grid(pp=2, tp=2),
            r"an axis .pp., and the plan has no pipeline; .* one stage alone, on mesh.get_mesh_with_dim",
            id="stage",
        ),
        pytest.param(ProcessMesh([0, 1]), "an axis 'axis0'", id="no-names"),
    ],
)  # fmt: skip
def test_an_axis_that_plans_do_not_know_is_refused(mesh: ProcessMesh, message: str) -> None:
    model = make(CONFIG)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=message):
        parallelize(model, mesh)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'embed_tokens' matches no module of Mixer"):
        parallelize(Mixer(), ProcessMesh.grid(tp=2), make(CONFIG).parallel_plan())
    with pytest.raises(ValueError, match=r"a Mixer has no parallel_plan\(\) of its own; give parallelize a plan="):
        parallelize(Mixer(), ProcessMesh.grid(tp=2))


def test_a_module_under_two_names_is_found_by_either() -> None:
    model = Mixer()
    model.right = model.left
    assert resolve(model, ParallelPlan(tensor={"right": ColwiseParallel()})) == {"left": ColwiseParallel()}
    with pytest.raises(ValueError, match="'left' and 'right' give 'left' two styles"):
        resolve(model, ParallelPlan(tensor={"left": ColwiseParallel(), "right": RowwiseParallel()}))


def again() -> list[str]:
    """Errors of laying out a model again with a new plan or mesh, in part, or inside a module.

    The same mesh and plan change nothing.
    """
    mesh = ProcessMesh.grid(dp=2, tp=2)
    model = parallelize(make(CONFIG), mesh)
    parameters = list(model.parameters())
    copied = copy.deepcopy(model)
    assert parallelize(model, mesh, model.parallel_plan()) is model
    assert parallelize(copied, mesh) is copied
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    first, second = trained(model, mesh, 31), trained(copied, mesh, 31)  # hooked once, and the copy by itself
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    messages = []
    for each, on, plan in (
        (model, mesh, ParallelPlan(tensor={"lm_head": ColwiseParallel()})),
        (model, ProcessMesh.grid(tp=4), None),
        (model.layers[0], mesh, ParallelPlan()),
        (nn.ModuleDict({"inner": model}), mesh, ParallelPlan()),
    ):
        with pytest.raises(ValueError, match="To lay the model out anew") as caught:
            parallelize(each, on, plan)
        messages.append(str(caught.value))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    return messages


def test_a_model_that_is_laid_out_already_stays_as_it_is_or_says_what_to_do(pool) -> None:
    for messages in pool.run(again):
        assert "was laid out before, by another plan" in messages[0]
        assert "on ProcessMesh.grid(dp=2, tp=2), and now on ProcessMesh.grid(tp=4)" in messages[1]
        assert "weight of this Block is a DTensor already, on DeviceMesh((dp=2, tp=2)" in messages[2]
        assert "inner.embed_tokens.weight of this ModuleDict is a DTensor already" in messages[3]


def test_a_model_of_one_process_may_be_laid_out_later() -> None:
    model = Llama(CONFIG)
    initialize(model, seed=0)
    assert parallelize(parallelize(model, ProcessMesh.grid(dp=1)), ProcessMesh.grid(tp=1)) is model
