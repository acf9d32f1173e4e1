"""`weft plan`: the options. Finds the fastest parallel plans of a training run by prediction, with a proof."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..predict.chip import Chip, load_chip
from ..predict.plans import Space
from ..terminal import PROGRAM
from ..train.config import MeshConfig, PlanConfig, TrainConfig
from .arguments import OwnOptions, batch_sizes, report_bad_input
from .settings import base_of, read_configuration

WITHIN = 90  # seconds; pricing the last plans takes up to half a minute more on two cores
ABOUT = f"""\
  Finds the fastest plan of a run on any number of processes, as predicted from shapes for a chip that need not be \
here: over the mesh (pp, dp, cp, tp, ep), zero, sequence, context, schedule, microbatches and recompute. Takes the \
options of train; an option of --mesh or --plan fixes that value. The schedule zero_bubble is compared only if named.

Examples
  {PROGRAM} plan llama3-70b --processes 64 --chip h100 \\
    --batch 1024,8192
  {PROGRAM} plan llama3-8b --processes 8 --chip h100 \\
    --batch 64,8192 --memory 72GiB --output plan.toml
  {PROGRAM} plan llama3-8b --processes 8 --chip h100 \\
    --batch 64,8192 --mesh.tp 1 --plan.zero 3

Recipes
{{recipes}}
  The options below show the defaults of the named recipe, or of {{default}} without a name.

Options of plan alone
  --processes N: processes of the run, each with a chip.
  --chip NAME: a known chip, as h100, or a file written by `{PROGRAM} measure`.
  --batch ROWS,TOKENS: sequences in a step and tokens in each, as 1024,8192. (default: the recipe's)
  --memory SIZE: memory that a process may use, as 72GiB. (default: the chip's)
  --within SECONDS: end the search then, and print by how much a plan left may be faster; inf: search until the best \
plans are proved. (default: {WITHIN})
  --output FILE: write the best plan as a file for `{PROGRAM} train --config`.
  --json: print all results as JSON.
  --config FILE: options from a TOML file, except those of the mesh and the plan.

Prints
  the ten fastest plans: seconds, tokens/s, MFU, memory, the command that trains by the plan, and what takes longer \
than under the best; then the certificate: the plans enumerated, refused, cut off by bounds, and priced.

Exit status
  0: done; 2: input that cannot be used, or no plan that fits the memory.
"""
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MOST_PROCESSES = 2**20
# Option of the mesh or the plan -> the field of `Candidate` to fix.
FIXED_BY = {
    **{f"mesh.{axis}": axis for axis in ("pp", "dp", "cp", "tp", "ep")},
    **{f"plan.{name}": name for name in ("sequence", "context", "schedule", "microbatches", "recompute", "zero")},
    "plan.experts-over-tp": "over_tp",
}


def run(arguments: list[str]) -> int:
    with report_bad_input("plan"):
        own, train_arguments = _own_options().parse_known_args(arguments)
        name, config = read_configuration(train_arguments, own.config, command="plan", about=ABOUT)
        base = base_of(name, config)
        processes, within = _read_processes(own.processes), _read_seconds(own.within)
        chip, memory = _read_chip(own.chip), None if own.memory is None else read_bytes(own.memory)
        fixed = _find_fixed(train_arguments, config)
        rows, tokens = config.data.batch_size, config.data.sequence_length
        if own.batch is not None:
            rows, tokens = batch_sizes(own.batch)
        # Mesh and plan come from candidates; the rest is common to all candidates.
        data = replace(config.data, batch_size=rows, sequence_length=tokens)
        plan = PlanConfig(experts_tokens=None)
        config = replace(config, data=data, mesh=MeshConfig(), plan=plan, output=None, resume=None)
        num_experts = getattr(config.model, "num_experts", 0)
        if fixed.get("ep", 1) != 1 and not num_experts:
            raise ValueError(f"--mesh.ep is {fixed['ep']}, but a {config.model.title} has no experts; leave it out")
        space = Space(processes=processes, rows=rows, num_experts=num_experts, fixed=fixed)
        if own.output is not None and not own.output.parent.is_dir():
            raise ValueError(f"--output {own.output}: there is no folder {own.output.parent}; make it first")
        from .plan_report import plan_and_print  # imported here because torch takes seconds

        plan_and_print(
            *(name, config, base, space, chip),
            memory=memory, within=within, output=own.output, as_json=own.json,
        )  # fmt: skip
    return 0


def read_bytes(text: str) -> int:
    """A size of memory, as "72GiB". Raises ValueError for another form."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]i?|Ki)?B?\s*", text)
    nbytes = float(match[1]) * UNITS[match[2] or ""] if match else 0
    if not 0 < nbytes < 2**63:
        raise ValueError(f"--memory {text!r:.40} is no size of memory; write it like --memory 72GiB")
    return int(nbytes)


def _read_processes(text: str | None) -> int:
    if text is None:
        raise ValueError("--processes is missing; give the number of processes, each with a chip, as --processes 64")
    if not text.isdecimal() or not 1 <= int(text[:20]) <= MOST_PROCESSES:
        raise ValueError(f"--processes is {text[:20]}; it must be a number from 1 to {MOST_PROCESSES:,}")
    return int(text)


def _read_seconds(text: str | None) -> float:
    try:
        seconds = WITHIN if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(
            f"--within {text!r:.20} is no number of seconds above 0; write it like --within 60, or --within inf"
        )
    return seconds


def _read_chip(name: str | None) -> Chip:
    if name is None:
        from ..predict.chip import known_chips

        raise ValueError(f"--chip is missing; the chips are {', '.join(known_chips())}")
    return load_chip(name)


def _find_fixed(arguments: Sequence[str], config: TrainConfig) -> dict[str, object]:
    """The fields of `Candidate` fixed by options of the command line, with their values.

    Raises ValueError for options of the plan that no candidate has.
    """
    if config.plan.exact is not None:
        raise ValueError("--plan.exact names a mesh, and plan chooses the mesh; leave it out")
    fixed: dict[str, object] = {}
    for argument in arguments:
        option = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        option = re.sub(r"^no-(plan|mesh)\.", r"\1.", option).replace("plan.no-", "plan.")
        if option == "plan.split":
            raise ValueError("--plan.split gives layers to stages, whose number plan chooses; leave it out")
        if option == "plan.experts-tokens":
            raise ValueError("--plan.experts-tokens: plan takes the cheaper way for each mesh; leave it out")
        if option in FIXED_BY and argument.startswith("--"):
            group: Any = config.mesh if option.startswith("mesh.") else config.plan
            fixed[FIXED_BY[option]] = getattr(group, option.partition(".")[2].replace("-", "_"))
    return fixed


def _own_options() -> OwnOptions:
    """The parser of the options of `plan` alone."""
    parser = OwnOptions()
    for name in ("processes", "chip", "batch", "memory", "within"):
        parser.add_argument(f"--{name}")
    for name in ("config", "output"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--json", action="store_true")
    return parser
