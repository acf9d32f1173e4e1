"""Tokens on their way to experts of other ranks: values, gradients, bytes and order, for any shape and any choices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from weft.mesh import Layout, ProcessMesh
from weft.models import ExpertPlan, ParallelPlan, parallelize
from weft.models.experts import Experts
from weft.models.parallel.experts.transport import LINKS, expected_share, pack_choices, price_of, unpack_choices
from weft.models.parallel.styles import ExpertParallel
from weft.models.plan_options import TokenTransport
from weft.models.train.measure import CollectiveCount
from weft.reshard import GradientSync, check_order, distribute, layout_of

from tests.models.mixtures import CHOSEN, EXPERTS, HIDDEN, INSIDE, PlainExperts
from tests.support.events import Events

H = HIDDEN
CHOICES = ("spread", "one-expert", "one-rank", "own")


class Holder(nn.Module):
    """A model of one module of experts."""

    def __init__(self, kind: Any = PlainExperts) -> None:
        super().__init__()
        self.experts = kind(HIDDEN, INSIDE, EXPERTS)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Any:
        return self.experts(x, experts, weights)


def inputs(shape: tuple[int, int], choices: str, ep: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, experts, weights and the output's gradient, of the whole batch."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(*shape, H, generator=generator) for _ in range(2))
    weights = torch.rand(*shape, CHOSEN, generator=generator)
    experts = (
        torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(math.prod(shape))]).view(
            *shape, CHOSEN
        )
        if math.prod(shape)
        else torch.zeros(*shape, CHOSEN, dtype=torch.long)
    )
    if choices == "one-expert":
        experts = torch.full_like(experts, 5)
    elif choices == "one-rank":
        experts %= EXPERTS // ep
    return x, experts.int(), weights, grad


def own_choices(experts: Tensor, layout: Layout, shape: tuple[int, ...], ep: int) -> Tensor:
    """Each token's choices among the experts of the rank that holds the token."""
    size, mesh = EXPERTS // ep, layout.mesh
    for rank in mesh.ranks:
        part = experts[layout.local_slices(shape, rank)]
        part %= size
        part += rank % ep * size
    return experts


def one_layer(
    sizes: dict[str, int], placements: Any, plan: ExpertPlan, shape: Any, choices: str, kind: Any = PlainExperts
) -> Any:
    """Errors of a layer against one process, and the collectives of forward and backward on this rank."""
    mesh, rank = ProcessMesh.grid(**sizes), dist.get_rank()
    layout = Layout(mesh, placements)
    x, experts, weights, grad = inputs(shape, choices, plan.size)
    if choices == "own":
        experts = own_choices(experts, layout, tuple(experts.shape), plan.size)
    truth = Holder()
    of_truth = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    expected = truth(of_truth[0], experts, of_truth[1])
    expected.backward(grad)
    model = parallelize(Holder(kind), mesh, ParallelPlan(tensor={"experts": ExpertParallel()}, experts=plan))
    model.experts.counted = plan.tokens == "exchange"  # type: ignore[assignment]
    sync = GradientSync(model)
    found, twice = [], []
    for _ in range(2):
        model.zero_grad()
        leaves = [distribute(each, layout).requires_grad_() for each in (x, weights)]
        with CollectiveCount() as count:
            output = model(leaves[0], distribute(experts, layout), leaves[1])
            forward = count.take_each()
            output.backward(distribute(grad, layout_of(output)))
            backward = count.take_each()
        sync.wait()
        found = [
            ("output", output, expected),
            ("x", leaves[0].grad, of_truth[0].grad),
            ("weights", leaves[1].grad, of_truth[1].grad),
            *((name, each.grad, truth.get_parameter(name).grad) for name, each in model.named_parameters()),
        ]
        twice.append([each.to_local().detach().clone() for _, each, _ in found])
    wrong = [
        f"{plan} {placements} {shape} {choices}: not twice the same bits"
        for a, b in zip(*twice, strict=True)
        if not torch.equal(a, b)
    ]
    for name, each, of_one in found:
        mine = of_one[layout_of(each).local_slices(each.shape, rank)]
        off = (each.to_local() - mine).abs().max().item() if mine.numel() else 0.0
        if mine.shape != each.to_local().shape or not off <= 2e-5 * max(
            of_one.abs().max().item() if of_one.numel() else 0, 1e-6
        ):
            wrong.append(f"{plan} {placements} {shape} {choices}: {name} is off by {off} on rank {rank}")
        idle = (mine == 0).flatten(1).all(1) if name.endswith("_proj") else mine.new_zeros(0, dtype=torch.bool)
        if len(idle) and each.to_local()[idle].any():
            wrong.append(f"{plan} {placements} {shape} {choices}: {name} of an expert without tokens is not 0")
    return wrong, forward, backward, experts, layout


