"""Send metrics also to TensorBoard or Weights & Biases (`--track`), for `Results`."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..safe_files import write_anew
from ..terminal import install_command
from .config import TrackerName, TrainConfig
from .report import Metrics

WANDB_ID = "wandb-id"  # file in the run's folder: the id under which a resumed run continues at wandb
Send = Callable[[int, dict[str, float]], None]  # sends the numbers of a step


def check_trackers(names: tuple[TrackerName, ...]) -> None:
    """Raise ValueError for a tracker whose package is not installed. names: the values of --track."""
    for name in names:
        if find_spec(name) is None:
            raise ValueError(f"track is {name}, which is not installed; {install_command(name)}")


class Trackers:
    """Sends the metrics of each step to the named trackers. Made by `Results` on the writing rank."""

    def __init__(self, names: tuple[TrackerName, ...], folder: Path, config: TrainConfig) -> None:
        self._sends = [_MAKERS[name](folder, config) for name in names]

    def add(self, metrics: Metrics) -> None:
        """Send the metrics of a step."""
        numbers = {
            name: float(value)
            for name, value in dataclasses.asdict(metrics).items()
            if name != "step" and value is not None
        }
        for send in self._sends:
            send(metrics.step, numbers)


def _tensorboard(folder: Path, config: TrainConfig) -> Send:
    """A Send for files in FOLDER/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = None

    def send(step: int, numbers: dict[str, float]) -> None:
        nonlocal writer
        # purge_step hides the values of this and later steps sent before the run was interrupted and resumed.
        writer = writer or SummaryWriter(str(folder / "tensorboard"), purge_step=step)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # written now, to survive a kill

    return send


def _wandb(folder: Path, config: TrainConfig) -> Send:
    """A Send for Weights & Biases, to a single run over all resumptions."""
    import wandb

    file = folder / WANDB_ID
    name = file.read_text() if file.exists() else ""
    if not name:
        name = uuid.uuid4().hex
        write_anew(file, name.encode())
    run: Any = wandb.init(
        project="weft",
        name=folder.name,
        dir=str(folder),
        config=dataclasses.asdict(config),
        id=name,
        resume="allow",
    )
    return lambda step, numbers: run.log(numbers, step=step)


_MAKERS: dict[TrackerName, Callable[[Path, TrainConfig], Send]] = {"tensorboard": _tensorboard, "wandb": _wandb}
