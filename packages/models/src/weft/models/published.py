"""Configs of published models, with the sizes and constants of their config.json on huggingface.co.

Dropout is omitted, as in current training. max_seq_len is the published maximum.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config import ModelConfig
from .gpt.config import GPTConfig
from .llama.config import LlamaConfig
from .mixtral.config import MixtralConfig
from .qwen.config import QwenConfig
from .qwen_moe.config import QwenMoeConfig
from .rope_scaling import Llama3RopeScaling


def _gpt2(hidden_size: int, num_layers: int, num_heads: int) -> GPTConfig:
    return GPTConfig(vocab_size=50257, hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads)


def _llama2(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_seq_len=4096,
        norm_eps=1e-5,
    )


def _llama3(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    *,
    stretched: float | None = None,
    tie_embeddings: bool = False,
) -> LlamaConfig:
    """stretched: the factor on the rotary wavelengths since Llama 3.1, for 131,072 tokens; None: Llama 3, for 8192."""
    scaling = None
    if stretched is not None:
        scaling = Llama3RopeScaling(
            factor=stretched, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
        )
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        max_seq_len=8192 if stretched is None else 131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
        norm_eps=1e-5,
        tie_embeddings=tie_embeddings,
    )


def _mistral(vocab_size: int, *, rope_theta: float, sliding_window: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        max_seq_len=32768,
        rope_theta=rope_theta,
        norm_eps=1e-5,
        sliding_window=sliding_window,
        mistral=True,
    )


def _smollm2(
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    rope_theta: float = 100000.0,
    initializer_range: float = 0.02,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_seq_len=8192,
        rope_theta=rope_theta,
        norm_eps=1e-5,
        tie_embeddings=True,
        initializer_range=initializer_range,
    )


def _qwen(
    version: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    *,
    vocab_size: int = 151936,
    tie_embeddings: bool = False,
) -> QwenConfig:
    return QwenConfig(
        version=2 if version == 2 else 3,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128 if version == 3 else 0,
        max_seq_len=131072 if version == 2 else 40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        tie_embeddings=tie_embeddings,
    )


def _qwen_moe(
    hidden_size: int, intermediate_size: int, moe_intermediate_size: int, num_layers: int, num_heads: int
) -> QwenMoeConfig:
    return QwenMoeConfig(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        moe_intermediate_size=moe_intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        experts_per_token=8,
        max_seq_len=40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
    )


PUBLISHED: Mapping[str, ModelConfig] = {
    "gpt2": _gpt2(768, 12, 12),  # openai-community/gpt2
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama2-7b": _llama2(4096, 11008, 32, 32, 32),  # meta-llama/Llama-2-7b-hf
    "llama2-70b": _llama2(8192, 28672, 80, 64, 8),
    "llama3-8b": _llama3(4096, 14336, 32, 32),  # meta-llama/Meta-Llama-3-8B
    "llama3-70b": _llama3(8192, 28672, 80, 64),
    "llama3.1-405b": _llama3(16384, 53248, 126, 128, stretched=8.0),  # meta-llama/Llama-3.1-405B
    "llama3.2-1b": _llama3(2048, 8192, 16, 32, stretched=32.0, tie_embeddings=True),  # meta-llama/Llama-3.2-1B
    # HuggingFaceTB/SmolLM2-135M, -360M, -1.7B
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3, initializer_range=576**-0.5),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, rope_theta=130000.0),
    "mistral-7b-v0.1": _mistral(32000, rope_theta=10000.0, sliding_window=4096),  # mistralai/Mistral-7B-v0.1
    "mistral-7b-v0.3": _mistral(32768, rope_theta=1000000.0, sliding_window=0),
    "mixtral-8x7b": MixtralConfig(  # mistralai/Mixtral-8x7B-v0.1
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        max_seq_len=32768,
        rope_theta=1000000.0,
        norm_eps=1e-5,
        router_aux_loss_coef=0.02,
    ),
    "qwen2.5-7b": _qwen(2, 3584, 18944, 28, 28, 4, vocab_size=152064),  # Qwen/Qwen2.5-7B
    "qwen2.5-72b": _qwen(2, 8192, 29568, 80, 64, 8, vocab_size=152064),
    "qwen3-0.6b": _qwen(3, 1024, 3072, 28, 16, 8, tie_embeddings=True),  # Qwen/Qwen3-0.6B
    "qwen3-8b": _qwen(3, 4096, 12288, 36, 32, 8),  # Qwen/Qwen3-8B
    "qwen3-32b": _qwen(3, 5120, 25600, 64, 64, 8),
    "qwen3-30b-a3b": _qwen_moe(2048, 6144, 768, 48, 32),  # Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": _qwen_moe(4096, 12288, 1536, 94, 64),
}
