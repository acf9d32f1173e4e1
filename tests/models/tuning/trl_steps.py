"""The loss and the gradients of one batch by the trainers of trl, with Weft's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def trl_step(
    task: str,
    folder: Path,
    reference: Path | None,
    rows: list[dict[str, Any]],
    scratch: Path,
    options: dict[str, Any],
    adapters: dict[str, Any] | None = None,
    values: dict[str, Tensor] | None = None,
) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """The loss of one batch of all rows, and the gradient of every trained parameter; and the logged metrics.

    options: of the trainer's config. adapters: of peft's LoraConfig. values: of the adapters, by Weft's names.
    """
    # These take two seconds to import, and ranks import this module without calling `trl_step`.
    import datasets
    import trl
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    datasets.config.HF_DATASETS_CACHE = scratch / "cache"  # type: ignore[attr-defined]
    datasets.disable_progress_bars()
    settings, trainer_class = getattr(trl, f"{task.upper()}Config"), getattr(trl, f"{task.upper()}Trainer")
    arguments = settings(
        output_dir=str(scratch),
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        report_to=[],
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        **options,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: dict[str, Any] = {}
    if reference is not None:
        inputs["ref_model"] = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    if adapters is not None:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapters))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if values is not None and ".lora_" in name:
                    parameter.copy_(values[weft_name(name)])
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **inputs,
    )
    trainer.model.train()
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {
        weft_name(name): parameter.grad
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    metrics = getattr(trainer, "_stored_metrics", {}).get("train", {})
    return loss.item(), gradients, dict(metrics)


def weft_name(name: str) -> str:
    """Weft's name of a parameter of transformers, or of peft's adapters of it."""
    name = name.removeprefix("base_model.model.").removeprefix("model.")
    for side in "AB":
        name = name.replace(f".lora_{side}.default.weight", f".lora.{side}")
    return name
