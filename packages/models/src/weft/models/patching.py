"""`patch`: runs a `transformers` model with Weft's loss, norms and gated MLPs, and undoes this again."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weft.kernels import linear_cross_entropy, rms_norm, swiglu

from .losses import IGNORE_INDEX

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _TransformersClasses:
    """Class names in `transformers`: of a model, of the model's RMS norms, and of the model's gated MLPs."""

    model: str
    norm: str | None = None
    mlp: str | None = None


SUPPORTED = {
    family.model: family
    for family in (
        _TransformersClasses("LlamaForCausalLM", "LlamaRMSNorm", "LlamaMLP"),
        _TransformersClasses("MistralForCausalLM", "MistralRMSNorm", "MistralMLP"),
        _TransformersClasses("Qwen2ForCausalLM", "Qwen2RMSNorm", "Qwen2MLP"),
        _TransformersClasses("Qwen3ForCausalLM", "Qwen3RMSNorm", "Qwen3MLP"),
        _TransformersClasses("GPT2LMHeadModel"),
    )
}


@dataclass(frozen=True, slots=True)
class Replacement:
    """A module, the new forward, and a description of this forward for the printed summary."""

    module: nn.Module
    forward: Forward
    description: str


class Patch:
    """The changes made by `patch`. `str` gives a line for each class of changed modules."""

    def __init__(self, changes: list[Replacement]) -> None:
        self._changes = changes
        for each in changes:
            each.module.forward = each.forward

    def __str__(self) -> str:
        counts = Counter((type(each.module).__name__, each.description) for each in self._changes)
        return (
            "\n".join(f"{name} x {count}: {description}" for (name, description), count in counts.items()) or "nothing"
        )

    def undo(self) -> None:
        """Restores every module's own forward. A second call does nothing.

        Raises RuntimeError, and changes nothing, where a forward was replaced after `patch`.
        """
        for each in self._changes:
            if each.module.__dict__.get("forward") is not each.forward:
                name = type(each.module).__name__
                raise RuntimeError(
                    f"the forward of a {name} was replaced after patch; restore the earlier forward first, then undo"
                )
        for each in self._changes:
            del each.module.forward
        self._changes = []


def patch(model: nn.Module) -> Patch:
    """Runs a Llama, Mistral, Qwen 2, Qwen 3 or GPT-2 of `transformers` with Weft's ops. Prints and returns the changes.

    In training with labels, the loss is `linear_cross_entropy` of the last hidden states: the full logits never
    exist, and the output's `logits` are None. The model's own forward runs without labels, in `eval()`, with a head
    that is not a plain nn.Linear or has hooks, and with a custom `loss_function`, even one set after `patch`. The
    printed summary names the reason. RMS norms and gated MLPs become Weft's `rms_norm` and `swiglu`. An MLP with
    another activation, or with hooks on the activation, keeps its own forward. Parameters, names and checkpoints stay
    the same.
    `patch(model).undo()` restores the model.
    Communication: none.
    Raises ValueError for a model of another class, a replaced or wrapped forward of transformers, and a compiled
    module.
    """
    family = SUPPORTED.get(type(model).__name__)
    if family is None or not hasattr(model, "config") or not _is_of_transformers(type(model)):
        raise ValueError(f"patch takes a {', '.join(SUPPORTED)} of transformers, not a {type(model).__name__}")
    replacements: dict[str | None, tuple[Forward, str]] = {
        family.model: (_model_forward, _describe_model(model)),
        family.norm: (_norm_forward, "rms_norm"),
        family.mlp: (_gated_mlp_forward, "swiglu"),
    }
    if getattr(model.config, "hidden_act", None) != "silu":
        del replacements[family.mlp]
    changes = []
    for name, module in model.named_modules():
        if type(module).__name__ not in replacements or not _is_of_transformers(type(module)):
            continue
        forward_name = f"{name or type(model).__name__}.forward"
        if "forward" in module.__dict__:
            raise ValueError(
                f"{forward_name} is not the forward of {type(module).__name__}, but was patched or wrapped before; "
                f"undo the earlier change, then patch"
            )
        if module._compiled_call_impl is not None:
            raise ValueError(f"{forward_name} was compiled by Module.compile(); patch first, then compile")
        if not _is_forward_of_transformers(type(module)):
            own = type(module).forward
            raise ValueError(
                f"{forward_name} is not transformers' forward: {own.__module__}.{own.__qualname__} replaces it in "
                f"every {type(module).__name__}; restore the class's forward, then patch"
            )
        replacement, description = replacements[type(module).__name__]
        changes.append(Replacement(module, _bind(replacement, module), description))
    patched = Patch(changes)
    print(patched)
    return patched


def _is_of_transformers(kind: type) -> bool:
    """Whether transformers defines the class, rather than another library with a class of this name."""
    return kind.__module__.partition(".")[0] == "transformers"


def _is_forward_of_transformers(kind: type[nn.Module]) -> bool:
    """Whether the class's forward is code from transformers' folder: neither replaced nor wrapped."""
    import transformers

    folder = Path(str(transformers.__file__)).parent
    code = getattr(kind.forward, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(folder)


def _describe_model(model: Any) -> str:
    reason = _reason_for_own_forward(model)
    return "linear_cross_entropy in training, which makes no logits" if reason is None else f"its own forward: {reason}"


def _reason_for_own_forward(model: Any) -> str | None:
    """Why `linear_cross_entropy` would bypass the model's head or loss; None if both are transformers' own."""
    from transformers.loss import loss_utils  # the library of the model; Weft does not depend on it

    head, loss = model.get_output_embeddings(), model.loss_function
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain Linear"
    if type(head.weight) is not nn.Parameter or type(head.weight.data) is not Tensor:
        return f"the weight of its head is a {type(head.weight.data).__name__}"
    if "forward" in head.__dict__:
        return "the forward of its head was replaced"
    if _has_hooks(head):
        return "its head has hooks"
    if len(head.weight) != model.config.vocab_size:
        return f"its head has {len(head.weight)} rows, and config.vocab_size is {model.config.vocab_size}"
    if loss is not loss_utils.LOSS_MAPPING["ForCausalLM"] or not all(
        getattr(each, "__module__", None) == loss_utils.__name__ for each in (loss, loss_utils.fixed_cross_entropy)
    ):
        return f"its loss_function is {getattr(loss, '__qualname__', type(loss).__name__)}"
    return None


def _has_hooks(module: nn.Module) -> bool:
    """Whether calling the module runs hooks besides its forward."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    of_all = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(map(len, own)) or any(len(getattr(torch.nn.modules.module, f"_global_{name}")) for name in of_all)


