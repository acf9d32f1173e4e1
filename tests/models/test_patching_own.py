"""Patched models with a user's head, loss, activation or forward compute as before, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from weft.models import patch

from tests.models.test_patching import gradients, loaded, tokens

Change = Callable[[Any], Any]
EACH = pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])


def smoothed(logits: Any, labels: Any, vocab_size: int, **given: Any) -> torch.Tensor:
    """A loss of one's own."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=0.2) * 1.5


def set_loss(model: Any) -> None:
    model.loss_function = smoothed


def set_loss_of_class(model: Any) -> None:
    own = type(model)

    class Own(own):  # type: ignore[misc, valid-type]
        loss_function = staticmethod(smoothed)

    Own.__name__, Own.__module__, Own.forward = own.__name__, own.__module__, own.forward
    model.__class__ = Own


def set_loss_type(model: Any) -> None:
    model.loss_type = "ForTokenClassification"


def hook_head(model: Any) -> None:
    model.get_output_embeddings().register_forward_hook(lambda module, given, output: output * 0.5)


def hook_head_before(model: Any) -> None:
    model.get_output_embeddings().register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


def hook_head_backward(model: Any) -> None:
    model.get_output_embeddings().register_full_backward_hook(lambda module, given, output: (given[0] * 0.5,))


def hook_head_before_backward(model: Any) -> None:
    model.get_output_embeddings().register_full_backward_pre_hook(lambda module, output: (output[0] * 0.5,))


def wrap_head_forward(model: Any) -> None:
    head = model.get_output_embeddings()
    own = head.forward
    head.forward = lambda hidden: own(hidden) * 0.5


def softcap_head(model: Any) -> None:
    class Capped(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(input))

    head = model.get_output_embeddings()
    capped = Capped(head.in_features, head.out_features, bias=False)
    capped.weight = head.weight
    model.set_output_embeddings(capped)


def norm_head_weight(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    nn.utils.parametrizations.weight_norm(head)


def norm_head_weight_by_hook(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    nn.utils.weight_norm(head)


def adapt_head(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    names = ["lm_head"]
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False))
    made.base_model.model.get_output_embeddings().requires_grad_(True)
    return made.base_model.model


def adapt_mlp(model: Any) -> Any:
    import peft

    torch.manual_seed(3)
    names = ["c_fc"] if hasattr(model, "transformer") else ["gate_proj", "down_proj"]
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    ).base_model.model


def replace_activation(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.GELU()


def hook_activation(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn.register_forward_hook(lambda module, given, output: output * 0.5)


def hook_norm(model: Any) -> None:
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.register_forward_hook(lambda module, given, output: output * 0.5)


def hook_projection(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "down_proj")):
            module.register_forward_hook(lambda module, given, output: output * 0.5)


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        *(set_loss, set_loss_of_class, hook_head, hook_head_before, hook_head_backward, hook_head_before_backward),
        *(wrap_head_forward, softcap_head, norm_head_weight, norm_head_weight_by_hook, adapt_head, adapt_mlp),
        *(replace_activation, hook_activation, hook_norm, hook_projection),
    )
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["changed", "patched"])
@pytest.mark.parametrize("change", CHANGES)
@EACH
def test_a_models_own_changes_stay(name: str, change: str, first: str) -> None:
    """Whichever comes first."""
    theirs = loaded(name)
    theirs = CHANGES[change](theirs) or theirs
    expected = gradients(theirs)
    model = loaded(name)
    if first == "patched":
        patch(model)
        model = CHANGES[change](model) or model
    else:
        model = CHANGES[change](model) or model
        patch(model)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-5, atol=1e-6)


def test_another_loss_changes_the_loss() -> None:
    """The loss of the test above differs from the model's own."""
    own, plain = loaded("llama"), loaded("llama")
    set_loss(own)
    assert abs(gradients(own)[0] - gradients(plain)[0]) > 1e-3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_loss, "LlamaForCausalLM x 1: its own forward: its loss_function is smoothed"),
        (hook_head, "LlamaForCausalLM x 1: its own forward: its head has hooks"),
        (softcap_head, "LlamaForCausalLM x 1: its own forward: its head is a Capped, not a plain Linear"),
        (wrap_head_forward, "LlamaForCausalLM x 1: its own forward: the forward of its head was replaced"),
    ],
)
def test_patch_prints_the_modules_left_as_they_are(
    change: Change, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = loaded("llama")
    change(model)
    patch(model)
    assert capsys.readouterr().out.splitlines()[0] == said


def test_hooks_of_all_modules_are_run() -> None:
    model, seen = loaded("llama"), []
    patch(model)
    ids, labels = tokens()
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, output: seen.append(module))
    try:
        model(ids, labels=labels)
    finally:
        hook.remove()
    assert model.lm_head in seen
    seen.clear()
    assert model(ids, labels=labels).logits is None and not seen


