"""Weft's loss, norms and gates in a model that `transformers` has loaded, and out of it again."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from weft.kernels import linear_cross_entropy, rms_norm, swiglu

Forward = Callable[..., Any]
IGNORED = -100  # the label of a token that has none, where the caller names no other


@dataclass(frozen=True, slots=True)
class Family:
    """Names of classes of `transformers`: of the model, of its RMS norms and of its gated MLPs."""

    model: str
    norm: str | None = None
    mlp: str | None = None


FAMILIES = {
    family.model: family
    for family in (
        Family("LlamaForCausalLM", "LlamaRMSNorm", "LlamaMLP"),
        Family("Qwen2ForCausalLM", "Qwen2RMSNorm", "Qwen2MLP"),
        Family("Qwen3ForCausalLM", "Qwen3RMSNorm", "Qwen3MLP"),
        Family("GPT2LMHeadModel"),
    )
}


@dataclass(frozen=True, slots=True)
class Replaced:
    """A module whose forward is Weft's, and what it computes now."""

    module: nn.Module
    forward: Forward
    what: str


class Patch:
    """What `patch` changed in a model. Printed, it has a line for each class of modules."""

    def __init__(self, replaced: list[Replaced]) -> None:
        self._replaced = replaced
        for each in replaced:
            each.module.forward = each.forward

    def __str__(self) -> str:
        counts = Counter((type(each.module).__name__, each.what) for each in self._replaced)
        return "\n".join(f"{name} x {count}: {what}" for (name, what), count in counts.items()) or "nothing"

    def undo(self) -> None:
        """Gives every module the forward of its class again. A second time it does nothing.

        Raises RuntimeError where something else has replaced a forward since; then nothing is changed.
        """
        for each in self._replaced:
            if each.module.__dict__.get("forward") is not each.forward:
                name = type(each.module).__name__
                raise RuntimeError(f"the forward of a {name} was replaced after patch; take that back first, then undo")
        for each in self._replaced:
            del each.module.forward
        self._replaced = []


def patch(model: nn.Module) -> Patch:
    """Lets a Llama, Qwen 2, Qwen 3 or GPT-2 of `transformers` compute with Weft's ops; prints what it changed, and returns it.

    While the model trains and is given labels, its loss is the `linear_cross_entropy` of the last hidden states: the logits
    never exist all at once, and the output's `logits` are None. Without labels, in `eval()`, and where its head is no plain
    nn.Linear, the model's own forward runs. The RMS norms and gated MLPs of a Llama or Qwen are Weft's `rms_norm` and
    `swiglu`. Parameters, their names and what is saved stay as they are.
    `patch(model).undo()` takes it back.
    Communication: none.
    Raises ValueError for a model of another class, and where a forward is not its class's own.
    """
    family = FAMILIES.get(type(model).__name__)
    if family is None or not hasattr(model, "config"):
        raise ValueError(f"patch takes a {', '.join(FAMILIES)} of transformers, not a {type(model).__name__}")
    ways: dict[str | None, tuple[Forward, str]] = {
        family.model: (_model, "linear_cross_entropy in training, which makes no logits"),
        family.norm: (_norm, "rms_norm"),
        family.mlp: (_gated_mlp, "swiglu"),
    }
    if getattr(model.config, "hidden_act", None) != "silu":
        del ways[family.mlp]
    replaced = []
    for name, module in model.named_modules():
        if type(module).__name__ not in ways:
            continue
        if "forward" in module.__dict__:
            where = f"{name or type(model).__name__}.forward"
            raise ValueError(f"{where} is not its class's own: it was patched or wrapped before; undo that, then patch")
        way, what = ways[type(module).__name__]
        replaced.append(Replaced(module, _instead_of(way, module), what))
    changed = Patch(replaced)
    print(changed)
    return changed


def _instead_of(way: Forward, module: nn.Module) -> Forward:
    """`way` as a method of the module, with the signature of the class's own forward, which others look at."""
    own = type(module).forward
    names = tuple(inspect.signature(own).parameters)[1:]

    @functools.wraps(own)
    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        return way(self, dict(zip(names, given, strict=False)) | named)

    return MethodType(forward, module)


def _norm(self: Any, given: dict[str, Any]) -> Tensor:
    return rms_norm(given["hidden_states"], self.weight, self.variance_epsilon)


def _gated_mlp(self: Any, given: dict[str, Any]) -> Any:
    return self.down_proj(swiglu(self.gate_proj(given["x"]), self.up_proj(given["x"])))


def _model(self: Any, given: dict[str, Any]) -> Any:
    head = self.get_output_embeddings()
    if not self.training or given.get("labels") is None or given.get("logits_to_keep") or type(head) is not nn.Linear:
        return type(self).forward(self, **given)
    from transformers import modeling_outputs  # the model's own library, which Weft does without

    labels, targets = given.pop("labels"), given.pop("shift_labels", None)
    ignored, tokens = given.pop("ignore_index", IGNORED), given.pop("num_items_in_batch", None)
    given.pop("logits_to_keep", None)
    as_tuple = not (self.config.use_return_dict if given.get("return_dict") is None else given["return_dict"])
    inner = self.base_model(**given | {"return_dict": True})
    hidden = inner.last_hidden_state  # [B, T, H]
    if targets is None:
        targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]  # [B, T], of the token after each
    loss = linear_cross_entropy(
        hidden, head.weight, targets.to(hidden.device), linear_bias=head.bias, ignore_index=ignored, denominator=tokens
    )
    output = (
        modeling_outputs.CausalLMOutputWithCrossAttentions
        if hasattr(inner, "cross_attentions")
        else modeling_outputs.CausalLMOutputWithPast
    )
    parts: dict[str, Any] = {name: value for name, value in inner.items() if name != "last_hidden_state"}
    result = output(**parts | {"loss": loss})
    return result.to_tuple() if as_tuple else result
