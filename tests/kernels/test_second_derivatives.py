"""Ops have no second derivative unless torch's own function runs: a nonzero one raises, and never passes for zero."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from weft import kernels
from weft.mesh import Layout
from weft.reshard import distribute, layout_of

from tests.kernels.cases import TWO, ints, normal
from tests.support.pool import Pool

ANGLES = normal(3, 2).float()


def of_logits(**options):
    return (lambda x, target: kernels.cross_entropy(x, target, **options)), (normal(3, 7), ints(7, 3))


def of_products(**options):
    def run(x, weight, bias, target):
        return kernels.linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_tokens=2, **options)

    return run, (normal(3, 4), normal(7, 4), normal(7), ints(7, 3))


def offsets_like(a: Tensor) -> Tensor:
    """The ends of two groups of a's rows."""
    offsets = torch.tensor([1, 3], dtype=torch.int32)
    return distribute(offsets, layout_of(a)) if isinstance(a, DTensor) else offsets


def with_experts(x: Tensor, *operands: Tensor) -> Tensor:
    """Two of two experts for each token."""
    chosen = torch.tensor([[0, 1], [1, 0], [1, 0]])
    return kernels.experts(x, distribute(chosen, layout_of(x)) if isinstance(x, DTensor) else chosen, *operands)


# name: the function and its tensors. All floating tensors have a gradient, except rope's tables.
OPS = {
    "add": (kernels.add, (normal(3, 4), normal(3, 4, seed=1))),
    "sigmoid_gate": (kernels.sigmoid_gate, (normal(3, 4), normal(3, 1))),
    "add_layer_norm": (
        lambda *tensors: kernels.add(*kernels.add_layer_norm(*tensors)),
        (normal(3, 4), normal(3, 4, seed=1), normal(4), normal(4, seed=1)),
    ),
    "add_rms_norm": (
        lambda *tensors: kernels.add(*kernels.add_rms_norm(*tensors)),
        (normal(3, 4), normal(3, 4, seed=1), normal(4)),
    ),
    "all_gather_matmul": (kernels.all_gather_matmul, (normal(3, 4), normal(4, 5))),
    "attention": (
        lambda *tensors: kernels.attention(*tensors, head_dim=4),
        tuple(normal(1, 3, 8, seed=seed) for seed in range(3)),
    ),
    "attention-documents": (
        lambda *tensors: kernels.attention(*tensors, head_dim=4, documents=torch.tensor([[0, 0, 1]])),
        tuple(normal(1, 3, 8, seed=seed) for seed in range(3)),
    ),
    "attention-softcap-sinks": (
        lambda *tensors: kernels.attention(*tensors[:3], head_dim=4, softcap=2.0, sinks=tensors[3]),
        (*(normal(1, 3, 8, seed=seed) for seed in range(3)), normal(2)),
    ),
    "dropout": (lambda x: kernels.dropout(x, 0.5, 1), (normal(3, 4),)),
    "combine": (
        lambda y, weights, experts: kernels.combine(y, experts, weights),
        (normal(6, 4), normal(3, 2), ints(5, 3, 2)),
    ),
    "dispatch": (lambda x, experts: kernels.dispatch(x, experts, num_experts=5)[0], (normal(3, 4), ints(5, 3, 2))),
    "embedding": (lambda weight, tokens: kernels.embedding(tokens, weight), (normal(7, 4), ints(7, 3))),
    "experts": (
        with_experts,
        (normal(3, 4), normal(3, 2), normal(2, 5, 4), normal(2, 5, 4, seed=1), normal(2, 4, 5)),
    ),
    "geglu": (kernels.geglu, (normal(3, 4), normal(3, 4, seed=1))),
    "gelu": (kernels.gelu, (normal(3, 4),)),
    "grouped_matmul": (
        lambda a, b: kernels.grouped_matmul(a, b, offsets_like(a)),
        (normal(3, 4), normal(2, 4, 5)),
    ),
    "layer_norm": (kernels.layer_norm, (normal(3, 4), normal(4), normal(4, seed=1))),
    "linear": (kernels.linear, (normal(3, 4), normal(5, 4), normal(5))),
    "matmul": (kernels.matmul, (normal(3, 4), normal(4, 5))),
    "matmul_reduce_scatter": (kernels.matmul_reduce_scatter, (normal(3, 4), normal(4, 5))),
    "qkv_linear": (
        lambda *tensors: torch.cat(kernels.qkv_linear(*tensors), -1),
        (normal(3, 4), *(normal(5, 4, seed=seed) for seed in range(3))),
    ),
    "rms_norm": (kernels.rms_norm, (normal(3, 4), normal(4))),
    "rms_norm_rope": (
        lambda x, weight: kernels.rms_norm_rope(x, weight, ANGLES.cos(), ANGLES.sin()),
        (normal(1, 3, 8), normal(4)),
    ),
    "rope": (lambda x: kernels.rope(x, ANGLES.cos(), ANGLES.sin()), (normal(1, 3, 8),)),
    "route": (lambda scores: kernels.route(scores, 2)[1], (normal(3, 4),)),
    "router_statistics": (lambda logits, ids: kernels.router_statistics(logits, ids), (normal(3, 4), ints(4, 3, 2))),
    "router_statistics-load": (
        lambda logits, ids: kernels.router_statistics(logits, ids, load=kernels.sequence_load(ids, 4)),
        (normal(2, 3, 4), ints(4, 2, 3, 2)),
    ),
    "swiglu": (kernels.swiglu, (normal(3, 4), normal(3, 4, seed=1))),
    "swiglu_linear": (kernels.swiglu_linear, (normal(3, 4), normal(5, 4), normal(5, 4, seed=1))),
    **{f"cross_entropy-{each}": of_logits(reduction=each) for each in ("none", "mean", "sum")},
    **{f"linear_cross_entropy-{each}": of_products(reduction=each) for each in ("none", "mean", "sum")},
}
# Their gradients do not depend on their operands: the second derivative is zero, as in torch.
CONSTANT = {"add", "dropout"}
# On plain CPU tensors torch's own function runs. The last function's second derivative is zero.
NATIVE = {
    "geglu": lambda gate, up: torch.nn.functional.gelu(gate) * up,
    "gelu": torch.nn.functional.gelu,
    "layer_norm": lambda x, weight, bias: torch.nn.functional.layer_norm(x, (4,), weight, bias),
    "add_layer_norm": lambda x, y, weight, bias: x + y + torch.nn.functional.layer_norm(x + y, (4,), weight, bias),
    "embedding": lambda weight, tokens: torch.nn.functional.embedding(tokens, weight),
    "linear": torch.nn.functional.linear,
    "matmul": torch.matmul,
    "swiglu": lambda gate, up: torch.nn.functional.silu(gate) * up,
}
WITHOUT_GRADIENTS = {"KeyValueCache", "document_bounds", "normal", "rope_tables", "sequence_load", "uniform"}
OF_USERS = {"on_local_tensors"}  # see test_on_local_tensors.py


