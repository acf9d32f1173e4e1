"""`route` chooses and weighs as transformers' routers: Mixtral, Qwen3-MoE, and DeepSeek-V3 with groups and bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.kernels import combine, dispatch, route

from tests.kernels.cases import normal

N, E, K, H = 50, 16, 4, 12


def weights_by_expert(experts: Tensor, weights: Tensor) -> Tensor:
    """[N, E], zero where an expert is not chosen: transformers' routers may list the experts in another order."""
    return torch.zeros(len(experts), E).scatter_(1, experts.long(), weights)


def layer_of(module: Any, x: Tensor) -> Tensor:
    """The output of a layer of transformers, for tokens x [N, H]."""
    with torch.no_grad():
        output = module(x.unsqueeze(0))
    return (output[0] if isinstance(output, tuple) else output).squeeze(0)


def ours(module: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The same layer by dispatch and combine, with transformers' own experts."""
    rows, ends = dispatch(x, experts, num_experts=E)
    bounds = [0, *ends.tolist()]
    with torch.no_grad():
        y = torch.cat([expert(rows[bounds[e] : bounds[e + 1]]) for e, expert in enumerate(module.experts)])
    return combine(y, experts, weights)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen3_moe-unnormalized"])
def test_softmax_routers(name: str) -> None:
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    normalize, module = True, None
    if name == "mixtral":
        config = MixtralConfig(hidden_size=H, intermediate_size=20, num_local_experts=E, num_experts_per_tok=K)
        module = MixtralSparseMoeBlock(config)
    else:
        normalize = name == "qwen3_moe"
        module = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                hidden_size=H, moe_intermediate_size=20, num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalize
            )
        )
    x = normal(N, H).float()
    experts, weights = route(module.gate(x).detach(), K, normalize=normalize)
    torch.testing.assert_close(ours(module, x, experts, weights), layer_of(module, x))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (8, 3)], ids=str)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "unnormalized"])
def test_the_router_of_deepseek(normalize: bool, groups: tuple[int, int]) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    router = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=H, n_routed_experts=E, num_experts_per_tok=K, n_group=groups[0], topk_group=groups[1],
            norm_topk_prob=normalize, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    router.weight.data = normal(E, H).float()
    # Transformers lets 0 win against a negative sum.
    router.e_score_correction_bias.copy_(0.3 * normal(E).float().abs())
    x = normal(N, H, seed=2).float().requires_grad_()
    theirs, of_theirs = router(x)
    experts, of_ours = route(
        torch.nn.functional.linear(x, router.weight), K,
        score="sigmoid", normalize=normalize, bias=router.e_score_correction_bias, scale=2.5, groups=groups,
    )  # fmt: skip
    expected = weights_by_expert(theirs, of_theirs)
    found = weights_by_expert(experts, of_ours)
    torch.testing.assert_close(found, expected)
    upstream = normal(N, E, seed=3).float()
    for one, other in zip(
        torch.autograd.grad(found, [x, router.weight], upstream, retain_graph=True),
        torch.autograd.grad(expected, [x, router.weight], upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
