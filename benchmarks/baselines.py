"""The same Llama on torch's own tensor parallelism: what Weft's training step is measured against."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from weft.models import Llama
from weft.models.llama.config import LlamaConfig
from weft.models.llama.model import rotary_tables

PLAN = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.q_proj": ColwiseParallel(),
    "layers.*.k_proj": ColwiseParallel(),
    "layers.*.v_proj": ColwiseParallel(),
    "layers.*.o_proj": RowwiseParallel(),
    "layers.*.gate_proj": ColwiseParallel(),
    "layers.*.up_proj": ColwiseParallel(),
    "layers.*.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


class TorchLlama(nn.Module):
    """Plain torch modules, with the weights of a Llama of ours. tp: ranks that share the heads."""

    def __init__(self, source: Llama, tp: int) -> None:
        super().__init__()
        config = source.config
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TorchLayer(config, tp) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        names = {
            name.replace("self_attn.", "").replace("mlp.", ""): value for name, value in source.state_dict().items()
        }
        self.load_state_dict(names)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = rotary_tables(self.config, tokens.shape[1], tokens.device)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class TorchLayer(nn.Module):
    def __init__(self, config: LlamaConfig, tp: int) -> None:
        super().__init__()
        hidden, width, kv_width = config.hidden_size, config.hidden_size, config.num_kv_heads * config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads // tp, config.num_kv_heads // tp, config.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.norm_eps)
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        h = self.input_layernorm(x)
        query = _turn(self.q_proj(h).view(B, T, self.heads, self.head_dim).transpose(1, 2), cos, sin)
        key = _turn(self.k_proj(h).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2), cos, sin)
        value = self.v_proj(h).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(B, T, -1))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)  # [B, heads, T, D / 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def parallelize_by_torch(model: TorchLlama, mesh: DeviceMesh) -> nn.Module:
    """torch's tensor parallelism over the axis "tp"; data parallelism is `average_gradients`."""
    return parallelize_module(model, mesh["tp"], PLAN)


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """One flat all-reduce of all gradients over the data axis, as DDP's one bucket would be."""
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    local = [gradient for gradient in gradients if gradient is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in local])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for gradient, part in zip(local, flat.split([g.numel() for g in local]), strict=True):
        gradient.copy_(part.view_as(gradient))