def together(sizes: dict[str, int], placements: Any, plans: list[ExpertPlan], shapes: list[Any], kind: Any) -> Any:
    with check_order():
        found = [
            one_layer(sizes, placements, plan, shape, choices, kind)
            for plan in plans
            for shape in shapes
            for choices in CHOICES
            if choices != "own" or all(isinstance(each, str) and each != "R" for each in placements.values())
        ]
    return [said for wrong, *_ in found for said in wrong]


def both(*sizes: int, over_tp: bool = False) -> list[ExpertPlan]:
    return [ExpertPlan(size=size, over_tp=over_tp, tokens=way) for size in sizes for way in ("gather", "exchange")]


MESHES: dict[str, tuple[dict[str, int], dict[str, str], list[ExpertPlan]]] = {
    "rows": ({"dp": 4}, {"dp": "S(0)"}, both(2, 4)),
    "rows-and-tokens": ({"dp": 2, "cp": 2}, {"dp": "S(0)", "cp": "S(1)"}, both(2, 4)),
    "replicated": ({"dp": 4}, {}, both(4)),
    "axes-in-another-order": ({"tp": 2, "dp": 2}, {"dp": "S(0)", "tp": "S(1)"}, both(4, over_tp=True)),
    "over-tp-replicated": ({"dp": 2, "tp": 2}, {"dp": "S(0)"}, both(2, 4, over_tp=True)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", [PlainExperts, Experts])
@pytest.mark.parametrize("case", MESHES)
def test_values_and_gradients_of_one_process_for_any_shape_and_any_choices(case: str, kind: Any, pool: Any) -> None:
    sizes, placements, plans = MESHES[case]
    shapes = [(5, 7), (4, 4), (1, 1), (0, 3)]
    found = pool.run(together, sizes, placements, plans, shapes, kind, ranks=math.prod(sizes.values()))
    assert not any(found), "\n".join(said for of_rank in found for said in of_rank)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("experts", [torch.int32, torch.int64], ids=str)
def test_choices_come_back_from_their_bytes(experts: torch.dtype, weights: torch.dtype, k: int, rows: int) -> None:
    """A row alone is contiguous wherever its weights start."""
    given = torch.arange(rows * k, dtype=experts).view(rows, k), torch.rand(rows, k).to(weights)
    found = unpack_choices(pack_choices(*given), experts, weights)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, given, strict=True))


def received(collectives: Iterable[Any]) -> Counter[str]:
    """Bytes by kind."""
    counts: Counter[str] = Counter()
    for each in collectives:
        counts[each.kind] += each.nbytes
    return counts


def test_gathering_receives_the_rows_of_all_other_ranks_each_way(pool: Any) -> None:
    n, itemsize = 2 * 3, 4
    plan = ExpertPlan(size=4, tokens="gather")
    for _, forward, backward, *_ in pool.run(one_layer, {"dp": 4}, {"dp": "S(0)"}, plan, (8, 3), "spread", ranks=4):
        rows = 3 * n  # (ep - 1) / ep of N
        assert received(forward) == {
            "all-gather": rows * (H * itemsize + CHOSEN * 8),  # tokens; experts and weights
            "reduce-scatter": rows * H * itemsize,
        }
        assert received(backward) == {
            "all-gather": rows * H * itemsize,
            "reduce-scatter": rows * (H + CHOSEN) * itemsize,
        }


