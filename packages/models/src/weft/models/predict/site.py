"""`finding_sites`: finds a collective's module and line of code in a run on shapes."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

import torch
import torch.fx.traceback
from torch import nn

_TORCH = Path(torch.__file__).resolve().parent
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()
_PACKAGES = "site-packages"
# Folders of weft.models that run models of any kind; files elsewhere are models' own code.
_RUNNING = ("checkpoint", "cli", "data", "parallel", "schedules", "step", "train")
# Files that sum gradients. A bucket holds gradients of several modules; no module is named.
_SUMMING = ("buckets.py", "gradient_buckets.py", "gradient_sync.py")

# Folders through which every collective and every op goes.
_PASSAGES = ("dispatch", "launching", "moving", "world")

_Owner = Literal["user", "model", "weft", "passage", "summing", "neither"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a collective is issued."""

    module: str | None  # dotted name, or for the model itself its class; None outside all modules
    file: str  # relative to the current folder, else to the folder of packages around the file
    line: int  # 0 where unknown
    code: str  # the line's text


@contextmanager
def finding_sites(model: nn.Module) -> Iterator[Callable[[], Site]]:
    """A context to run the model in. Yields a function from the present code to the site.

    The line is the innermost of the user's files; without a line there, of Weft's models; then of the rest of Weft.
    In backward, where autograd runs no line of the model, the function returns line and module of the forward that made
    the running node of the graph. A backward written by the user counts as the user's line.
    Cost: a walk up the stack for each node of the graph, about 20 microseconds.
    """
    linecache.checkcache()  # a file may have changed since its lines were last read
    names = {id(module): name or type(model).__name__ for name, module in model.named_modules(remove_duplicate=False)}
    stop = sys._getframe(2).f_code  # of the program that enters the context; 1 is contextlib

    def find() -> Site:
        return _find(sys._getframe(1), names, stop)

    def note() -> _Note:
        return _Note(find())

    # Anomaly mode keeps in each node of the graph what format_stack returns when the node is made.
    format_stack = torch.fx.traceback.format_stack
    torch.fx.traceback.format_stack = note
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            yield find
    finally:
        torch.fx.traceback.format_stack = format_stack


class _Note(list[str]):
    """The site of a node of the graph, kept where autograd keeps the node's traceback."""

    def __init__(self, site: Site) -> None:
        super().__init__([f"  {site.file}:{site.line}: {site.code}\n"])
        self.site = site


def _find(frame: FrameType | None, names: dict[int, str], stop: CodeType) -> Site:
    """The site of a frame. names: of the modules, by id. stop: frames from this code up are ignored."""
    module: str | None = None
    best: dict[_Owner, FrameType] = {}
    is_summing = False
    while frame is not None and frame.f_code is not stop:
        owner = owner_of(frame.f_code.co_filename)
        best.setdefault(owner, frame)
        is_summing = is_summing or owner == "summing"
        if module is None and frame.f_code.co_name in ("_wrapped_call_impl", "_call_impl", "__call__", "forward"):
            module = names.get(id(frame.f_locals.get("self")))
        if module is not None and "user" in best:
            break
        frame = frame.f_back
    if is_summing:
        return _site(None, best.get("summing"))
    if module is None and "user" not in best and (noted := _noted_site()) is not None:
        return noted
    if module is None and (noted := _noted_site()) is not None:
        module = noted.module
    chosen = (best[owner] for owner in ("user", "model", "weft", "passage") if owner in best)
    return _site(module, next(chosen, None))


def _noted_site() -> Site | None:
    """The site of the forward of the node run by autograd at present; None outside backward."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return None
    note = node.metadata.get("traceback_")
    return note.site if isinstance(note, _Note) else None


def _site(module: str | None, frame: FrameType | None) -> Site:
    if frame is None:
        return Site(module, "", 0, "")
    file, line = frame.f_code.co_filename, frame.f_lineno
    return Site(module, _relative(file), line, linecache.getline(file, line).strip()[:160])


@functools.lru_cache(maxsize=4096)
def owner_of(file: str) -> _Owner:
    """Whose code a file is.

    "passage": of `_PASSAGES`, through which every collective and op goes. "summing": of `_SUMMING`. "weft": further
    files of Weft. "neither": of Python, torch and further packages.
    """
    if file.startswith("<"):
        return "neither"
    path = Path(file).resolve()
    inside = next((path.relative_to(each).parts for each in _packages_of_weft() if path.is_relative_to(each)), None)
    if inside is not None:
        package, folder, name = inside[0], inside[1], inside[-1]
        if package == "reshard" and folder == "training" and name in _SUMMING:
            return "summing"
        if package == "models" and folder == "predict":
            return "neither"
        if package == "models" and folder not in _RUNNING:
            return "model"
        return "passage" if folder in _PASSAGES else "weft"
    is_installed = _PACKAGES in path.parts
    if path.is_relative_to(_TORCH) or (is_installed and "triton" in path.parts):
        return "neither"
    return "neither" if path.is_relative_to(_PYTHON) and not is_installed else "user"


@functools.cache
def _packages_of_weft() -> tuple[Path, ...]:
    """The folders named weft: several where the packages are installed for development."""
    import weft

    return tuple(Path(each).resolve() for each in weft.__path__)


@functools.lru_cache(maxsize=4096)
def _relative(file: str) -> str:
    """A path equal on every machine: relative to the current folder, else to the folder with the packages."""
    path = Path(file).resolve()
    here = Path.cwd()
    if path.is_relative_to(here) and _PACKAGES not in path.parts:
        return path.relative_to(here).as_posix()
    roots = [each.parent for each in _packages_of_weft()]
    roots += [Path(each or os.curdir).resolve() for each in sys.path]
    holding = [each for each in roots if path.is_relative_to(each)]
    if not holding:
        return path.name
    return path.relative_to(max(holding, key=lambda each: len(each.parts))).as_posix()
