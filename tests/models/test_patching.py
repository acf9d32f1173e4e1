"""A loaded model of transformers with Weft's ops: the same loss and gradients; undo restores the model."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional
from weft.kernels import cross_entropy
from weft.models import patch

SMALL = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "use_cache": False}
GATED = SMALL | {"intermediate_size": 44, "num_key_value_heads": 2}


def models() -> dict[str, Any]:
    import transformers

    return {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED)),
        "llama-tied": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**GATED, tie_word_embeddings=True)
        ),
        "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GATED, sliding_window=4)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GATED)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GATED, head_dim=8)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=61, n_layer=2, n_head=4, n_embd=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
            )
        ),
    }


NAMES = ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "gpt2")


def loaded(name: str) -> Any:
    torch.manual_seed(0)
    return models()[name]().train()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def gradients(model: Any, **given: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids, labels = tokens()
    loss = model(input_ids=ids, labels=labels, **given).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 23}, {"num_items_in_batch": torch.tensor(23)}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_every_gradient_are_those_of_transformers(name: str, given: dict[str, Any]) -> None:
    theirs = gradients(loaded(name), **given)
    model = loaded(name)
    patch(model)
    torch.testing.assert_close(gradients(model, **given), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_in_training_there_are_no_logits_and_elsewhere_the_models_own(name: str) -> None:
    model, (ids, labels) = loaded(name), tokens()
    theirs = model.eval()(ids, labels=labels)
    patch(model)
    ours = model(ids, labels=labels)
    torch.testing.assert_close((ours.loss, ours.logits), (theirs.loss, theirs.logits), rtol=1e-5, atol=1e-6)
    assert model.train()(ids, labels=labels).logits is None
    assert model(ids).logits.shape == (2, 9, 61)
    assert model(input_ids=ids, labels=labels, return_dict=False)[0].shape == ()
    assert model(input_ids=ids, labels=labels, output_hidden_states=True).hidden_states[0].shape == (2, 9, 32)


def test_labels_shifted_by_the_caller_and_another_label_to_ignore() -> None:
    model, (ids, labels) = loaded("llama"), tokens()
    given = {"labels": labels, "shift_labels": torch.where(labels == -100, 7, labels), "ignore_index": 7}
    theirs = model(ids, **given).loss
    patch(model)
    torch.testing.assert_close(model(ids, **given).loss, theirs, rtol=1e-5, atol=1e-6)


def test_changes_are_printed_and_undone_by_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = loaded("qwen3")
    before = set(model.state_dict())
    changed = patch(model)
    assert capsys.readouterr().out == (
        "Qwen3ForCausalLM x 1: linear_cross_entropy in training, which makes no logits\n"
        "Qwen3RMSNorm x 9: rms_norm\n"
        "Qwen3MLP x 2: swiglu\n"
    )
    assert set(model.state_dict()) == before
    changed.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    changed.undo()
    assert str(changed) == "nothing"
    ids, labels = tokens()
    assert model(ids, labels=labels).logits is not None


def test_the_signature_that_a_trainer_looks_at_stays() -> None:
    model = loaded("llama")
    theirs = inspect.signature(model.forward)
    patch(model)
    assert inspect.signature(model.forward) == theirs


def test_a_copy_of_a_patched_model_computes_with_its_own_weights() -> None:
    model, (ids, labels) = loaded("llama"), tokens()
    patch(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    assert other(ids, labels=labels).loss.item() != model(ids, labels=labels).loss.item()


def test_an_adapted_head_keeps_its_own_forward() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model, (ids, labels) = loaded("llama"), tokens()
    model.lm_head = Adapted(32, 61, bias=False)
    theirs = model(ids, labels=labels).loss
    patch(model)
    torch.testing.assert_close(model(ids, labels=labels).loss, theirs, rtol=1e-5, atol=1e-6)


def test_another_model_and_a_second_patch_are_refused_and_change_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"patch takes a LlamaForCausalLM, .*GPT2LMHeadModel of transformers, not a Linear"
    ):
        patch(torch.nn.Linear(2, 2))
    model = loaded("llama")
    changed = patch(model)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM\.forward is not the forward of .* undo the earlier change, then patch"
    ):
        patch(model)
    model.model.norm.forward = lambda hidden_states: hidden_states
    with pytest.raises(RuntimeError, match="the forward of a LlamaRMSNorm was replaced after patch"):
        changed.undo()
    assert "forward" in model.__dict__


def trained(model: Any, folder: Any, **given: Any) -> list[float]:
    """The losses that a Trainer logs."""
    import transformers

    ids, labels = tokens()
    rows = [{"input_ids": i, "labels": l} for i, l in zip(ids, labels, strict=True)] * 4
    asked = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, num_train_epochs=1, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, asked, train_dataset=rows, **given)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_a_trainer_trains_a_patched_model_to_the_losses_of_one_that_is_not(tmp_path: Any) -> None:
    model = loaded("llama")
    patch(model)
    losses = trained(model, tmp_path)
    assert len(losses) == 4
    assert trained(loaded("llama"), tmp_path) == pytest.approx(losses, abs=1e-4)


def with_z_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs.logits[:, :-1], labels[:, 1:], z_loss=0.1, denominator=num_items_in_batch)


def with_torchs_z_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    squares = logits.logsumexp(-1).square()[targets != -100].sum()
    return (functional.cross_entropy(logits, targets, reduction="sum") + 0.1 * squares) / num_items_in_batch


@pytest.mark.few(1)
@pytest.mark.parametrize("is_patched", [False, True])
def test_a_trainer_is_given_a_loss_function(is_patched: bool, tmp_path: Any) -> None:
    """A patched model, too: a Trainer with a loss function asks the model for logits, without labels."""
    model = loaded("llama")
    if is_patched:
        patch(model)
    losses = trained(model, tmp_path, compute_loss_func=with_z_loss)
    assert trained(loaded("llama"), tmp_path, compute_loss_func=with_torchs_z_loss) == pytest.approx(losses, abs=1e-4)
    assert losses[0] > trained(loaded("llama"), tmp_path)[0] + 1, "log(61)**2 / 10 or more are the z-loss"
