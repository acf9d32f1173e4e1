"""Ops registered with torch match the schemas: `torch.library.opcheck`, on arguments as Weft passes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from weft import kernels
from weft.kernels.attention import function as of_attention
from weft.kernels.attention.options import AttentionOptions
from weft.kernels.cross_entropy.options import Options
from weft.kernels.cross_entropy.sharded import custom_ops as of_logits
from weft.kernels.linear_cross_entropy.sharded import custom_ops as of_products
from weft.mesh import Layout
from weft.reshard import plan
from weft.reshard.moving import compiled
from weft.reshard.world.groups import device_mesh

from tests.kernels.cases import TWO, normal
from tests.support.pool import Pool

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static")


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records calls of Weft's ops: for each op the arguments of the last call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, tuple[Any, Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            self.seen[func.__name__.partition(".")[0]] = func, *tree_map(_copied, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _copied(argument: Any) -> Any:
    return argument.detach().clone() if isinstance(argument, Tensor) else argument


def f(*shape: int, seed: int = 0) -> Tensor:
    return normal(*shape, seed=seed).float().requires_grad_()


TOKENS, ENDS = torch.tensor([[1, 0, 4], [4, 2, 2]]), torch.tensor([1, 3], dtype=torch.int32)
TARGET, ANGLES = torch.tensor([1, 0, 4]), normal(3, 2).float()
KEY, CHOSEN = torch.tensor(7, dtype=torch.uint64), torch.tensor([[1, 0], [1, 0], [0, 1]])
ASKED = (*of_logits.VocabShard(), *Options(reduction="none", label_smoothing=0.1).flat())
Arguments = tuple[Any, ...]
# Names of ops -> a function whose forward and backward call these ops.
CALLS: dict[str, Callable[[], Any]] = {
    "rms_norm rms_norm_backward": lambda: kernels.add_rms_norm(f(3, 16), f(3, 16), f(16)),
    "layer_norm layer_norm_backward": lambda: kernels.add_layer_norm(f(3, 16), f(3, 16), f(16), f(16)),
    "rope": lambda: kernels.rope(f(3, 16), ANGLES.cos(), ANGLES.sin()),
    "rms_norm_rope rms_norm_rope_backward": lambda: kernels.rms_norm_rope(f(3, 16), f(4), ANGLES.cos(), ANGLES.sin()),
    "gate gate_backward": lambda: kernels.swiglu(f(3, 16), f(3, 16)),
    "embedding embedding_backward": lambda: kernels.embedding(TOKENS, f(5, 16)),
    "route route_backward": lambda: kernels.route(f(3, 8), 2, bias=normal(8).float(), groups=(4, 2))[1],
    "sort_by_expert gather_rows sum_rows": lambda: kernels.dispatch(f(2, 16), TOKENS, num_experts=5)[0],
    "sum_rows sum_rows_backward": lambda: kernels.combine(f(6, 16), TOKENS, f(2, 3)),
    "router_statistics router_statistics_backward": lambda: kernels.router_statistics(f(2, 5), TOKENS),
    "dropout": lambda: kernels.dropout(f(3, 16), 0.5, KEY, residual=f(3, 16)),
    "matmul": lambda: kernels.matmul(f(3, 16), f(16, 8), bias=f(8), activation="gelu", residual=f(3, 8)),
    "swiglu_linear": lambda: kernels.swiglu_linear(f(3, 16), f(8, 16), f(8, 16)),
    "experts experts_backward": lambda: kernels.experts(
        f(3, 16), CHOSEN, f(3, 2), f(2, 8, 16), f(2, 8, 16, seed=1), f(2, 16, 8)
    ),
    "grouped_matmul grouped_matmul_weights": lambda: kernels.grouped_matmul(f(4, 16), f(2, 16, 8), ENDS, bias=f(2, 8)),
    "cross_entropy cross_entropy_backward": lambda: of_logits.forward(f(3, 5), TARGET, None, None, *ASKED),
    "linear_cross_entropy linear_cross_entropy_backward": lambda: of_products.forward(
        f(3, 8), f(5, 8), TARGET, None, None, None, None, [True, True, False], 2, None, *ASKED
    ),
}


def attend() -> tuple[Tensor, ...]:
    """The two ops of attention, called directly: neither has an autograd formula of torch."""
    query, key, value = (normal(1, 3, 16, seed=seed).float() for seed in range(3))
    operands = query, key, value, torch.tensor([[1, 0, 0]]), KEY, torch.zeros(4)
    given = AttentionOptions(head_dim=4, window=2, softcap=3.0, dropout=0.5, order=((2, 3), (0, 2)))
    output, lse = of_attention.traced_forward(operands, given)
    return of_attention.traced_backward(output, operands, output, lse, given)[:3]


CALLS["attention attention_backward"] = attend
# Ops on several processes.
MESHES = (
    "all_gather_matmul",
    "all_gather_matmul_backward",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_backward",
    "all_gather_tokens",
    "all_reduce_",
    "linear_cross_entropy_compare",
    "reduce_scatter_tokens",
    "reshard",
    "sum_over",
)
# opcheck calls an op several times; finish_reshard takes the number from begin_reshard, and can be called once.
A_PAIR = ("begin_reshard", "finish_reshard")
# opcheck compares operands with 8-bit arithmetic, which a CPU lacks
OF_8_BITS = ("scaled_product",)


def called(run: Callable[[], Any]) -> dict[str, tuple[Any, Any, Any]]:
    """The ops called by `run` and by backward from the outputs."""
    with Calls() as calls:
        outputs = run()
        found = [each for each in (outputs if isinstance(outputs, tuple | list) else [outputs]) if each.requires_grad]
        torch.autograd.backward(found, [torch.ones_like(each) for each in found])
    return calls.seen


@pytest.mark.few(1)
@pytest.mark.parametrize("names", CALLS)
def test_an_op_passes_torchs_opcheck(names: str, interpreted: None) -> None:
    seen = called(CALLS[names])
    for name in names.split():
        op, args, kwargs = seen[name]
        library.opcheck(op, args, kwargs, test_utils=CHECKS)


def check_on_a_mesh() -> None:
    group, rank = device_mesh(TWO, "cpu").get_group("tp").group_name, torch.distributed.get_rank()
    x, of_rows, wide = (normal(*shape).float() for shape in ((4, 8), (2, 4), (4, 4)))
    steps = (group, [2, 2], 0)
    own = of_logits.VocabShard(vocab_start=4 * rank, vocab_size=8, groups=[group])
    moved = plan(Layout(TWO, "tp: S(0)"), Layout(TWO, "tp: S(1)"), (8, 8), torch.float32)
    compared: Arguments = (TARGET, None, None, None, [True, True, False], 2, None, False)
    given: dict[str, Arguments] = {
        "all_gather_matmul": (of_rows, wide, torch.empty(4, 4), *steps),
        "all_gather_matmul_backward": (of_rows, wide, wide, torch.empty(2, 4), torch.empty(4, 4), *steps),
        "matmul_reduce_scatter": (wide, wide, torch.empty(2, 4), *steps),
        "matmul_reduce_scatter_backward": (wide, wide, of_rows, torch.empty(4, 4), torch.empty(4, 4), *steps),
        "all_gather_tokens": (x, 7, group, x),
        "all_reduce_": (x, group),
        "linear_cross_entropy_compare": (x[:3], x, *compared, *own, *Options().flat()),
        "reduce_scatter_tokens": (x, 2, group),
        "reshard": (x, compiled._text(moved), rank),
        "sum_over": (x, group),
    }
    assert given.keys() == {*MESHES}
    for name, args in given.items():
        library.opcheck(getattr(torch.ops.weft, name).default, args, test_utils=CHECKS)


@pytest.mark.exhaustive
def test_an_op_on_several_processes_passes_torchs_opcheck(pool: Pool) -> None:
    pool.run(check_on_a_mesh, ranks=2)


def test_no_op_is_left_out() -> None:
    registered = {
        name.removeprefix("weft::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("weft::")
    }
    assert registered == {*" ".join(CALLS).split(), *MESHES, *A_PAIR, *OF_8_BITS}
