"""Runs the search of `weft plan`, and prints the results: a table with commands and the certificate, or JSON."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..predict.chip import Chip
from ..predict.find_plans import FoundPlan, FoundPlans, search_plans
from ..predict.forks import count_cores
from ..predict.plans import Space
from ..predict.search import Certificate
from ..terminal import PROGRAM
from ..train.candidates import checker, config_with, step_flops, workload_of
from ..train.config import TrainConfig
from ..train.recipes import size_in_words
from ..train.run import title_of
from ..train.suggestions import NoOption, options_between
from ..train.toml import as_toml


def plan_and_print(
    name: str | None,
    config: TrainConfig,
    base: TrainConfig,
    space: Space,
    chip: Chip,
    *,
    memory: int | None,
    within: float,
    output: Path | None,
    as_json: bool,
) -> None:
    """Search the space for the run, print the results, and write the best plan to `output`, if not None.

    name: of the recipe; None without. config: of the run, without mesh and plan. base: the recipe's configuration,
    from which printed commands differ by options. memory: bytes for a rank; None for the chip's. within: as for
    `search_plans`. as_json: print JSON alone. Communication: none.
    Raises ValueError where no plan fits, or none was priced in time.
    """
    found = search_plans(
        workload_of(config),
        space,
        chip,
        check=checker(config),
        memory=memory,
        flops=step_flops(config),
        within=within,
        workers=count_cores(),
    )
    if not found.plans:
        certificate = found.certificate
        raise ValueError(
            f"--within {within:g}: the time was over before a plan that fits was priced; {certificate.left:,} plans "
            f"are left, and none of them takes less than {certificate.least_left:.4g} s; give more time, or fix options"
        )
    limit = chip.memory_bytes if memory is None else memory
    if as_json:
        print(json.dumps(as_values(found, name, config, base), indent=2))
    else:
        rows, tokens = config.data.batch_size, config.data.sequence_length
        size = size_in_words(config.model, config.model_class)
        print(f"{title_of(name, config)}: {size}; {space.processes:,} processes on {chip.name}")
        print(f"batch {rows:,} x {tokens:,} tokens; {limit / 2**30:.2f} GiB of memory for each process")
        print("\n".join(table(found.plans, [_train_command(each, name, config, base) for each in found.plans])))
        print("\n".join(certificate_lines(found.certificate, found.plans)))
    if output is not None and found.plans:
        output.write_text(as_toml(name, config_with(config, found.plans[0].candidate)), encoding="utf-8")
        if not as_json:
            print(f"the best plan is in {output}: {PROGRAM} train --config {shlex.quote(str(output))}")


def _train_command(found: FoundPlan, name: str | None, config: TrainConfig, base: TrainConfig) -> str:
    """The `weft train` command for a found plan. name, config, base: as for `plan_and_print`."""
    chosen = replace(config_with(config, found.candidate), output=None, resume=None)
    try:
        options = options_between(chosen, base, "")
    except NoOption:  # no option sets a value of the model; only a file can
        return f"{PROGRAM} train --config FILE, with the file of --output"
    return shlex.join([PROGRAM, "train", *([] if name is None else [name]), *options])


def table(plans: Sequence[FoundPlan], commands: Sequence[str]) -> Iterator[str]:
    """Lines about each plan: a row of numbers, the part of a step slower than in the best plan, and the command.

    commands: of `_train_command`, one for each plan.
    """
    yield f"{'':>3}  {'seconds':>9}  {'tokens/s':>12}  {'MFU':>6}  {'memory':>10}  plan"
    for number, (each, command) in enumerate(zip(plans, commands, strict=True), 1):
        yield (
            f"{number:>3}  {each.seconds:>9.4g}  {each.tokens_per_second:>12,.0f}  {each.mfu:>6.1%}  "
            f"{each.memory_bytes / 2**30:>6.2f} GiB  {each.candidate}"
        )
        if number > 1:
            part, more = each.slower_by(plans[0])
            slower = each.seconds / plans[0].seconds - 1
            yield f"     {slower:.2%} slower than 1: {part.replace('_', ' ')} takes {more:.3g} s more"
        yield f"     {command}"


def certificate_lines(certificate: Certificate, plans: Sequence[FoundPlan]) -> Iterator[str]:
    """Lines about the search: counts of refused, cut off and priced plans, and whether the results are proved.

    plans: the results.
    """
    refused = sum(certificate.refused.values())
    yield (
        f"{certificate.enumerated:,} plans enumerated in {certificate.seconds:.1f} s: {refused:,} refused, "
        + "".join(f"{count:,} cut off by {name}, " for name, count in sorted(certificate.cut.items()))
        + f"{certificate.priced:,} priced"
        + (f" ({certificate.too_large:,} of them too large)" if certificate.too_large else "")
        + (f", {certificate.left:,} left" if certificate.left else "")
    )
    for reason, count in sorted(certificate.refused.items(), key=lambda pair: -pair[1]):
        yield f"  {count:>9,} refused: {reason}"
    proved = len(plans) if certificate.is_complete else sum(each.seconds <= certificate.least_left for each in plans)
    if proved or certificate.is_complete:
        last = f"plan {proved}, {plans[proved - 1].seconds:.4g} s" if plans else "any plan"
        yield f"proved by this model: no plan without a price is faster than {last}"
    if not certificate.is_complete:
        best = plans[0].seconds if plans else math.inf
        faster = f"the best may be {certificate.gap(best):.1%} faster than plan 1; "
        yield (
            f"not proved{' below' if proved else ''}: the time was over with {certificate.left:,} plans left, of which "
            f"none takes less than {certificate.least_left:.4g} s; {'' if proved else faster}"
            f"--within inf ends with a proof"
        )


def as_values(found: FoundPlans, name: str | None, config: TrainConfig, base: TrainConfig) -> dict[str, Any]:
    """The results as values for JSON. name, config, base: as for `plan_and_print`."""
    certificate = asdict(found.certificate)
    if math.isinf(found.certificate.least_left):
        certificate["least_left"] = None
    return {
        "plans": [
            {
                "seconds": each.seconds,
                "tokens_per_second": each.tokens_per_second,
                "mfu": each.mfu,
                "memory_bytes": each.memory_bytes,
                "parts": dict(each.parts),
                "mesh": each.candidate.axes | ({"ep": each.candidate.ep} if each.candidate.ep > 1 else {}),
                "plan": asdict(each.candidate),
                "command": _train_command(each, name, config, base),
            }
            for each in found.plans
        ],
        "certificate": certificate | {"proved": found.certificate.is_complete},
    }
