"""Imports run one way, mesh <- reshard <- kernels <- models, and DTensor is used by its public names."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import (
    PACKAGES,
    ROOT,
    WITHOUT_LAYOUTS,
    circle,
    forbidden_imports,
    imported,
    imported_modules,
    is_within,
    knows_ranks,
    module_name,
    private_dtensor_uses,
    redistributions,
    sharded_modules,
    sources,
)
from tests.architecture.test_reference import public_names

pytestmark = pytest.mark.every_value

FACES = {"__init__.py", "extension.py"}  # of a package: they pass on the names of all rooms


@functools.cache
def imports_of(path: Path) -> set[str]:
    return imported(path.read_text(), module_name(path), is_package=path.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    for path in sources(package):
        assert not forbidden_imports(package, imports_of(path), sharded=knows_ranks(path)), path


@pytest.mark.parametrize(
    "path",
    [path for path in sources("kernels") if not knows_ranks(path) and path.name not in FACES],
    ids=module_name,
)
def test_a_module_that_knows_no_ranks_imports_none_that_does(path: Path) -> None:
    assert not sharded_modules(imports_of(path))


def imports_within(package: str) -> dict[str, set[str]]:
    """Every module of a package, with the modules of the package that it imports."""
    paths = {module_name(path): path for path in sources(package)}
    return {
        name: imported_modules(path.read_text(), name, {*paths}, is_package=path.name == "__init__.py")
        for name, path in paths.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    """Neither in a circle of several, nor in functions, nor for their types alone."""
    assert circle(imports_within(package)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folders_import_each_other(package: str) -> None:
    """Between the folders and modules directly in a package; its faces aside."""
    graph: dict[str, set[str]] = {}
    for module, found in imports_within(package).items():
        below = {each.split(".")[2] for each in (module, *found) if each.count(".") > 1}
        for each in below:
            graph.setdefault(each, set())
        if module.count(".") > 1:
            own = module.split(".")[2]
            graph[own] |= below - {own}
    assert len(graph) > 3
    assert circle(graph) == []


FOLDERS = {  # of a package, in the direction of imports: a folder imports earlier ones alone
    "reshard": ("planning", "world", "moving", "training"),
    "kernels": ("dispatch", "launching"),  # the ops' own folders may import both
}


@pytest.mark.parametrize(
    ("package", "folder"), [(package, folder) for package in FOLDERS for folder in FOLDERS[package]]
)
def test_a_folder_imports_earlier_folders_alone(package: str, folder: str) -> None:
    within, folders = imports_within(package), FOLDERS[package]
    allowed = [f"weft.{package}.{each}" for each in folders[: folders.index(folder) + 1]]
    modules = {module for module in within if is_within(module, f"weft.{package}.{folder}")}
    assert len(modules) > 3
    for module in modules:
        above = {each for each in within[module] if not any(is_within(each, name) for name in allowed)}
        assert not above, module


def test_each_module_of_reshard_is_in_a_folder_or_a_face() -> None:
    inside = {module.split(".")[2] for module in imports_within("reshard") if module.count(".") > 1}
    assert inside == {*FOLDERS["reshard"], "extension"}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_another_by_their_faces_alone(package: str) -> None:
    """By the public names, or by `extension`, which lists the names for packages and extensions."""
    earlier = [f"weft.{name}" for name in PACKAGES[: PACKAGES.index(package)]]
    for path in sources(package):
        for name in imports_of(path):
            if any(is_within(name, each) for each in earlier):
                module, _, last = name.rpartition(".")
                assert name in earlier or module in earlier or module.endswith(".extension"), f"{path}: {name}"
                assert module not in earlier or last == "extension" or last in listed_names(module), f"{path}: {name}"


@functools.cache
def listed_names(module: str) -> set[str]:
    """The names in `__all__` of a package's public or extension face."""
    package, _, face = module.removeprefix("weft.").partition(".")
    path = ROOT / "packages" / package / "src/weft" / package / f"{face or '__init__'}.py"
    return set(public_names(path.read_text()))


@pytest.mark.parametrize("package", PACKAGES[:-1])
def test_an_extension_face_lists_all_that_it_imports_and_no_public_name(package: str) -> None:
    path = ROOT / "packages" / package / "src/weft" / package / "extension.py"
    tree = ast.parse(path.read_text())
    bound = {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert bound == listed_names(f"weft.{package}.extension")
    assert not bound & listed_names(f"weft.{package}")


@pytest.mark.parametrize("package", PACKAGES)
def test_dtensor_is_used_by_its_public_names(package: str) -> None:
    """One exception: the spec that DTensors of a kind share; a new spec for each takes the host five times as long."""
    for path in sources(package):
        allowed = {"_spec"} if module_name(path) == "weft.reshard.moving.dtensor" else set()
        text = path.read_text()
        assert private_dtensor_uses(text, imports_of(path)) == allowed, path
        assert not list(redistributions(text)), f"{path}: data is moved by weft.reshard, never by redistribute"


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in sources("mesh")])
def test_mesh_imports_the_standard_library_alone(path: Path) -> None:
    outside = {name for name in imports_of(path) if name.partition(".")[0] not in sys.stdlib_module_names}
    allowed = {"rich.text", "rich.text.Text"} if path.stem == "picture" else set()  # when rich asks for a picture
    assert all(is_within(name, "weft.mesh") for name in outside - allowed)


