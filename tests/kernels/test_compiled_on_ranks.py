"""The losses on processes under torch.compile, by group and by layout: one graph, and the eager results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft.kernels import (
    cross_entropy,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from weft.kernels.cross_entropy.sharded import gather
from weft.kernels.linear_cross_entropy.sharded import custom_ops
from weft.mesh import Layout, ProcessMesh
from weft.mesh.layout import chunk
from weft.reshard import distribute, layout_of
from weft.reshard.world.groups import device_mesh

from tests.kernels.cross_entropy.cases import given
from tests.kernels.linear_cross_entropy.cases import make
from tests.support.pool import Pool

TOKENS, V, SIZES = (6, 2), 31, [1, 30]
OPTIONS: list[Any] = [
    pytest.param({}, id="mean"),
    pytest.param({"reduction": "none", "weight": True, "softcap": 5.0}, id="none"),
    pytest.param({"return_lse": True, "label_smoothing": 0.1, "denominator": 7.0}, id="lse"),
    pytest.param({"weight": True, "z_loss": 0.1}, id="weights-and-z-loss", marks=pytest.mark.exhaustive),
]


def compiles(loss: Callable[..., Any], leaves: list[Tensor], backend: str = "aot_eager") -> None:
    """Compiles to one graph, with the eager outputs, gradients and layouts."""
    torch._dynamo.reset()
    found = []
    # The compiled loss runs first: then it makes the process groups.
    for run in (torch.compile(loss, fullgraph=True, backend=backend), loss):
        outputs = run(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.full_like(each, i + 2.0) for i, each in enumerate(outputs)]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    for compiled, plain in zip(*found, strict=True):
        if isinstance(plain, DTensor):
            assert layout_of(plain) == layout_of(compiled)
            plain, compiled = plain.to_local(), compiled.to_local()
        torch.testing.assert_close(compiled, plain)


def of_the_group(form: str, options: dict[str, Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """The loss of this rank's tensors."""
    case, rank = make(TOKENS, V, bias=True), dist.get_rank()
    start = sum(SIZES[:rank])
    place = {"group": dist.group.WORLD, "vocab_start": start, "vocab_size": V, **given(options, V, "cpu")}
    rows = slice(*chunk(TOKENS[0], 2, rank)) if form == "sequence-parallel" else slice(None)
    parts = [case.input[rows], *(leaf[start : start + SIZES[rank]] for leaf in case.leaves()[1:])]
    leaves = [part.detach().clone().requires_grad_() for part in parts]

    def of_the_logits(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return vocab_parallel_cross_entropy(x @ weight.T + bias, case.target, **place)

    def of_the_product(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        more = {"linear_bias": bias, "sequence_parallel": form == "sequence-parallel", "chunk_tokens": 5, **place}
        return vocab_parallel_linear_cross_entropy(x, weight, case.target, **more)

    return of_the_logits if form == "logits" else of_the_product, leaves


def by_group(form: str, options: dict[str, Any], backend: str) -> None:
    compiles(*of_the_group(form, options), backend)


FORMS = ["logits", "product", "sequence-parallel"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_by_the_group_it_compiles_to_one_graph(pool: Pool, form, options):
    pool.run(by_group, form, options, "aot_eager", ranks=2)


@pytest.mark.exhaustive  # Inductor takes a loss by its layout, below
@pytest.mark.parametrize("form", ["logits", "sequence-parallel"])
def test_by_the_group_inductor_takes_it(pool: Pool, form):
    pool.run(by_group, form, {}, "inductor", ranks=2)


def compared_gradients() -> list[Any]:
    """The dtypes of wanted gradients by which a rank sizes its chunks, where rank 1 has a frozen weight."""
    loss, leaves = of_the_group("product", {})
    leaves[1].requires_grad_(dist.get_rank() == 0)
    torch._dynamo.reset()
    with patch.object(custom_ops, "check_and_size", wraps=custom_ops.check_and_size) as check:
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    return [each.kwargs["wanted"] for each in check.call_args_list]


@pytest.mark.exhaustive
def test_ranks_compare_the_chunks_that_their_own_gradients_need(pool: Pool):
    """A frozen weight may mean other chunks than a weight with a gradient, and another number of gathers."""
    dtype = torch.float32
    assert pool.run(compared_gradients, ranks=2) == [[(dtype, dtype, dtype)], [(dtype, None, dtype)]]


def collectives_of(loss: Callable[..., Any], leaves: list[Tensor]) -> list[int]:
    """The numbers of the loss's gathers, and of its counts of tokens."""
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled(*leaves)
    with (
        patch.object(gather, "start_all_gather", wraps=gather.start_all_gather) as gathered,
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as total,
    ):
        outputs = compiled(*leaves)
        counts = total.call_count
        outputs.backward()
    return [gathered.call_count, counts]


def collectives_of_the_group(form: str) -> list[int]:
    return collectives_of(*of_the_group(form, {}))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "count"), [("logits", 1), ("product", 4)])
def test_compiled_it_gathers_as_often(pool: Pool, form, count):
    """12 tokens in chunks of 5: three gathers, after one in which the ranks agree."""
    assert pool.run(collectives_of_the_group, form, ranks=2) == [[count, 0]] * 2


def told(form: str) -> str:
    """On rank 1 the target of -100 is no token to ignore, and no class."""
    loss, leaves = of_the_group(form, {"ignore_index": -100 if dist.get_rank() == 0 else -1})
    torch._dynamo.reset()
    with pytest.raises(ValueError) as error:
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    return str(error.value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["logits", "product"])
def test_compiled_every_rank_is_told_of_anothers_mistake(pool: Pool, form):
    assert pool.run(told, form, ranks=2) == [
        "cross-entropy cannot go on: see the error of rank 1",
        "target[1, 0] is -100, which is no class of 31 (0 to 30); correct it, or use ignore_index (-1) for a token "
        "without a class",
    ]


MESH = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
LAYOUTS: list[Any] = [
    pytest.param({"dp": "R", "tp": "S(1)"}, id="tp"),
    pytest.param({"dp": "S(0)", "tp": "S(1)"}, id="dp-tp"),
    pytest.param({"dp": "S(0)", "tp": "R"}, id="dp"),
    pytest.param({"dp": "S(1)", "tp": "S(1)"}, id="both"),
]


def of_the_layout(
    form: str, mesh: ProcessMesh, of_logits: dict[str, str], options: dict[str, Any]
) -> tuple[Callable[..., Any], list[Tensor]]:
    """The loss of DTensors."""
    case, more = make((6,), V, bias=True), given(options, V, "cpu")
    tokens = Layout(mesh, {axis: "R" if lies == "S(1)" else lies for axis, lies in of_logits.items()})
    classes = Layout(mesh, {axis: "S(0)" if lies == "S(1)" else "R" for axis, lies in of_logits.items()})
    target = distribute(case.target, tokens)
    layouts = (tokens, classes, classes)
    leaves = [distribute(leaf.detach(), lies) for leaf, lies in zip(case.leaves(), layouts, strict=True)]
    if form == "logits":
        leaves = [distribute(case.input.detach() @ case.linear_weight.detach().T, Layout(mesh, of_logits))]

    def of_the_logits(logits: Tensor) -> Any:
        return cross_entropy(logits, target, **more)

    def of_the_product(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_tokens=2, **more)

    return of_the_logits if form == "logits" else of_the_product, [leaf.requires_grad_() for leaf in leaves]


def by_layout(form: str, of_logits: dict[str, str], options: dict[str, Any], backend: str) -> None:
    compiles(*of_the_layout(form, MESH, of_logits, options), backend)


EACH_ONCE = ("none-dp-tp", "lse-both")  # the mean is by the group, above
BY_LAYOUT = [
    pytest.param(layout.values[0], options.values[0], id=name, marks=[pytest.mark.exhaustive] * (name not in EACH_ONCE))
    for layout in LAYOUTS
    for options in OPTIONS
    if options.id == "mean" or layout.id in ("dp-tp", "both")
    for name in [f"{options.id}-{layout.id}"]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["logits", "product"])
@pytest.mark.parametrize(("of_logits", "options"), BY_LAYOUT)
def test_by_the_layout_it_compiles_to_one_graph(pool: Pool, form, of_logits, options):
    pool.run(by_layout, form, of_logits, options, "aot_eager", ranks=4)


CUBE = ProcessMesh.grid(dp=2, cp=2, tp=2)
ON_TWO_AXES: list[Any] = [
    pytest.param({"dp": "S(0)", "cp": "S(1)", "tp": "S(1)"}, [1, 1], "logits", id="vocabulary-logits"),
    pytest.param({"dp": "S(0)", "cp": "S(1)", "tp": "S(1)"}, [2, 1], "product", id="vocabulary-product"),
    pytest.param({"dp": "S(0)", "cp": "S(0)", "tp": "S(1)"}, [1, 1], "logits", id="tokens-logits"),
]


def collectives_of_the_layout(form: str, of_logits: dict[str, str]) -> list[int]:
    return collectives_of(*of_the_layout(form, CUBE, of_logits, {}))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("of_logits", "count", "form"), ON_TWO_AXES)
