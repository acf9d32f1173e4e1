"""Model families written for one device, and everything for training on any mesh.

A public name is imported on first use: the command line can answer, and react to Ctrl-C, before torch is loaded.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing.TYPE_CHECKING; importing typing takes longer than the rest of this module
if TYPE_CHECKING:
    from .checkpoint.adapters import load_lora, save_lora
    from .checkpoint.huggingface import from_pretrained, save_pretrained
    from .checkpoint.states import load_checkpoint, read_run, save_checkpoint
    from .generation import generate, stream
    from .gpt.config import GPTConfig
    from .gpt.model import GPT
    from .initialization import initialize
    from .llama.config import LlamaConfig
    from .llama.model import Llama
    from .losses import document_sums
    from .mixtral.config import MixtralConfig
    from .mixtral.model import Mixtral
    from .parallel import (
        Batch,
        ColwiseParallel,
        ExpertParallel,
        ExpertPlan,
        ParallelPlan,
        PositionParallel,
        PrepareInput,
        PrepareOutput,
        RowwiseParallel,
        VocabParallel,
        lay_out_batch,
        lora,
        merge_lora,
        parallelize,
        without_adapters,
    )
    from .patching import Patch, patch
    from .predict.find_plans import FoundPlan, FoundPlans, find_plans
    from .predict.hang_report import Hang
    from .predict.hangs import NoHang, check_hangs
    from .preference_losses import dpo, implicit_rewards, kl_of, kto
    from .prompt_cache import PromptCache
    from .qwen.config import QwenConfig
    from .qwen.model import Qwen
    from .qwen_moe.config import QwenMoeConfig
    from .qwen_moe.model import QwenMoe
    from .rope_scaling import DynamicRopeScaling, LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
    from .schedules.pipeline_plan import PipelinePlan
    from .step.communication import Communication
    from .step.find_gradients import clip_gradients
    from .step.followed_step import Memory
    from .step.forward_backward import forward_backward
    from .step.loss_parts import RouterLosses, RouterReport, update_correction_biases
    from .step.memory import predict_memory
    from .step.preference import DPOCriterion, KTOCriterion, PreferenceTargets, log_probabilities
    from .step.record import record

_HOMES = {
    "Hang": ".predict.hang_report",
    "NoHang": ".predict.hangs",
    "check_hangs": ".predict.hangs",
    "load_lora": ".checkpoint.adapters",
    "save_lora": ".checkpoint.adapters",
    "from_pretrained": ".checkpoint.huggingface",
    "save_pretrained": ".checkpoint.huggingface",
    "load_checkpoint": ".checkpoint.states",
    "read_run": ".checkpoint.states",
    "save_checkpoint": ".checkpoint.states",
    "Communication": ".step.communication",
    "document_sums": ".losses",
    "generate": ".generation",
    "stream": ".generation",
    "initialize": ".initialization",
    "forward_backward": ".step.forward_backward",
    "Batch": ".parallel",
    "ColwiseParallel": ".parallel",
    "ExpertParallel": ".parallel",
    "ExpertPlan": ".parallel",
    "ParallelPlan": ".parallel",
    "PipelinePlan": ".schedules.pipeline_plan",
    "PositionParallel": ".parallel",
    "PrepareInput": ".parallel",
    "PrepareOutput": ".parallel",
    "RowwiseParallel": ".parallel",
    "VocabParallel": ".parallel",
    "lay_out_batch": ".parallel",
    "lora": ".parallel",
    "merge_lora": ".parallel",
    "parallelize": ".parallel",
    "without_adapters": ".parallel",
    "Patch": ".patching",
    "patch": ".patching",
    "FoundPlan": ".predict.find_plans",
    "FoundPlans": ".predict.find_plans",
    "find_plans": ".predict.find_plans",
    "PromptCache": ".prompt_cache",
    "dpo": ".preference_losses",
    "implicit_rewards": ".preference_losses",
    "kl_of": ".preference_losses",
    "kto": ".preference_losses",
    "DPOCriterion": ".step.preference",
    "KTOCriterion": ".step.preference",
    "PreferenceTargets": ".step.preference",
    "log_probabilities": ".step.preference",
    "record": ".step.record",
    "RouterLosses": ".step.loss_parts",
    "RouterReport": ".step.loss_parts",
    "update_correction_biases": ".step.loss_parts",
    "DynamicRopeScaling": ".rope_scaling",
    "LinearRopeScaling": ".rope_scaling",
    "Llama3RopeScaling": ".rope_scaling",
    "YarnRopeScaling": ".rope_scaling",
    "Memory": ".step.followed_step",
    "predict_memory": ".step.memory",
    "clip_gradients": ".step.find_gradients",
}  # public name -> module; `families.FAMILIES` adds the names of the model families
__all__ = [
    "GPT",
    "Batch",
    "ColwiseParallel",
    "Communication",
    "DPOCriterion",
    "DynamicRopeScaling",
    "ExpertParallel",
    "ExpertPlan",
    "FoundPlan",
    "FoundPlans",
    "GPTConfig",
    "Hang",
    "KTOCriterion",
    "LinearRopeScaling",
    "Llama",
    "Llama3RopeScaling",
    "LlamaConfig",
    "Memory",
    "Mixtral",
    "MixtralConfig",
    "NoHang",
    "ParallelPlan",
    "Patch",
    "PipelinePlan",
    "PositionParallel",
    "PreferenceTargets",
    "PrepareInput",
    "PrepareOutput",
    "PromptCache",
    "Qwen",
    "QwenConfig",
    "QwenMoe",
    "QwenMoeConfig",
    "RouterLosses",
    "RouterReport",
    "RowwiseParallel",
    "VocabParallel",
    "YarnRopeScaling",
    "check_hangs",
    "clip_gradients",
    "document_sums",
    "dpo",
    "find_plans",
    "forward_backward",
    "from_pretrained",
    "generate",
    "implicit_rewards",
    "initialize",
    "kl_of",
    "kto",
    "lay_out_batch",
    "load_checkpoint",
    "load_lora",
    "log_probabilities",
    "lora",
    "merge_lora",
    "parallelize",
    "patch",
    "predict_memory",
    "read_run",
    "record",
    "save_checkpoint",
    "save_lora",
    "save_pretrained",
    "stream",
    "update_correction_biases",
    "without_adapters",
]

__version__: str


def _imported(name: str) -> object:
    from importlib import import_module

    from .families import FAMILIES

    modules = _HOMES | {each: home for family in FAMILIES.values() for each, home in family.names.items()}
    if name not in modules:
        from weft.mesh.extension import version_of

        return version_of(__name__)(name)
    value = getattr(import_module(modules[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, imported or not, for `dir` and tab completion. Imports nothing."""
    return sorted({*globals(), *__all__, "__version__"})


if not TYPE_CHECKING:  # a type checker would accept any attribute of a module with __getattr__
    __getattr__ = _imported