def test_a_head_of_other_rows_than_the_config_says_is_the_models_own_concern() -> None:
    model, (ids, labels) = loaded("llama"), tokens()
    model.lm_head = nn.Linear(32, 64, bias=False)
    patch(model)
    with pytest.raises(RuntimeError, match="shape"):
        model(ids, labels=labels)


def test_a_loss_of_the_library_that_was_replaced_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.loss import loss_utils

    model, (ids, labels) = loaded("llama"), tokens()
    patch(model)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", smoothed)
    torch.testing.assert_close(
        model(ids, labels=labels).loss, smoothed(model(ids).logits, labels, 61), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "places", [torch.tensor([3, 4, 5]), torch.tensor([0, 1]), 4], ids=["tensor", "first", "number"]
)
def test_logits_of_some_places_are_the_models_own(places: Any) -> None:
    theirs, model = loaded("llama"), loaded("llama")
    patch(model)
    ids, _ = tokens()
    count = 4 if isinstance(places, int) else len(places)
    given = {"labels": ids[:, -count:], "logits_to_keep": places}
    torch.testing.assert_close(model(ids, **given).loss, theirs(ids, **given).loss, rtol=1e-5, atol=1e-6)


class TestRefused:
    def test_a_class_of_the_same_name(self) -> None:
        class LlamaForCausalLM(type(loaded("llama"))):  # type: ignore[misc]
            def forward(self, *given: Any, **named: Any) -> Any:
                return super().forward(*given, **named)

        model = loaded("llama")
        model.__class__ = LlamaForCausalLM
        with pytest.raises(
            ValueError, match=r"patch takes a LlamaForCausalLM, .* of transformers, not a LlamaForCausalLM"
        ):
            patch(model)

    @pytest.mark.parametrize("wraps", [True, False], ids=["wraps", "replaces"])
    @pytest.mark.parametrize("part", ["LlamaForCausalLM", "LlamaMLP", "LlamaRMSNorm"])
    def test_a_forward_that_was_set_on_the_class(self, part: str, wraps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformers.models.llama import modeling_llama

        kind = getattr(modeling_llama, part)
        own = kind.forward

        def forward(self: Any, *given: Any, **named: Any) -> Any:
            return own(self, *given, **named)

        monkeypatch.setattr(kind, "forward", functools.wraps(own)(forward) if wraps else forward)
        model = loaded("llama")
        with pytest.raises(ValueError, match=rf"is not transformers' forward: .* in every {part}; restore the class's"):
            patch(model)
        assert not any("forward" in module.__dict__ for module in model.modules())

    @pytest.mark.parametrize("part", ["", "model.layers.0.mlp", "model.norm"])
    def test_a_module_that_was_compiled(self, part: str) -> None:
        model = loaded("llama")
        model.get_submodule(part).compile(backend="eager")
        with pytest.raises(ValueError, match=r"forward was compiled by Module.compile\(\); patch first, then compile"):
            patch(model)

    def test_a_module_of_another_library_of_the_same_name_is_left_alone(self) -> None:
        class LlamaRMSNorm(nn.Module):
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                return hidden_states * 2

        theirs, model = loaded("llama"), loaded("llama")
        for each in (theirs, model):
            each.model.norm = LlamaRMSNorm()
        patch(model)
        torch.testing.assert_close(gradients(model), gradients(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive  # the sample compiles Weft's own models, in test_compiled.py
def test_a_patched_model_is_compiled_afterwards() -> None:
    theirs, model = loaded("llama"), loaded("llama")
    patch(model)
    model.compile(backend="eager")
    torch.testing.assert_close(gradients(model), gradients(theirs), rtol=1e-5, atol=1e-6)