def test_importing_mesh_loads_no_torch() -> None:
    code = "import sys, weft.mesh; print(*{name.partition('.')[0] for name in sys.modules})"
    paths = f"import sys; sys.path.insert(0, {str(ROOT / 'packages/mesh/src')!r}); "
    loaded = subprocess.run([sys.executable, "-c", paths + code], capture_output=True, text=True, check=True).stdout
    assert "weft" in loaded.split()
    assert not {"torch", "numpy", "triton", "rich"} & set(loaded.split())


@pytest.mark.parametrize(
    ("source", "module", "expected"),
    [
        pytest.param("import a.b", "weft.mesh.x", {"a.b"}, id="import"),
        pytest.param("from a import b", "weft.mesh.x", {"a", "a.b"}, id="from"),
        pytest.param("def f():\n    import a", "weft.mesh.x", {"a"}, id="in-a-function"),
        pytest.param("from .y import z", "weft.mesh.x", {"weft.mesh.y", "weft.mesh.y.z"}, id="sibling"),
        pytest.param("from .. import models", "weft.mesh.x", {"weft", "weft.models"}, id="up"),
    ],
)
def test_imports_are_found(source: str, module: str, expected: set[str]) -> None:
    assert imported(source, module) == expected


def test_imports_of_a_package_count_from_itself() -> None:
    assert imported("from .y import z", "weft.mesh", is_package=True) == {"weft.mesh.y", "weft.mesh.y.z"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("from .y import Z", {"p.q.y"}, id="a-name"),
        pytest.param("from . import y", {"p.q.y"}, id="a-module-of-the-package"),
        pytest.param("from . import y, Z", {"p.q.y", "p.q"}, id="a-module-and-a-name-of-the-package"),
        pytest.param("from .. import q", {"p.q"}, id="the-package"),
        pytest.param("import p.q.y", {"p.q.y"}, id="import"),
        pytest.param("from other.y import Z", set(), id="of-others"),
        pytest.param("if TYPE_CHECKING:\n    from .y import Z", {"p.q.y"}, id="for-types"),
        pytest.param("def f():\n    from .y import Z", {"p.q.y"}, id="in-a-function"),
    ],
)
def test_imported_modules_are_found(source: str, expected: set[str]) -> None:
    assert imported_modules(source, "p.q.x", {"p", "p.q", "p.q.x", "p.q.y"}) == expected


def test_circles_are_caught() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in (["b", "c", "b"], ["c", "b", "c"])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("kernels/norm/sharded.py", True, id="file"),
        pytest.param("kernels/cross_entropy/sharded/gather.py", True, id="in-a-folder"),
        pytest.param("kernels/cross_entropy/function.py", False, id="beside-it"),
        pytest.param("kernels/sharded/norm/function.py", False, id="below-a-folder-in-it"),
    ],
)
def test_the_path_tells_whether_a_module_knows_ranks(path: str, expected: bool) -> None:
    assert knows_ranks(Path(path)) == expected


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("mesh", "weft.reshard"),
        ("reshard", "weft.kernels.matmul"),
        ("kernels", "weft.models"),
        ("kernels", "weft.mesh"),
        ("kernels", "weft.mesh.Layout"),
        ("kernels", "weft.mesh.infer.terms"),
        ("kernels", "weft.reshard.plan"),
        ("kernels", "torch.distributed"),
    ],
)
def test_a_bad_import_is_caught(package: str, module: str) -> None:
    assert forbidden_imports(package, {module}, sharded=False) == {module}


@pytest.mark.parametrize("name", sorted(WITHOUT_LAYOUTS))
def test_kernels_may_import_names_of_mesh_without_layouts(name: str) -> None:
    assert not forbidden_imports("kernels", {name.rpartition(".")[0], name}, sharded=False)
    layouts = {"weft.mesh", "weft.mesh.Layout", name}
    assert forbidden_imports("kernels", layouts, sharded=False) >= {"weft.mesh.Layout"}


def test_all_that_is_excepted_is_imported() -> None:
    found = {name for path in sources("kernels") if not knows_ranks(path) for name in imports_of(path)}
    assert found >= WITHOUT_LAYOUTS


def test_modules_that_know_ranks_are_told_by_their_names() -> None:
    known = {
        "weft.kernels.dispatch.sharded",
        "weft.kernels.rope.sharded",
        "weft.kernels.cross_entropy.sharded.gather.VocabGather",
    }
    assert sharded_modules(known | {"weft.kernels.cross_entropy.options", "elsewhere.sharded"}) == known


def test_sharded_files_of_kernels_may_import_mesh_and_reshard() -> None:
    assert not forbidden_imports("kernels", {"weft.mesh", "weft.reshard", "torch.distributed"}, sharded=True)
    assert forbidden_imports("kernels", {"weft.models"}, sharded=True)


def test_private_uses_are_caught() -> None:
    assert private_dtensor_uses("x._local_tensor", set()) == {"_local_tensor"}
    assert private_dtensor_uses("", {"torch.distributed.tensor._dtensor_spec"})
    assert private_dtensor_uses("", {"torch.distributed._tensor.api"})
    assert not private_dtensor_uses("x.to_local()", {"torch.distributed.tensor", "torch.distributed.tensor.DTensor"})
    assert list(redistributions("y = 1\nx.redistribute(mesh, placements)")) == [2]