@pytest.mark.parametrize("choices", CHOICES)
def test_exchange_receives_the_tokens_of_its_experts_that_it_does_not_hold(choices: str, pool: Any) -> None:
    ep, shape = 4, (5, 3)
    found = pool.run(
        one_layer, {"dp": ep}, {"dp": "S(0)"}, ExpertPlan(size=ep, tokens="exchange"), shape, choices, ranks=ep
    )
    experts, layout = found[0][3], found[0][4]
    holder = torch.zeros(shape, dtype=torch.long)
    for rank in range(ep):
        holder[layout.local_slices((*shape, 1), rank)[:2]] = rank
    needs = torch.stack([(experts // (EXPERTS // ep) == rank).any(-1) for rank in range(ep)])  # [ep, B, T]
    for rank, (_, forward, backward, *_) in enumerate(found):
        arriving = (needs[rank] & (holder != rank)).sum().item()
        returning = sum((needs[other] & (holder == rank)).sum().item() for other in range(ep) if other != rank)
        counts = (ep - 1) * 2 * 8
        assert received(forward)["all-to-all"] == counts + arriving * (4 * H + 8 * CHOSEN) + returning * 4 * H
        assert received(backward)["all-to-all"] == arriving * 4 * H + returning * 4 * (H + CHOSEN)
        assert {each.kind for each in (*forward, *backward)} == {"all-to-all"}
        assert (len(forward), len(backward)) == (4, 3)
        if choices == "own":
            assert arriving == returning == 0


class _Told(torch.autograd.Function):
    """The identity, which appends to `events` when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("computed")
        return grad, None


class ToldExperts(PlainExperts):
    """PlainExperts which append to `events` when they compute, forward and backward."""

    events: list[str]

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, rows: int | None = None) -> Tensor:
        self.events.append("computed")
        return super().forward(_Told.apply(x, self.events), experts, weights, rows)  # type: ignore[no-untyped-call]


def events_of_a_step(tokens: TokenTransport) -> tuple[list[str], list[str]]:
    """The collectives, waits and computations of forward and of backward, in order, on this rank."""
    mesh, plan = ProcessMesh.grid(dp=2), ExpertPlan(size=2, tokens=tokens)
    holder = Holder(ToldExperts)
    model = parallelize(holder, mesh, ParallelPlan(tensor={"experts": ExpertParallel()}, experts=plan))
    x, experts, weights, grad = (distribute(each, Layout(mesh, "dp: S(0)")) for each in inputs((4, 3), "spread", 2))
    with Events() as seen:
        holder.experts.events = seen.events
        output = model(x.requires_grad_(), experts, weights.requires_grad_())
        forward = len(seen.events)
        output.backward(grad)
        return seen.events[:forward], seen.events[forward:]


@pytest.mark.parametrize("tokens", ["gather", "exchange"])
def test_own_tokens_are_computed_while_the_rest_are_on_their_way(tokens: TokenTransport, pool: Any) -> None:
    """Forward: own tokens before the wait for received ones. Backward: own gradients before the wait for returned ones.

    The exchange's counts, the only wait before, are read in front of the tokens.
    """
    outward, homeward = {"gather": ("all-gather", "reduce-scatter"), "exchange": ("all-to-all", "all-to-all")}[tokens]
    counts = [outward, "waited"] if tokens == "exchange" else []
    for forward, backward in pool.run(events_of_a_step, tokens, ranks=2):
        assert forward == [*counts, outward, outward, "computed", "waited", "waited", "computed", homeward, "waited"]
        assert backward == [outward, "waited", "computed", homeward, homeward, "computed", "waited", "waited"]


@pytest.mark.parametrize(("num_experts", "k", "ep"), [(8, 2, 4), (8, 3, 2), (64, 8, 8), (4, 4, 2), (4, 1, 4)])
def test_expected_share_is_that_of_random_choices(num_experts: int, k: int, ep: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(40_000, num_experts, generator=generator)
    share = (scores.topk(k).indices < num_experts // ep).any(-1).float().mean().item()
    assert expected_share(num_experts, k, ep) == pytest.approx(share, abs=0.01)


def test_price_prefers_the_exchange_where_few_tokens_go_and_the_gather_where_latency_counts() -> None:
    sizes: dict[str, Any] = {"size": 8, "hidden_size": 2048, "num_experts": 128, "experts_per_token": 1, "itemsize": 2}
    few = price_of(tokens=8192, link=LINKS["cuda"], **sizes)
    assert few.cheaper == "exchange"
    assert few.share == pytest.approx(1 / 8)
    assert price_of(tokens=1, link=LINKS["cuda"], **sizes).cheaper == "gather"
    all_tokens = price_of(tokens=8192, link=LINKS["cuda"], **{**sizes, "experts_per_token": 128})
    assert all_tokens.share == 1
    assert all_tokens.cheaper == "gather"  # as many bytes, and the host waits for none