def of_group_logits(**options):
    def run(x, target):
        start = 4 * dist.get_rank()
        return kernels.vocab_parallel_cross_entropy(
            x, target, group=dist.group.WORLD, vocab_start=start, vocab_size=8, **options
        )

    return run, (normal(3, 4), ints(8, 3))


def of_group_products(**options):
    def run(x, weight, bias, target):
        start = 4 * dist.get_rank()
        return kernels.vocab_parallel_linear_cross_entropy(
            x, weight, target, linear_bias=bias, group=dist.group.WORLD, vocab_start=start, vocab_size=8, **options
        )

    tokens = 6 if options.get("sequence_parallel") else 3
    return run, (normal(3, 4), normal(4, 4), normal(4), ints(8, tokens))


# Of local tensors, on each of two ranks.
BY_GROUP = {
    **{f"vocab_parallel_cross_entropy-{each}": of_group_logits(reduction=each) for each in ("none", "mean")},
    **{f"vocab_parallel_linear_cross_entropy-{each}": of_group_products(reduction=each) for each in ("none", "mean")},
    "vocab_parallel_linear_cross_entropy-sequence": of_group_products(sequence_parallel=True),
}


def test_all_ops_are_here() -> None:
    names = {name.partition("-")[0] for name in (*OPS, *BY_GROUP)}
    assert names == set(kernels.__all__) - WITHOUT_GRADIENTS - OF_USERS


def penalty_by_grad(loss: Tensor, leaves: list[Tensor]) -> None:
    """A gradient penalty, in which the leaves are also reached by a path that torch can differentiate."""
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    torch.autograd.grad(sum((each.square().sum() for each in (*gradients, *leaves)), loss), leaves)


def penalty_by_backward(loss: Tensor, leaves: list[Tensor]) -> None:
    loss.backward(inputs=leaves, create_graph=True)
    gradients = [leaf.grad for leaf in leaves]
    sum(gradient.square().sum() for gradient in gradients).backward(inputs=leaves)


def everything(loss: Tensor, leaves: list[Tensor]) -> None:
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    sum(each.square().sum() for each in gradients).backward()


