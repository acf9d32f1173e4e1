"""What a training run is, as values: frozen, and checked before anything starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from weft.mesh.process_mesh import MOST_RANKS

from ..config import ModelConfig, shown
from ..data.sources import Data
from ..degrees import check_head_degrees, divisors
from ..schedules.bubble import Name as Schedule
from ..schedules.plan import PipelinePlan, Split
from .bounds import LARGEST, check_above_zero, check_at_least, check_at_most, check_decay_rates

MOST_MICROBATCHES = 2**16  # each is an entry of each stage's schedule
Context = Literal["all_gather", "ulysses"]
TrackerName = Literal["tensorboard", "wandb"]
PROFILED_FROM, PROFILED_STEPS = 3, 3  # the first steps begin with what is done once
OPTIMIZERS = ("adamw", "adam", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop", "rprop", "asgd", "sgd")
NOT_ELEMENTWISE = {  # torch's others, and what of theirs is not of each element by itself
    "adafactor": "keeps the means of rows and columns, and scales by the norm of the whole parameter",
    "lbfgs": "multiplies vectors of all parameters, and computes the loss several times a step",
    "muon": "orthogonalizes each matrix as a whole",
    "sparseadam": "takes sparse gradients alone, and there are none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Processes along each axis: their product is all GPUs, 4 processes on a CPU, or those that a launcher started. A mesh with mesh.dp whose sizes do not divide these is started as it is given."""

    pp: int = 1
    """Pipeline parallel: each of these holds some of the layers."""
    dp: Annotated[int | None, shown("INT", "processes / pp / cp / tp")] = None
    """Data parallel: each of these reads its own part of every batch."""
    cp: int = 1
    """Context parallel: these share the tokens of every sequence."""
    tp: Annotated[int | None, shown("INT", "2; 1 for an odd number of processes")] = None
    """Tensor parallel: these share every layer."""

    def __post_init__(self) -> None:
        names = [name for name in ("pp", "dp", "cp", "tp") if getattr(self, name) is not None]
        check_at_most("mesh", self, MOST_RANKS, *names)
        check_at_least("mesh", self, 1, *names)
        if (ranks := math.prod(getattr(self, name) for name in names)) > MOST_RANKS:
            raise ValueError(f"mesh has {ranks:,} ranks; it must be {MOST_RANKS:,} or fewer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What the run says of the parallel plan; the model says the rest."""

    sequence: bool = False
    """Shard activations on the tokens between the tensor-parallel layers."""
    context: Annotated[Context | None, shown("{all_gather,ulysses}", "all_gather where mesh.cp is above 1")] = None
    """How tokens attend to those of other cp ranks: keys and values are gathered, or tokens are exchanged for heads."""
    schedule: Annotated[Schedule | None, shown("NAME", "1f1b where mesh.pp is above 1")] = None
    """How microbatches go through the stages of a pipeline: gpipe, 1f1b, interleaved or zero_bubble."""
    microbatches: Annotated[int | None, shown("INT", "those of the pipeline; 1 without")] = None
    """Parts, along the rows, that a batch is taken in; a pipeline has as many as there are rows on a rank, up to 8."""
    split: Annotated[str | None, shown("TEXT", "layers")] = None
    """Where the model is cut: layers, in parts as even as can be; the layers of each stage, as in 1,2,1; or names, layers.1,layers.3."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again, to keep less: selective, all but products and what was communicated; full, each block."""
    zero: Literal[0, 1, 2, 3] = 0
    """Sharded over dp and cp: from 1 on the optimizer's state, from 2 on gradients as well, with 3 parameters too."""

    def pipeline(self, pp: int) -> PipelinePlan | None:
        """What a model's plan is told of a pipeline; None without one. Raises ValueError for what cannot be."""
        if pp == 1 or self.microbatches is None or self.schedule is None:
            return None
        parts = (self.split or "layers").split(",")
        split: Split = "layers" if parts == ["layers"] else tuple(parts)
        if all(part.strip().isdecimal() for part in parts):
            split = tuple(int(part) for part in parts)
        return PipelinePlan(split=split, schedule=self.schedule, microbatches=self.microbatches)

    def options(self, pp: int) -> dict[str, Any]:
        """What `ParallelPlan` is told, by its own names."""
        return {
            "sequence": self.sequence,
            "context": self.context,
            "recompute": self.recompute,
            "zero": self.zero,
            "pipeline": self.pipeline(pp),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is trained on. One sequence in 20, at most 128, is held out and never trained on, by whole documents where it can be."""

    path: Annotated[Path | None, shown("PATH", "the source of Python's standard library")] = None
    """A folder of `weft data prepare`; or a text file in UTF-8, whose bytes are the tokens, or a folder of them."""
    mixture: Annotated[tuple[str, ...], shown("FOLDER=WEIGHT ...", "data.path alone")] = ()
    """Several such folders or files, of which sequences are taken by weight, as in books=0.7 code=0.3."""
    pack: bool = True
    """Of prepared data: tokens see their own document alone."""
    verify: bool = True
    """Of prepared data: as a run begins each process reads its share of the shards, and compares it with its checksums."""
    batch_size: int = 8
    """Sequences in a step, over all processes."""
    sequence_length: int = 128
    """Tokens in a sequence."""

    def __post_init__(self) -> None:
        check_at_most("data", self, LARGEST, "batch_size", "sequence_length")
        check_at_least("data", self, 1, "batch_size", "sequence_length")
        if (tokens := self.batch_size * self.sequence_length) > LARGEST:
            raise ValueError(
                f"data.batch_size {self.batch_size} x data.sequence_length {self.sequence_length} is {tokens:,} tokens a step; "
                f"take {LARGEST:,} or fewer"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The update of the weights, and the learning rate over the steps."""

    name: Annotated[str, shown("NAME", "adamw")] = "adamw"
    """Of torch.optim, one that works on each element by itself: adamw, adam, nadam, radam, adamax, adagrad, adadelta, rmsprop, rprop, asgd or sgd."""
    lr: float = 4e-3
    """The highest learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """The rate after the warmup, of which rprop takes that of its first step alone; wsd: constant, then a line over the last decay_steps."""
    warmup_steps: int = 20
    """Steps until the highest rate is reached."""
    decay_steps: Annotated[int | None, shown("INT", "a fifth of the steps")] = None
    """Of wsd: the last steps, in which the rate falls."""
    final_share: float = 0.1
    """The rate at the end, as a share of the highest."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases have none, and nothing has with rprop."""
    beta1: float = 0.9
    """Decay of the gradient's mean; the momentum of sgd and rmsprop."""
    beta2: float = 0.95
    """Decay of the gradient's mean square."""
    clip_norm: float = 1.0
    """The gradient's norm is cut to this; 0 cuts nothing."""

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            why = NOT_ELEMENTWISE.get(self.name.lower(), "is not known")
            raise ValueError(f"optimizer.name is {self.name}, which {why}; use one of {', '.join(OPTIMIZERS)}")
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
                    f"optimizer.decay_steps is {self.decay_steps}, which is of the schedule wsd; the schedule is {self.schedule}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run."""

    steps: int = 200
    """Updates of the weights."""
    output: Annotated[Path | None, shown("PATH", "outputs/RECIPE-TIME")] = None
    """Folder to make for the results."""
    save_every: int = 0
    """Steps between checkpoints, which are written while the run goes on; 0 saves at the end alone."""
    keep: int = 3
    """Checkpoints that are kept, the last ones; 0 keeps all."""
    keep_every: int = 0
    """Those at multiples of so many steps are kept as well; 0 keeps none beside the last."""
    from_: Annotated[Path | None, shown("FOLDER", "initial weights by the seed", name="from")] = None
    """Begin a new run with the config, weights and tokenizer of a Hugging Face folder, a checkpoint, or a run's last checkpoint."""
    model_class: Annotated[str | None, shown("MODULE:CLASS", "a model of Weft", name="model")] = None
    """Train a model from outside: a class of an importable module, whose __init__ takes config, annotated with a ModelConfig."""
    resume: Annotated[str | None, shown("PATH", "begins anew")] = None
    """Go on with the checkpoint at PATH; without PATH with the newest of the output folder, or begin where it has none."""
    timeout: float = 600.0
    """Seconds after which the run ends where a process does not answer the others."""
    eval_every: int = 0
    """Steps between losses on the held-out text; 0 takes them before the first step and after the last alone."""
    log_every: int = 10
    """Steps between readings of the loss, each of which waits for the device; a line where the output is no terminal."""
    seed: int = 0
    """Decides the initial weights, the order of the data, dropout and the sample."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What layers compute in, by autocast. Parameters, their gradients and the loss are float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients are added up in over ranks; bfloat16 moves half the bytes, and rounds each sum."""
    compile: bool = False
    """Compile each block by torch.compile, from step 2 on; on a CPU that needs a C++ compiler."""
    profile: Annotated[Path | None, shown("FOLDER", "none")] = None
    """Folder for traces of steps 3 to 5 by torch's profiler, one a rank: rank-N.json."""
    track: Annotated[tuple[TrackerName, ...], shown("{tensorboard,wandb}", "none")] = ()
    """Where the metrics go beside metrics.jsonl: tensorboard (a folder of the run's) or wandb (Weights & Biases)."""
    check: bool = True
    """Compare the first step's loss with that of one process."""
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig
    """The network; the defaults are the recipe's."""

    def __post_init__(self) -> None:
        check_at_most(
            *("train", self, LARGEST),
            *("steps", "log_every", "save_every", "keep", "keep_every", "eval_every", "timeout"),
        )
        check_at_most("train", self, 2**63 - 1, "seed")  # as torch.manual_seed
        check_at_least("train", self, 1, "steps", "log_every")
        check_at_least("train", self, 0, "save_every", "keep", "keep_every", "eval_every")
        check_above_zero("train", self, "timeout")
        if self.profile is not None and self.steps < PROFILED_FROM + PROFILED_STEPS - 1:
            raise ValueError(
                f"steps is {self.steps}, and steps {PROFILED_FROM} to {PROFILED_FROM + PROFILED_STEPS - 1} are what is profiled; "
                f"take as many, or leave profile out"
            )
        if self.model.initializer_range == 0 and (self.from_, self.model_class, self.resume) == (None, None, None):
            raise ValueError(
                "model.initializer_range is 0, and no gradient moves weights that all begin at 0; raise it"
            )
        if self.data.sequence_length > self.model.max_seq_len:
            if not self.model.is_longer_alike:
                raise ValueError(
                    f"data.sequence_length {self.data.sequence_length} is above model.max_seq_len "
                    f"{self.model.max_seq_len}, and a {self.model.title} with more is another model; lower the one or raise the other"
                )
            object.__setattr__(self, "model", replace(self.model, max_seq_len=self.data.sequence_length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run with everything settled, as each of its processes is given it."""

    recipe: str | None  # None where none was named, and the model is of a folder or from outside
    config: TrainConfig
    corpus: Data
    pp: int = 1
    dp: int
    cp: int = 1
    tp: int
    folder: Path
    resume: Path | None = None  # the checkpoint to go on with
    origin: Path | None = None  # the folder whose weights a new run begins with
    base: TrainConfig | None = None  # what the options that were given have changed; the recipe's where None
    notes: tuple[str, ...] = ()  # what is to be said of it

    @property
    def title(self) -> str:
        """What the run is called: its recipe, or the folder or the class that its model is of."""
        return title_of(self.recipe, self.config)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes and their sizes."""
        return axes_of(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp)

    @property
    def resolved(self) -> TrainConfig:
        """The config with the mesh's sizes as they are."""
        return replace(self.config, mesh=MeshConfig(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp))

    @property
    def processes(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


def title_of(recipe: str | None, config: TrainConfig) -> str:
    """The recipe's name; without a recipe that of the folder, or of the class, that the model is of."""
    if recipe is not None:
        return recipe
    return config.from_.resolve().name if config.from_ is not None else str(config.model_class).rpartition(":")[2]


def axes_of(*, pp: int, dp: int, cp: int, tp: int) -> dict[str, int]:
    """A mesh's axes and their sizes; pp and cp where they are used."""
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("dp", "tp")}


def mesh_sizes(mesh: MeshConfig, processes: int, *, exact: bool) -> tuple[int, int, int]:
    """(dp, cp, tp) for `processes`, beside mesh.pp: what is given stays, and the rest follows.

    exact: all processes must be used, as where a launcher has started them; otherwise at most that many, and where both
    sizes are given, their product.
    Raises ValueError for a mesh that does not fit the processes.
    """
    dp, cp, tp = mesh.dp, mesh.cp, mesh.tp
    others = mesh.pp * cp
    rest = processes // others
    if tp is None:
        tp = rest // dp if dp else (2 if rest % 2 == 0 else 1)
    if dp is None:
        dp = rest // tp
    used = dp * others * tp
    if used < 1 or (used != processes if exact or None in (mesh.dp, mesh.tp) else used > processes):
        sizes = (
            ("pp", mesh.pp if mesh.pp > 1 else None),
            ("dp", mesh.dp),
            ("cp", cp if cp > 1 else None),
            ("tp", mesh.tp),
        )
        given = " x ".join(f"{name}={size}" for name, size in sizes if size is not None)
        fits = f"dp x tp that fit: {', '.join(f'{rest // n} x {n}' for n in divisors(rest))}"
        beside = " x ".join(f"{name}={size}" for name, size in (("pp", mesh.pp), ("cp", cp)) if size > 1)
        if beside:
            names = "pp x cp" if mesh.pp > 1 and cp > 1 else "pp" if mesh.pp > 1 else "cp"
            fits = (
                f"beside {beside}, {fits}"
                if processes % others == 0
                else f"{names} that fit: {', '.join(map(str, divisors(processes)))}"
            )
        raise ValueError(f"mesh {given} does not fit {processes} process{'es' if processes > 1 else ''}; {fits}")
    return dp, cp, tp


def settled_plan(plan: PlanConfig, config: TrainConfig, *, dp: int, cp: int, tp: int) -> PlanConfig:
    """The plan with what follows from the mesh.

    Raises ValueError for heads that it cannot cut, and for what is said of a pipeline that is not there or cannot be.
    """
    context = plan.context or ("all_gather" if cp > 1 else None)
    if context == "ulysses":
        sizes = {name: size for name, size in config.model.parallel_sizes.items() if name.endswith("heads")}
        check_head_degrees(sizes, cp=cp, tp=tp)
    settled, rows, pp = replace(plan, context=context), config.data.batch_size, config.mesh.pp
    if pp == 1:
        for name in ("schedule", "split"):
            if getattr(plan, name) is not None:
                raise ValueError(
                    f"plan.{name} is {getattr(plan, name)}, which is of a pipeline; set --mesh.pp above 1 too"
                )
    else:
        most = next((n for n in range(min(8, rows // dp), 0, -1) if rows % (n * dp) == 0), 1)
        settled = replace(
            settled,
            schedule=plan.schedule or "1f1b",
            microbatches=plan.microbatches or most,
            split=plan.split or "layers",
        )
    count = settled.microbatches or 1
    if count < 1 or rows % count:
        fit = ", ".join(map(str, divisors(rows)))
        raise ValueError(f"plan.microbatches {count} does not divide data.batch_size {rows}; numbers that do: {fit}")
    if count > MOST_MICROBATCHES:
        raise ValueError(f"plan.microbatches {count} is above {MOST_MICROBATCHES}; take {MOST_MICROBATCHES:,} or fewer")
    if pp > config.model.num_layers:  # before a schedule is made of each stage
        raise ValueError(
            f"the model has {config.model.num_layers} layers, which cannot be cut into {pp} stages; lower mesh.pp"
        )
    pipeline = settled.pipeline(pp)
    if pipeline is not None:
        stages = pipeline.make_schedule(pp).num_stages
        if stages > config.model.num_layers:
            raise ValueError(
                f"the model has {config.model.num_layers} layers, which cannot be cut into {stages} stages; lower mesh.pp"
                + (", or take another schedule" if stages > pp else "")
            )
        counts = [each for each in pipeline.split if isinstance(each, int)]  # of "layers" none
        if counts and (len(counts) != stages or sum(counts) != config.model.num_layers):
            raise ValueError(
                f"plan.split {plan.split} gives {len(counts)} stages {sum(counts)} layers; there are {stages} "
                f"stages and {config.model.num_layers} layers"
            )
        if pipeline.split != "layers" and not counts:
            _check_names(config, pipeline, pp)
    return settled


def _check_names(config: TrainConfig, pipeline: PipelinePlan, pp: int) -> None:
    """Raises ValueError for names at which the model is not cut into as many stages."""
    import torch  # not sooner, as it takes seconds

    from ..parallel.pipeline.cut import ranges_of
    from .outside import make_model_of

    with torch.device("meta"):
        model = make_model_of(config.model, config.model_class)
    ranges_of(model, pipeline, pipeline.make_schedule(pp))


def general_name(parameter: str) -> str:
    """A parameter's name with its layer's number as a star: "layers.*.mlp.up_proj.weight"."""
    return re.sub(r"\.\d+\.", ".*.", parameter)
