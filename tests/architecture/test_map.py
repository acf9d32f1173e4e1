"""docs/architecture.md is true: a row for each source file, and every function, path and link that the page names."""

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.architecture.rules import PACKAGES, ROOT, sources

pytestmark = pytest.mark.every_value

PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text()
WAYS, FILES = "Six ways through the packages", "Every file"  # sections of the page
ROOTS = "|".join((*PACKAGES, "packages", "tests", "docs", "benchmarks"))


def section(text: str, title: str) -> str:
    """The text below a heading of the second level, up to the next."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(table: str) -> list[tuple[str, str]]:
    """(path, job) of each row, in order. Tables stand below headings of their folders."""
    found, folder = [], ""
    for line in table.splitlines():
        if heading := re.match(r"#{3,} `([\w/]+)/`", line):
            folder = heading[1]
        elif row := re.match(r"\| `([\w.]+)` \| (.+) \|$", line):
            found.append((f"{folder}/{row[1]}", row[2]))
    return found


def folders(table: str) -> dict[str, str]:
    """The text between each folder's heading and the folder's table."""
    found = re.findall(r"^#{3,} `([\w/]+)/`$(.*?)^\| file \|", table, re.MULTILINE | re.DOTALL)
    return {name: text.strip() for name, text in found}


def functions(text: str) -> list[tuple[str, str]]:
    """(path, name) of each function written as `reshard/planning/plan.py: Plan.transpose`, also over two lines."""
    return re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]+\.py):\s+([\w.]+)`", text)


def defined(source: str) -> set[str]:
    """The functions, classes, methods and assigned names of a module, as `f`, `C`, `C.method` and `NAME`."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return set(names(ast.parse(source).body, ""))


def paths(text: str) -> set[str]:
    """Files and folders in the text's code spans; `NAME` in a path stands for the reader's own."""
    found = re.findall(rf"`((?:{ROOTS})/[\w./]*)(?::\s+[\w.]+)?`", text)
    return {path for path in found if "NAME" not in path}


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as MyST makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def on_disk(path: str) -> Path:
    """The place of a path on the page: within the sources of a package, else below the root of the repository."""
    package = path.partition("/")[0]
    inside = package in PACKAGES
    return ROOT / "packages" / package / "src" / "weft" / path if inside else ROOT / path


def wrong_rows(table: Mapping[str, int], files: Mapping[str, str]) -> str:
    """A message that lists the files without a row, with rows to paste, and the rows to remove; "" if all is well.

    table: path -> number of rows. files: path -> first sentence of the docstring.
    """
    lacking: dict[str, list[str]] = {}
    for path in sorted(files.keys() - table.keys()):
        folder, _, name = path.rpartition("/")
        lacking.setdefault(folder, []).append(f"| `{name}` | {files[path]} |")
    lines = [line for folder, each in lacking.items() for line in (f"add below `{folder}/`, with a job:", *each)]
    lines += [f"remove the row of {path}: no such file" for path in sorted(table) if not on_disk(path).is_file()]
    lines += [f"remove a row of {path}: there are {count}" for path, count in table.items() if count > 1]
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.split(r"(?<=\.) ", text)[0]


SOURCES = {path.as_posix().rpartition("/src/weft/")[2]: path for package in PACKAGES for path in sources(package)}
ROWS = rows(section(TEXT, FILES))


def test_every_source_file_has_one_row() -> None:
    found = wrong_rows(Counter(path for path, _ in ROWS), {name: first_sentence(at) for name, at in SOURCES.items()})
    assert not found, f"{PAGE.relative_to(ROOT)}, section {FILES!r}:\n{found}"


def test_every_folder_has_a_heading_and_a_sentence() -> None:
    found = folders(section(TEXT, FILES))
    wanted = {path.rpartition("/")[0] for path in SOURCES}
    assert found.keys() == wanted, f"headings to add: {wanted - found.keys()}; to remove: {found.keys() - wanted}"
    assert not [name for name, text in found.items() if len(text.split()) < 4]


