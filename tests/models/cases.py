"""Shared by the model tests: small Llamas, transformers' Llama with the same weights, tokens, and gathered tensors."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from weft.models.initialization import initialize
from weft.models.llama.config import LlamaConfig
from weft.models.llama.model import Llama
from weft.models.llama.weights import stored, write_config
from weft.models.rope_scaling import Llama3RopeScaling
from weft.reshard import to_global

SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
SMALL = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=44, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=64
)
ALLOWED = 1e-5  # of a gradient's largest element
ROUNDING = 1e-7  # of a model's largest gradient
VARIANTS = {
    "grouped": {},
    "one-kv-head": {"num_kv_heads": 1},
    "as-many-kv-heads": {"num_kv_heads": 4},
    "tied": {"tie_embeddings": True},
    "llama3-scaling": {"rope_scaling": SCALING, "rope_theta": 500000.0, "norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide-heads": {"head_dim": 12},
    "one-layer": {"num_layers": 1, "vocab_size": 1, "intermediate_size": 1},
}


def each_variant():
    return pytest.mark.parametrize(
        "config", [pytest.param(dataclasses.replace(SMALL, **v), id=name) for name, v in VARIANTS.items()]
    )


def make(config, seed=0):
    """A model whose every parameter is random, biases and norms too."""
    model = Llama(config)
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def theirs(model):
    """transformers' Llama with the model's weights, in eager attention."""
    import transformers  # imported here: worker processes load this module, too, and never need transformers

    config = transformers.LlamaConfig(**write_config(model), attn_implementation="eager")
    other = transformers.LlamaForCausalLM(config).eval()
    weights = {stored(name).name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    missing, unexpected = other.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tie_embeddings else [])
    return other


def some_tokens(config, B=2, T=33):
    return torch.randint(0, config.vocab_size, (B, T), generator=torch.Generator().manual_seed(1))


def whole(tensor: Tensor) -> Tensor:
    """A copy of the global tensor; a DTensor is gathered."""
    return (to_global(tensor) if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model on one process, by parameter name. Fails where a parameter has none."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def deviation(found: Tensor, truth: Tensor, largest: float, of_model: float) -> float:
    """The largest error of a gradient or of a part of a gradient; the tests allow `ALLOWED`.

    The error is a share of the gradient's largest element. Some gradients are 0 but for rounding, as a key bias's,
    which the softmax cancels: an error of ROUNDING times the model's largest gradient is always within `ALLOWED`.

    largest: the largest element of the whole gradient. of_model: the largest element of all gradients.
    """
    worst = (found - truth).abs().max().item() if truth.numel() else 0.0
    return worst / (largest + of_model * ROUNDING / ALLOWED)


def deviations(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """`deviation` of each of the gradients found, of all of a model's."""
    largest = {name: each.abs().max().item() for name, each in truth.items()}
    of_model = max(largest.values())
    return {name: deviation(each, truth[name], largest[name], of_model) for name, each in found.items()}


def gradients_off(found: dict[str, Tensor], truth: dict[str, Tensor]) -> list[str]:
    """A line for each gradient off by more than 1e-5 of its largest element plus a rounding of the model's."""
    return [f"{name} is off by {off:.1e}" for name, off in deviations(found, truth).items() if not off <= ALLOWED]