def _bind(replacement: Forward, module: nn.Module) -> Forward:
    """Binds `replacement` to the module, with the signature of the class's own forward, which callers inspect."""
    own = type(module).forward
    names = tuple(inspect.signature(own).parameters)[1:]

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, dict(zip(names, args, strict=False)) | kwargs)

    return MethodType(forward, module)


def _norm_forward(self: Any, arguments: dict[str, Any]) -> Tensor:
    return rms_norm(arguments["hidden_states"], self.weight, self.variance_epsilon)


def _gated_mlp_forward(self: Any, arguments: dict[str, Any]) -> Any:
    if type(self.act_fn) is not nn.SiLU or "forward" in self.act_fn.__dict__ or _has_hooks(self.act_fn):
        return type(self).forward(self, **arguments)
    return self.down_proj(swiglu(self.gate_proj(arguments["x"]), self.up_proj(arguments["x"])))


def _requests_logits(logits_to_keep: Any) -> bool:
    """Whether logits of some positions are requested, by a number or by a tensor of indices."""
    return isinstance(logits_to_keep, Tensor) or bool(logits_to_keep)


def _model_forward(self: Any, arguments: dict[str, Any]) -> Any:
    asks_for_logits = (
        not self.training or arguments.get("labels") is None or _requests_logits(arguments.get("logits_to_keep"))
    )
    if asks_for_logits or _reason_for_own_forward(self) is not None:
        return type(self).forward(self, **arguments)
    head = self.get_output_embeddings()
    from transformers import modeling_outputs  # the library of the model; Weft does not depend on it

    labels, targets = arguments.pop("labels"), arguments.pop("shift_labels", None)
    ignored, tokens = arguments.pop("ignore_index", IGNORE_INDEX), arguments.pop("num_items_in_batch", None)
    arguments.pop("logits_to_keep", None)
    as_tuple = not (self.config.use_return_dict if arguments.get("return_dict") is None else arguments["return_dict"])
    hidden_output = self.base_model(**arguments | {"return_dict": True})
    hidden = hidden_output.last_hidden_state  # [B, T, H]
    if targets is None:
        targets = F.pad(labels, (0, 1), value=ignored)[..., 1:]  # [B, T]; each token's target is the next label
    loss = linear_cross_entropy(
        hidden, head.weight, targets.to(hidden.device), linear_bias=head.bias, ignore_index=ignored, denominator=tokens
    )
    output = (
        modeling_outputs.CausalLMOutputWithCrossAttentions
        if hasattr(hidden_output, "cross_attentions")
        else modeling_outputs.CausalLMOutputWithPast
    )
    parts: dict[str, Any] = {name: value for name, value in hidden_output.items() if name != "last_hidden_state"}
    result = output(**parts | {"loss": loss})
    return result.to_tuple() if as_tuple else result
