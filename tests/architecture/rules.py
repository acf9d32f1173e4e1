"""The project's rules, as functions from source text to violations."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mesh", "reshard", "kernels", "models")  # each may import the packages before it
MAX_LINES = 400
PRIVATE_DTENSOR_ATTRIBUTES = {"_local_tensor", "_spec"}
# The names of weft.mesh and weft.reshard without layouts or ranks: every file of weft.kernels may import these.
WITHOUT_LAYOUTS = {
    "weft.mesh.derive_key",  # keys of random numbers, from a seed and names
    "weft.mesh.extension.version_of",  # a package's version
    "weft.reshard.extension.is_compiling",  # whether a graph is traced
}


def sources(package: str) -> list[Path]:
    """The Python files of a package."""
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def module_name(path: Path) -> str:
    """The dotted name of a file under a src folder; a package's __init__.py has the package's name."""
    parts = path.with_suffix("").parts
    below = parts[len(parts) - parts[::-1].index("src") :]
    return ".".join(below[:-1] if below[-1] == "__init__" else below)


def imported(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Every module that the source of `module` imports, in functions too; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for origin, names in _import_statements(source, module, is_package=is_package):
        found.update((origin, *names))
    return found


def imported_modules(source: str, module: str, modules: set[str], *, is_package: bool = False) -> set[str]:
    """The `modules` that the source of `module` imports. `from package import module` counts the module alone."""
    found: set[str] = set()
    for origin, names in _import_statements(source, module, is_package=is_package):
        taken = names & modules
        found |= taken if taken == names else taken | {origin}
    return found & modules - {module}


@functools.cache  # several rules ask for the imports of the same file
def _import_statements(source: str, module: str, *, is_package: bool) -> list[tuple[str, frozenset[str]]]:
    """For each import statement, also in functions and under TYPE_CHECKING: the origin, and the full names imported."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    found: list[tuple[str, frozenset[str]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, frozenset({alias.name})) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            found.append((origin, frozenset(f"{origin}.{alias.name}" for alias in node.names)))
    return found


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each is imported by the next, the first by the last's successor; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def is_within(module: str, package: str) -> bool:
    """Whether `module` is `package` or a module in it."""
    return module == package or module.startswith(package + ".")


def knows_ranks(path: Path) -> bool:
    """Whether the file is an op's sharded.py or in its folder sharded/, the place for layouts, groups and ranks."""
    return path.name == "sharded.py" or path.parent.name == "sharded"


def forbidden_imports(package: str, imports: set[str], *, sharded: bool) -> set[str]:
    """The imports that run against mesh <- reshard <- kernels <- models.

    sharded: whether the file `knows_ranks`; within kernels only such a file may import mesh, reshard and
    torch.distributed.
    """
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    later = [f"weft.{name}" for name in PACKAGES if name not in allowed]
    if package == "kernels" and not sharded:
        later += ["weft.mesh", "weft.reshard", "torch.distributed"]
        imports = imports - WITHOUT_LAYOUTS - {each.rpartition(".")[0] for each in imports & WITHOUT_LAYOUTS}
    return {module for module in imports if any(is_within(module, other) for other in later)}


def sharded_modules(imports: set[str]) -> set[str]:
    """The imported modules of weft.kernels that know ranks; inside weft.kernels only an __init__.py may import them."""
    return {module for module in imports if is_within(module, "weft.kernels") and "sharded" in module.split(".")}


def redistributions(source: str) -> Iterator[int]:
    """The lines that call DTensor's redistribute: weft.reshard is the only mover of data."""
    if "redistribute" not in source:  # spares most files the syntax tree
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "redistribute":
            yield node.lineno


def private_dtensor_uses(source: str, imports: set[str]) -> set[str]:
    """DTensor's private attributes and modules used by the source."""
    attributes: set[str] = set()
    if any(name in source for name in PRIVATE_DTENSOR_ATTRIBUTES):  # spares most files the syntax tree
        attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    modules = {module for module in imports if re.match(r"torch\.distributed\.(_tensor\b|tensor\._)", module)}
    return attributes & PRIVATE_DTENSOR_ATTRIBUTES | modules


def run_commands(text: str) -> list[list[str]]:
    """The words after every `./run` that starts a command in a document, a script or a workflow."""
    commands = re.findall(r"(?:^|`|run: |&& |\$ )\./run\b([^`\n;&|#>]*)", text, re.MULTILINE)
    return [command.split() for command in commands]


def unknown_sessions(text: str, sessions: set[str]) -> set[str]:
    """Words at the place of a session's name that name no session."""
    return {words[0] for words in run_commands(text) if words and words[0] not in sessions | {"SESSION...", "NAME"}}


def nox_sessions(noxfile: str) -> set[str]:
    """The functions that noxfile.py decorates as sessions."""
    return {
        node.name
        for node in ast.parse(noxfile).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).startswith("nox.session") for d in node.decorator_list)
    }


def code_blocks(markdown: str) -> list[str]:
    """The contents of the fenced blocks."""
    return re.findall(r"^```\w*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