def test_rows_stand_in_the_order_of_the_files() -> None:
    by_folder: dict[str, list[str]] = {}
    for path, _ in ROWS:
        folder, _, name = path.rpartition("/")
        by_folder.setdefault(folder, []).append(name)
    for folder, names in by_folder.items():
        assert names == sorted(names, key=lambda name: (name != "__init__.py", name)), folder


def test_no_text_stands_within_a_table() -> None:
    lines = TEXT.splitlines()
    cut = [line for above, line in itertools.pairwise(lines) if line.startswith("| `") and not above.startswith("|")]
    assert not cut


def test_a_job_is_no_copy_of_the_docstring() -> None:
    copied = [path for path, job in ROWS if path in SOURCES and f"{job}." == first_sentence(SOURCES[path])]
    assert not copied


def test_every_function_is_defined_in_its_file() -> None:
    found = functions(TEXT)
    assert len(found) > 80
    missing = [
        f"{path}: {name}"
        for path, name in found
        if not on_disk(path).is_file() or name not in defined(on_disk(path).read_text())
    ]
    assert not missing


def test_every_path_is_on_the_disk() -> None:
    found = paths(TEXT)
    assert len(found) > 40
    assert not [path for path in sorted(found) if not on_disk(path).exists()]


def test_there_are_six_ways_each_by_functions() -> None:
    ways = section(TEXT, WAYS).split("\n### ")[1:]
    assert len(ways) == 6
    for way in ways:
        steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", way, re.MULTILINE)
        assert len(steps) > 4
        assert all(functions(step) for step in steps), way.partition("\n")[0]


def test_links_of_the_page_resolve() -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", TEXT)
    assert links
    for target, anchor in links:
        page = PAGE.parent / target if target else PAGE
        assert page.is_file(), target
        assert not anchor or anchor in anchors(page.read_text()) or f"({anchor})=" in page.read_text(), anchor


def test_the_page_is_linked() -> None:
    assert "](docs/architecture.md)" in (ROOT / "CONTRIBUTING.md").read_text()
    index = (ROOT / "docs" / "index.md").read_text()
    assert "](architecture.md)" in index and "\narchitecture\n" in index