def test_compiled_two_axes_of_the_vocabulary_or_the_tokens_take_one_collective(pool: Pool, of_logits, count, form):
    """6 tokens on two ranks, 3 each, in chunks of 2; or on four."""
    assert pool.run(collectives_of_the_layout, form, of_logits, ranks=8) == [count] * 8


def after_other_groups(form: str, mesh: ProcessMesh, of_logits: dict[str, str], before: int, between: int) -> None:
    """between: the mesh, and the group over two of its axes."""
    for _ in range(before):
        dist.new_group()
    device_mesh(mesh, "cpu")
    for _ in range(between):
        dist.new_group()
    compiles(*of_the_layout(form, mesh, of_logits, {}), "inductor")


@pytest.mark.exhaustive  # the sample compiles by the layout without inductor, above
@pytest.mark.parametrize(
    ("form", "mesh", "of_logits"),
    [
        pytest.param("logits", ProcessMesh.grid(tp=2), {"tp": "S(1)"}, id="logits-1-D"),
        pytest.param("product", ProcessMesh.grid(tp=2), {"tp": "S(1)"}, id="product-1-D"),
        pytest.param("logits", MESH, {"dp": "S(0)", "tp": "S(1)"}, id="logits-2-D"),
        pytest.param("product", MESH, {"dp": "S(0)", "tp": "S(1)"}, id="product-2-D"),
    ],
)
def test_by_the_layout_inductor_takes_it_and_gives_no_rank_what_it_kept_of_another(pool: Pool, form, mesh, of_logits):
    """No rank takes another rank's cached graph, nor an earlier program's, where equal names mean different groups."""
    for others in ((0, 0), (0, 0), (3, 0), (0, 3)):
        pool.run(after_other_groups, form, mesh, of_logits, *others, ranks=mesh.size)


def refused() -> str:
    logits, target = make((6,), V).input, make((6,), V).target
    by_classes, by_tokens = Layout(MESH, {"tp": "S(1)"}), Layout(MESH, {"dp": "S(0)"})
    torch._dynamo.reset()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception) as error:  # of the compiler's own type
        compiled(distribute(logits.detach(), by_classes), distribute(target % 16, by_tokens))
    return str(error.value)


@pytest.mark.exhaustive
def test_compiled_layouts_that_do_not_fit_are_named(pool: Pool):
    for message in pool.run(refused, ranks=4):
        assert "reshard the target to (" in message
