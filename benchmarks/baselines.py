"""A Llama on torch's own tensor parallelism, with the same weights: the baseline of Weft's training step."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from weft.models import Llama
from weft.models.llama.config import LlamaConfig
from weft.models.rope import rotary_tables

# torchtitan's plan for a Llama without sequence parallelism. The input of attention and of the MLP becomes a DTensor
# once, before the projections. So backward reduces a single gradient there, instead of a gradient for each projection.
PLAN = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.self_attn": PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "layers.*.self_attn.q_proj": ColwiseParallel(),
    "layers.*.self_attn.k_proj": ColwiseParallel(),
    "layers.*.self_attn.v_proj": ColwiseParallel(),
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    "layers.*.mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "layers.*.mlp.gate_proj": ColwiseParallel(),
    "layers.*.mlp.up_proj": ColwiseParallel(),
    "layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),  # for loss_parallel
}


class TorchLlama(nn.Module):
    """A Llama of plain torch modules, with a Weft Llama's weights. Activations between modules are local tensors."""

    def __init__(self, source: Llama) -> None:
        super().__init__()
        config = source.config
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.load_state_dict(source.state_dict())

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> logits [B, T, V]"""
        cos, sin = rotary_tables(self.config.rotary, tokens.shape[1], tokens.device)  # cached between steps
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class _Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = _turn(self._heads(self.q_proj(x)), cos, sin)
        key = _turn(self._heads(self.k_proj(x)), cos, sin)
        value = self._heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, local heads * D] -> [B, local heads, T, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class _MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)  # [B, heads, T, D / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def parallelize_by_torch(model: TorchLlama, mesh: DeviceMesh) -> nn.Module:
    """Lays a TorchLlama out by torch's tensor parallelism over the axis "tp".

    `average_gradients` adds data parallelism.
    """
    return parallelize_module(model, mesh["tp"], PLAN)


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Averages all gradients by a single all-reduce over the data axis, as DistributedDataParallel with one bucket."""
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    local = [gradient for gradient in gradients if gradient is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in local])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts = flat.split([gradient.numel() for gradient in local])
    torch._foreach_copy_(local, [part.view_as(gradient) for part, gradient in zip(parts, local, strict=True)])