# The words of a reader's question, and the file with the answer: one row has all words.
QUESTIONS = [
    ("gloo all-to-all", "reshard/moving/collectives.py"),
    ("checkpoint --resume", "models/cli/train.py"),
    ("index file names", "models/checkpoint/manifest.py"),
    ("blocks skipped documents", "kernels/attention/tiles.py"),
    ("weft plan cuts", "models/predict/search.py"),
    ("tokens rows gathered expert", "kernels/experts/function.py"),
    ("order of ZeRO's gathers", "reshard/training/full_parameters.py"),
    ("values tokens/s", "models/train/trainer.py"),
    ("counter of an element", "kernels/random/philox.py"),
    ("Dynamo told", "reshard/world/dynamo.py"),
    ("RollCall silent ranks", "models/train/agreement.py"),
    ("messages template refused", "models/data/examples/template.py"),
    ("shape padded shard", "reshard/planning/costs.py"),
    ("uneven shard", "mesh/layout.py"),
    ("collective Partial to Shard", "reshard/planning/search.py"),
    ("layout gradient decided", "mesh/infer/gradients.py"),
    ("--mesh.tp heads", "models/checks.py"),
    ("dtype load", "models/checkpoint/states.py"),
    ("CPU rope", "kernels/rope/function.py"),
    ("ranks different plans", "reshard/moving/order_check.py"),
    ("tensor-parallel boundary", "models/parallel/boundaries.py"),
    ("slow link", "reshard/planning/moves.py"),
    ("--mesh.ep divide experts", "models/train/run.py"),
    ("choice torch's attention", "kernels/attention/sharded/op.py"),
    ("gradient sinks", "kernels/attention/launch.py"),
    ("bounds given", "models/predict/plan_prices.py"),
    ("which rank has which stages", "models/schedules/pipeline_plan.py"),
    ("order gradients sent", "reshard/training/gradient_sync.py"),
    ("newest checkpoint", "models/train/folder.py"),
    ("not rounding", "models/compare/report.py"),
    ("exit status 2", "models/cli/arguments.py"),
    ("mesh ranks stored", "mesh/ranks.py"),
    ("numpy ints", "mesh/arguments.py"),
    ("orthogonalizes matrix", "reshard/planning/matrices.py"),
    ("placeholder .grad", "reshard/training/pending_gradient.py"),
    ("gradient sums shared memory", "reshard/training/shared_memory.py"),
    ("nearest least loaded holder", "reshard/planning/exchange.py"),
    ("received bytes collective", "reshard/world/collective_bytes.py"),
    ("sizes of blocks chip", "kernels/attention/launch.py"),
    ("chunk memory limit", "kernels/linear_cross_entropy/chunks.py"),
    ("differentiated again", "kernels/dispatch/sharded/second_derivatives.py"),
    ("peak MFU", "models/train/measure.py"),
    ("learning rate warmup", "models/train/config.py"),
    ("options resumed run share", "models/train/saved_run.py"),
    ("error one rank ends step", "models/parallel/pipeline/failures.py"),
    ("peak plan fullest rank", "models/predict/plan_memory.py"),
    ("lora patterns layers", "models/parallel/lora_targets.py"),
    ("optimizer made", "models/train/optimizer.py"),
    ("gradients share bucket", "reshard/training/buckets.py"),
    ("fixed binary tree", "reshard/moving/tree.py"),
    ("RowTile warps program", "kernels/launching/launched.py"),
    ("stop document ids", "kernels/attention/ranges.py"),
    ("experts cheaper sizes", "models/parallel/experts/transport.py"),
    ("decides rounding", "models/compare/judge.py"),
    ("misspelled option", "models/cli/arguments.py"),
    ("names tensors Llama", "models/checkpoint/rotary.py"),
    ("sent next stage", "models/parallel/pipeline/messages.py"),
    ("ranks' calls do not fit", "models/predict/matching.py"),
    ("seconds_of attention", "models/predict/price.py"),
]


@pytest.mark.parametrize(("words", "path"), [pytest.param(*each, id=each[0].replace(" ", "-")) for each in QUESTIONS])
def test_a_question_finds_the_file(words: str, path: str) -> None:
    found = [name for name, job in ROWS if all(word.lower() in job.lower() for word in words.split())]
    assert path in found and len(found) < 4, found


def test_wrong_rows_are_caught() -> None:
    head = "#### `mesh/`\n\nText.\n\n| file | job |\n|---|---|\n"
    table = f"{head}| `layout.py` | A |\n| `layout.py` | B |\n| `no.py` | C |\n"
    assert rows(table) == [("mesh/layout.py", "A"), ("mesh/layout.py", "B"), ("mesh/no.py", "C")]
    assert folders(table) == {"mesh": "Text."}
    message = wrong_rows(Counter(path for path, _ in rows(table)), {"mesh/random.py": "Keys.", "mesh/layout.py": "D."})
    assert message.splitlines() == [
        "add below `mesh/`, with a job:",
        "| `random.py` | Keys. |",
        "remove the row of mesh/no.py: no such file",
        "remove a row of mesh/layout.py: there are 2",
    ]
    assert not wrong_rows({"mesh/layout.py": 1}, {"mesh/layout.py": "D."})


def test_functions_paths_and_anchors_are_found() -> None:
    text = "## A b: `c`!\n`mesh/layout.py: Layout.spec`, `tests/mesh/`, `docs/NAME.md`, `mesh/x.py`, `mesh/y.py:\n  z`"
    assert functions(text) == [("mesh/layout.py", "Layout.spec"), ("mesh/y.py", "z")]
    assert paths(text) == {"mesh/layout.py", "tests/mesh/", "mesh/x.py", "mesh/y.py"}
    assert anchors(text) == {"a-b-c"}
    source = "A = 1\nb: int = 2\ndef c(): d = 3\nclass E:\n    f: int\n    def g(self): ...\n"
    assert defined(source) == {"A", "b", "c", "E", "E.f", "E.g"}