def of_one_leaf(loss: Tensor, leaves: list[Tensor]) -> None:
    (gradient,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
    torch.autograd.grad(gradient.sum(), leaves[:1])


# torch differentiates plain attention on a CPU, and refuses with a message of its own
REFUSED = r"weft\.kernels have no second derivative|derivative for aten::\w+_backward is not implemented"
WAYS = (penalty_by_grad, penalty_by_backward, everything, of_one_leaf)


def leaves_of(tensors: tuple[Tensor, ...], layout: Layout | None) -> list[Tensor]:
    copies = [each.clone() if layout is None else distribute(each, layout) for each in tensors]
    return [each.requires_grad_() if each.is_floating_point() else each for each in copies]


def check_refused(name: str, layout: Layout | None) -> None:
    run, tensors = (OPS | BY_GROUP)[name]
    if name in CONSTANT:
        leaves = leaves_of(tensors, layout)
        gradients = torch.autograd.grad(run(*leaves).sum(), leaves, create_graph=True)
        assert not any(gradient.requires_grad for gradient in gradients)
        return
    for way in WAYS:
        operands = leaves_of(tensors, layout)
        leaves = [each for each in operands if each.requires_grad]
        with pytest.raises(RuntimeError, match=REFUSED):
            way(run(*operands).sum(), leaves)


def check_upstream_refused(name: str, layout: Layout | None) -> None:
    """The second derivative by the upstream gradient, in which every backward is linear, is refused."""
    run, tensors = (OPS | BY_GROUP)[name]
    operands = leaves_of(tensors, layout)
    output = run(*operands)
    upstream = torch.ones_like(output, requires_grad=True)
    (gradient,) = torch.autograd.grad(output, operands[:1], upstream, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(gradient.square().sum(), upstream)


@pytest.mark.parametrize("name", [name for name in OPS if name not in NATIVE])
def test_of_plain_tensors(name):
    check_refused(name, None)
    check_upstream_refused(name, None)


@pytest.mark.parametrize(
    "name", ["cross_entropy-mean", "cross_entropy-none", "linear", "linear_cross_entropy-mean", "rms_norm", "swiglu"]
)
def test_where_kernels_run(name: str, interpreted: None) -> None:
    run, tensors = OPS[name]
    for way in WAYS:
        operands = leaves_of(tuple(each.float() if each.is_floating_point() else each for each in tensors), None)
        with pytest.raises(RuntimeError, match=REFUSED):
            way(run(*operands).sum(), [each for each in operands if each.requires_grad])


@pytest.mark.parametrize("name", NATIVE)
def test_where_torchs_own_function_runs_it_has_torchs_second_derivative(name):
    _, tensors = OPS[name]
    found = []
    ours = OPS[name][0] if name != "add_layer_norm" else lambda *tensors: torch.add(*kernels.add_layer_norm(*tensors))
    for run in (ours, NATIVE[name]):
        operands = leaves_of(tensors, None)
        leaves = [each for each in operands if each.requires_grad]
        output = run(*operands)
        upstream = torch.ones_like(output, requires_grad=True)
        gradients = torch.autograd.grad(output, leaves, upstream, create_graph=True)
        penalty = sum(each.square().sum() for each in gradients)
        found.append(torch.autograd.grad(penalty, [*leaves, upstream], allow_unused=True))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_transforms_of_torch_func_are_refused_in_plain_words():
    x = normal(3, 4)
    for transformed in (
        torch.func.grad(lambda x: kernels.swiglu_linear(x, x, x).sum()),
        torch.func.vmap(kernels.rms_norm),
    ):
        with pytest.raises(
            RuntimeError, match=r"take no transform of torch.func \(vmap, grad, jvp\); differentiate them with"
        ):
            transformed(x)


def on_ranks() -> None:
    for name in OPS:
        layout = Layout(TWO)
        check_refused(name, layout)
        check_upstream_refused(name, layout)


@pytest.mark.exhaustive
def test_of_dtensors(pool: Pool):
    pool.run(on_ranks, ranks=2)


def of_groups() -> None:
    for name in BY_GROUP:
        check_refused(name, None)
        check_upstream_refused(name, None)


def test_of_process_groups(pool: Pool):
    pool.run(of_groups, ranks=2)


LOSSES = [name for name in OPS if "cross_entropy" in name]


REFUSED_BY_TORCH = r"not currently support double backward|not have been used in the graph"
if torch.__version__ < "2.12":
    REFUSED_BY_TORCH += "|does not require grad"


def check_refused_where_compiled(name: str, layout: Layout | None = None) -> None:
    """torch refuses compiled functions with its own message.

    With a penalty on given inputs torch takes the gradients for constants.
    """
    run, tensors = OPS[name]
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for way in (everything, of_one_leaf):
        operands = leaves_of(tensors, layout)
        leaves = [each for each in operands if each.requires_grad]
        with pytest.raises(RuntimeError, match=REFUSED_BY_TORCH):
            way(compiled(*operands).sum(), leaves)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LOSSES)
def test_of_compiled_losses(name):
    check_refused_where_compiled(name)


@pytest.mark.exhaustive  # the sample has plain tensors
@pytest.mark.parametrize("name", LOSSES)
def test_of_compiled_losses_of_dtensors(pool: Pool, name: str):
    pool.run(check_refused_where_compiled, name, Layout(TWO), ranks=2)


@pytest.mark.parametrize("name", OPS)
def test_a_graph_of_the_gradient_that_is_not_used_is_allowed(name):
    run, tensors = OPS[name]
    operands = leaves_of(tensors, None)
    leaves = [each for each in operands if each.requires_grad]
    gradients = torch.autograd.grad(run(*operands).sum(), leaves, create_graph=True)
    plain = torch.autograd.grad(run(*operands).sum(), leaves)
    if name == "swiglu":  # with a graph, torch differentiates silu by other ops
        torch.testing.assert_close(gradients, plain)
    else:
        assert all(map(torch.equal, gradients, plain))
    assert not any(isinstance(each, DTensor) for each in gradients)
