"""The configuration of a training run: frozen dataclasses, checked on creation. Their field docstrings are the help.

`learning_rate`: the rate which the options of the optimizer give at each step, for `Trainer.step`. `state_tensors`: the
optimizer's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from weft.mesh.extension import MOST_RANKS

from ..checks import (
    LARGEST,
    check_above_zero,
    check_at_least,
    check_at_most,
    check_decay_rates,
    check_kinds,
)
from ..config import ModelConfig, shown
from ..data.examples.example import Task
from ..exact import parse_exact
from ..plan_options import Context, Recompute, TokenTransport, Zero
from ..schedules.pipeline_plan import PipelinePlan, Split
from ..schedules.schedule import ScheduleName
from .task_config import DPOConfig, KTOConfig, LoRAConfig, ReferenceKind, ReferenceMeshConfig, check_task_options

TrackerName = Literal["tensorboard", "wandb"]
PROFILED_FROM, PROFILED_STEPS = 3, 3  # steps 3 to 5: steps 1 and 2 include work done once
# Optimizers of torch which update each element by itself; and muon, which gathers a sharded matrix on a rank. Of each
# the number of state tensors of a parameter's size.
OPTIMIZERS = {
    "adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "adadelta": 2, "rmsprop": 2, "rprop": 2,
    "asgd": 1, "sgd": 1, "muon": 2,
}  # fmt: skip
_WITH_MOMENTUM = ("sgd", "rmsprop")  # optimizers with a state less if beta1 is 0
# refused optimizers of torch, and why their update is not elementwise
NOT_ELEMENTWISE = {
    "adafactor": "keeps the means of rows and columns, and scales by the norm of the whole parameter",
    "lbfgs": "multiplies vectors of all parameters, and computes the loss several times a step",
    "sparseadam": "takes sparse gradients alone, and there are none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh's axes. Missing sizes are chosen to use all processes: one per GPU, 4 without GPUs, or those of
    a launcher. Without a launcher, where dp is given and no missing size makes that number, as many processes start as
    the product of the given sizes.
    """

    pp: int = 1
    """Pipeline parallel: each rank along pp holds some of the layers."""
    dp: Annotated[int | None, shown("INT", "processes / pp / cp / tp")] = None
    """Data parallel: each rank along dp reads its own part of every batch."""
    cp: int = 1
    """Context parallel: the ranks along cp share the tokens of every sequence."""
    tp: Annotated[int | None, shown("INT", "2; 1 for an odd number of processes")] = None
    """Tensor parallel: the ranks along tp share every layer."""
    ep: int = 1
    """Expert parallel: the ranks along ep share the experts of a mixture. Divides dp x cp, and adds no processes."""

    def __post_init__(self) -> None:
        check_kinds("mesh", self)
        check_at_least("mesh", self, 1, "ep")
        check_at_most("mesh", self, MOST_RANKS, "ep")
        names = [name for name in ("pp", "dp", "cp", "tp") if getattr(self, name) is not None]
        check_at_most("mesh", self, MOST_RANKS, *names)
        check_at_least("mesh", self, 1, *names)
        if (ranks := math.prod(getattr(self, name) for name in names)) > MOST_RANKS:
            raise ValueError(f"mesh has {ranks:,} ranks; it must be {MOST_RANKS:,} or fewer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """How the run is parallelized. The layouts of single layers come from the model."""

    sequence: bool = False
    """Sequence parallelism: shard activations on the tokens between tensor-parallel layers."""
    context: Annotated[Context | None, shown("{all_gather,ulysses}", "all_gather where mesh.cp is above 1")] = None
    """Attention under context parallelism: gather keys and values over cp, or exchange tokens for heads."""
    schedule: Annotated[ScheduleName | None, shown("NAME", "1f1b where mesh.pp is above 1")] = None
    """Order of the microbatches in a pipeline: gpipe, 1f1b, interleaved or zero_bubble."""
    microbatches: Annotated[
        int | None, shown("INT", "1; in a pipeline, the largest number up to 8 that divides a rank's rows")
    ] = None
    """Microbatches that a batch is split into, by rows."""
    split: Annotated[str | None, shown("TEXT", "layers")] = None
    """Pipeline stages: layers (cut evenly), layers per stage (1,2,1), or where stages begin (layers.1,layers.3)."""
    recompute: Recompute = "none"
    """What backward recomputes. selective: all but matrix products and communicated tensors; full: every block."""
    zero: Zero = 0
    """ZeRO level, over dp and cp: 1 shards the optimizer's state, 2 also gradients, 3 also parameters."""
    experts_tokens: Annotated[TokenTransport | None, shown("{exchange,gather}", "the one estimated to be faster")] = (
        None
    )
    """With mesh.ep: send each token to the ranks that hold its experts, or gather all tokens on every rank along ep."""
    experts_over_tp: bool = False
    """Let mesh.ep divide dp x cp x tp: each expert is then whole, and not split over tp."""

    exact: Annotated[str | None, shown("AXIS=SIZE,...", "off")] = None
    """Take sums in the order of a mesh of these sizes, as in dp=4,tp=2: equal bits on every mesh dividing the sizes."""

    def __post_init__(self) -> None:
        check_kinds("plan", self)
        if self.microbatches is not None:
            check_at_least("plan", self, 1, "microbatches")

    def pipeline(self, pp: int) -> PipelinePlan | None:
        """The `PipelinePlan` of these options; None without a pipeline, and before `complete_plan`.

        pp: the size of the axis "pp". Raises ValueError as `PipelinePlan`.
        """
        if pp == 1 or self.microbatches is None or self.schedule is None:
            return None
        parts = (self.split or "layers").split(",")
        split: Split = "layers" if parts == ["layers"] else tuple(parts)
        if all(part.strip().isdecimal() for part in parts):
            split = tuple(int(part) for part in parts)
        return PipelinePlan(split=split, schedule=self.schedule, microbatches=self.microbatches)

    def options(self, pp: int, ep: int) -> dict[str, Any]:
        """The keyword arguments for `ParallelPlan`. pp, ep: sizes of the axes."""
        from ..parallel.plan import ExpertPlan  # imported here because torch takes seconds

        experts = ExpertPlan(size=ep, over_tp=self.experts_over_tp, tokens=self.experts_tokens) if ep > 1 else None
        return {
            "sequence": self.sequence,
            "context": self.context,
            "recompute": self.recompute,
            "zero": self.zero,
            "pipeline": self.pipeline(pp),
            "experts": experts,
            "exact": None if self.exact is None else parse_exact(self.exact),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Training data. One sequence in 20, at most 128, is held out of training: whole documents where possible."""

    path: Annotated[Path | None, shown("PATH", "the source of Python's standard library")] = None
    """A folder made by `weft data prepare`, or a UTF-8 text file or folder of them, whose bytes are the tokens; for
    sft, dpo and kto: records of examples."""
    mixture: Annotated[tuple[str, ...], shown("FOLDER=WEIGHT ...", "data.path alone")] = ()
    """Several such folders or files to draw sequences from, each with its weight, as in books=0.7 code=0.3."""
    template: Annotated[Path | None, shown("FILE", "the tokenizer's own")] = None
    """A chat template in Jinja, for the messages of conversations (tasks sft, dpo and kto)."""
    pack: bool = True
    """In prepared data, let tokens attend only within their own document. For sft, dpo and kto: put several examples in
    a row."""
    verify: bool = True
    """At the start, each process compares its share of the prepared data with the checksums."""
    batch_size: int = 8
    """Sequences per step, over all processes; for sft, dpo and kto: rows. With --data.no-pack a row has one example."""
    sequence_length: int = 128
    """Tokens per sequence. Longer conversations are cut at their end; a row of dpo has room for two sequences."""

    def __post_init__(self) -> None:
        check_kinds("data", self)
        check_at_most("data", self, LARGEST, "batch_size", "sequence_length")
        check_at_least("data", self, 1, "batch_size", "sequence_length")
        if (tokens := self.batch_size * self.sequence_length) > LARGEST:
            raise ValueError(
                f"data.batch_size {self.batch_size} x data.sequence_length {self.sequence_length} is {tokens:,} tokens "
                f"a step; take {LARGEST:,} or fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Options of muon for the matrices of blocks. All other parameters are updated by AdamW, with beta1 and beta2."""

    momentum: float = 0.95
    """Decay rate of the gradient's running mean."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations of an orthogonalization."""
    split_heads: bool = False
    """Orthogonalize the query and key matrices head by head."""

    def __post_init__(self) -> None:
        check_kinds("optimizer.muon", self)
        check_decay_rates("optimizer.muon", self, "momentum")
        check_at_least("optimizer.muon", self, 1, "ns_steps")
        check_at_most("optimizer.muon", self, 99, "ns_steps")  # the bound of torch.optim.Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and the learning rate of each step."""

    name: Annotated[str, shown("NAME", "adamw")] = "adamw"
    """adamw, adam, nadam, radam, adamax, adagrad, adadelta, rmsprop, rprop, asgd, sgd or muon, as in torch.optim."""
    lr: float = 4e-3
    """The peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Rate after the warmup; wsd: constant, then linear over the last decay_steps. rprop uses step 1's rate only."""
    warmup_steps: int = 20
    """Steps of linear warmup to the peak learning rate."""
    decay_steps: Annotated[int | None, shown("INT", "a fifth of the steps")] = None
    """With schedule wsd: the last steps, in which the rate falls."""
    final_share: float = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Norms, biases and everything under rprop have none."""
    beta1: float = 0.9
    """Decay rate of the gradient's running mean; the momentum of sgd and rmsprop, not of muon."""
    beta2: float = 0.95
    """Decay rate of the gradient's running mean square."""
    clip_norm: float = 1.0
    """Largest norm of the gradients, which are scaled down to it; 0: no clipping."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """For --optimizer.name muon."""

    def __post_init__(self) -> None:
        check_kinds("optimizer", self)
        if self.name not in OPTIMIZERS:
            why = NOT_ELEMENTWISE.get(self.name.lower(), "is not known")
            raise ValueError(f"optimizer.name is {self.name}, which {why}; use one of {', '.join(OPTIMIZERS)}")
        changed = [each.name for each in fields(MuonConfig) if getattr(self.muon, each.name) != each.default]
        if changed and self.name != "muon":
            raise ValueError(
                f"optimizer.muon.{changed[0]} is {getattr(self.muon, changed[0])}, but optimizer.name is {self.name}; "
                f"give --optimizer.name muon, or leave out the options of muon"
            )
        check_at_most("optimizer", self, LARGEST, "warmup_steps", "decay_steps")
        check_above_zero("optimizer", self, "lr")
        check_at_least("optimizer", self, 0, "warmup_steps", "final_share", "weight_decay")
        if self.clip_norm != math.inf:
            check_at_least("optimizer", self, 0, "clip_norm")
        check_decay_rates("optimizer", self, "beta1", "beta2")
        if self.decay_steps is not None:
            check_at_least("optimizer", self, 0, "decay_steps")
            if self.schedule != "wsd":
                raise ValueError(
                    f"optimizer.decay_steps is {self.decay_steps}, but only the schedule wsd has decay steps; "
                    f"optimizer.schedule is {self.schedule}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run: all options of `weft train`."""

    task: Task = "pretrain"
    """pretrain: learn all tokens of texts; sft: the answers of conversations; dpo, kto: preferences."""
    steps: int = 200
    """Updates of the weights."""
    output: Annotated[Path | None, shown("PATH", "outputs/RECIPE-TIME")] = None
    """Folder for the results; it is made."""
    save_every: int = 0
    """Steps between checkpoints, which are written in the background; 0: only at the end."""
    keep: int = 3
    """How many of the newest checkpoints to keep; 0: all."""
    keep_every: int = 0
    """Also keep the checkpoints of steps that are multiples of this number; 0: none."""
    from_: Annotated[Path | None, shown("FOLDER", "weights drawn from the seed", name="from")] = None
    """Start from config, weights and tokenizer of a Hugging Face folder, a checkpoint, or a run's last checkpoint."""
    model_class: Annotated[str | None, shown("MODULE:CLASS", "the recipe's", name="model")] = None
    """Train your own model: a class of an importable module. Its __init__ takes a config, annotated with a
    subclass of ModelConfig."""
    resume: Annotated[str | None, shown("PATH", "start a new run")] = None
    """Resume from checkpoint PATH; without PATH from the newest in --output, or from step 0 if there is none."""
    timeout: float = 600.0
    """Seconds to wait for a process that does not answer, before the run ends."""
    eval_every: int = 0
    """Steps between losses on the held-out text; 0: only before the first step and after the last."""
    log_every: int = 10
    """Steps between readings of the loss. A reading waits for the device and, if the output is no terminal, prints a
    line."""
    seed: int = 0
    """Seed of the initial weights, the order of the data, dropout and the sample text printed at the end."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype that layers compute in, by autocast. Parameters, their gradients and the loss are float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the sums of gradients over ranks; bfloat16 moves half the bytes, and rounds each sum."""
    compile: bool = False
    """Compile each block with torch.compile, from step 2 on; a CPU needs a C++ compiler for this."""
    profile: Annotated[Path | None, shown("FOLDER", "none")] = None
    """Folder for rank-N.json, traces of torch's profiler: of steps 3 to 5, counted from the checkpoint in a resumed
    run."""
    track: Annotated[tuple[TrackerName, ...], shown("{tensorboard,wandb}", "none")] = ()
    """Send the metrics also to tensorboard (in the run's folder) or to wandb (Weights & Biases)."""
    digests: int = 0
    """Write digests of a step's tensors, for `weft compare`: at step 1, and then every this many steps. 0: never.
    Given without a number: 1."""
    against: Annotated[Path | None, shown("RUN", "none")] = None
    """Compare the steps of which RUN has digests with these digests; stop at the first difference above rounding."""
    check: bool = True
    """Compare the loss of step 1 with the loss of the same step on one process."""
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    dpo: DPOConfig = field(default_factory=DPOConfig)
    kto: KTOConfig = field(default_factory=KTOConfig)
    reference: Annotated[
        ReferenceKind | None, shown("{model,adapters,precomputed}", "adapters with lora, else model")
    ] = None
    """The reference of dpo and kto: a second model, the model without adapters, or log-probabilities computed
    once."""
    reference_from: Annotated[Path | None, shown("FOLDER", "that of --from")] = None
    """The folder of the reference's weights."""
    reference_zero: Annotated[Literal[0, 3] | None, shown("{0,3}", "3 where plan.zero is 3, else 0")] = None
    """3 shards the reference's parameters over its dp and cp."""
    reference_mesh: ReferenceMeshConfig = field(default_factory=ReferenceMeshConfig)
    model: ModelConfig
    """The model; the defaults are the recipe's."""

    def __post_init__(self) -> None:
        check_kinds("train", self)
        check_at_most(
            *("train", self, LARGEST),
            *("steps", "log_every", "save_every", "keep", "keep_every", "eval_every", "timeout", "digests"),
        )
        check_at_most("train", self, 2**63 - 1, "seed")  # the bound of torch.manual_seed
        check_at_least("train", self, 1, "steps", "log_every")
        check_at_least("train", self, 0, "save_every", "keep", "keep_every", "eval_every", "digests")
        if self.compile and (self.digests or self.against is not None):
            raise ValueError(
                f"--{'digests' if self.digests else 'against'} looks into blocks, and --compile makes each one graph; "
                f"leave out one of the two"
            )
        check_above_zero("train", self, "timeout")
        if self.profile is not None and self.steps < PROFILED_FROM + PROFILED_STEPS - 1:
            raise ValueError(
                f"steps is {self.steps}, but steps {PROFILED_FROM} to {PROFILED_FROM + PROFILED_STEPS - 1} are "
                f"profiled; take at least as many steps, or leave out --profile"
            )
        check_task_options(self)
        if self.model.initializer_range == 0 and (self.from_, self.model_class, self.resume) == (None, None, None):
            raise ValueError("model.initializer_range is 0, but weights that all start at 0 get no gradient; raise it")
        if self.data.sequence_length > self.model.max_seq_len:
            if not self.model.is_length_independent:
                raise ValueError(
                    f"data.sequence_length {self.data.sequence_length} is above model.max_seq_len "
                    f"{self.model.max_seq_len}, and a {self.model.title} with a larger max_seq_len is another model; "
                    f"lower data.sequence_length or raise model.max_seq_len"
                )
            object.__setattr__(self, "model", replace(self.model, max_seq_len=self.data.sequence_length))


def state_tensors(config: OptimizerConfig, *, in_block: bool = False) -> int:
    """Number of state tensors per parameter, each of the parameter's size.

    in_block: of a matrix in a block. Muon keeps the momentum alone.
    """
    if config.name == "muon" and in_block:
        return 1
    return OPTIMIZERS[config.name] - (config.name in _WITH_MOMENTUM and config.beta1 == 0)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: linear warmup, then `config.schedule`.

    cosine: half a cosine down to `final_share` of the peak (Loshchilov & Hutter, 2017).
    linear: a line down to `final_share`.
    constant: the peak throughout.
    wsd: the peak, then a line down to `final_share` over the last `decay_steps` (Hu et al., "MiniCPM", 2024).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    first, last = config.warmup_steps, config.final_share
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        first = max(first, steps - (steps // 5 if config.decay_steps is None else config.decay_steps))
    progress = min(1.0, max(0.0, (step - first) / max(1, steps - first)))
    above = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (last + (1 - last) * above)


def unfinished_warmup(config: OptimizerConfig, steps: int) -> list[str]:
    """A line of warning for a run shorter than the warmup; otherwise an empty list."""
    if config.warmup_steps <= steps:
        return []
    return [
        f"optimizer.warmup_steps is {config.warmup_steps}, above steps {steps}: the learning rate reaches "
        f"{learning_rate(config, steps - 1, steps):.2g} of {config.lr:.2g}"
    ]
