"""The output of the `weft` command for its arguments, in this process."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from weft.mesh import Layout, ProcessMesh
from weft.models.cli import main, plan_report
from weft.models.cli import measure as measure_command
from weft.models.cli import train as train_command
from weft.models.cli.command import COMMANDS
from weft.models.predict.chip import load_chip
from weft.models.terminal import printable
from weft.models.train.explained_step import ExplainedStep
from weft.models.train.recipes import RECIPES
from weft.models.train.run import Run
from weft.reshard import plan

from tests.models.chat_folder import save_chat_folder

# Commands with options, as a user types them; `weft data` has subcommands.
QUESTION, ANSWER = {"role": "user", "content": "A whale?"}, {"role": "assistant", "content": "Yes."}
WITH_OPTIONS = [
    *(name for name in COMMANDS if name != "data"),
    "data prepare",
    "data show",
    "data train-tokenizer",
    "data verify",
]


class Weft:
    """Calls `weft`; returns its exit status and its output to both streams."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        status = 0
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        out, err = self._capsys.readouterr()
        return status, out, err


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Weft:
    monkeypatch.setenv("COLUMNS", "80")
    return Weft(capsys)


class TestHelp:
    @pytest.mark.parametrize("columns", [40, 80, 120])
    @pytest.mark.parametrize("command", ["", "data", *WITH_OPTIONS])
    def test_no_line_is_wider_than_the_terminal(
        self, weft: Weft, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        status, out, err = weft(*command.split(), "--help")
        assert (status, err) == (0, "")
        usage, *lines = out.splitlines()
        assert usage.startswith("usage: weft")
        assert not [line for line in lines if len(line.rstrip()) > columns]

    @pytest.mark.parametrize("command", WITH_OPTIONS)
    def test_every_option_is_described_and_every_default_is_a_value_or_words(self, weft: Weft, command: str) -> None:
        _, out, _ = weft(*command.split(), "--help")
        options = re.split(r"^ +(?=--?[a-z])", out[out.index("Exit status") :], flags=re.MULTILINE)[1:]
        # Positional arguments do not count; the help of check describes its own option in words.
        assert len(options) >= {"data verify": 1, "convert": 2, "compare": 2, "check": 0}.get(command, 4)
        for option in options:
            described = re.match(r"\S+(, --\S+)*( [A-Z]+| \{\S+\})?\s+[A-Za-z0-9][\s\S]{12,}", option)
            assert described, option
            assert option.startswith("-h,") or re.search(r"\(default:\s", option) or "(required)" in option
        assert "None" not in out

    def test_the_most_used_options_come_first(self, weft: Weft) -> None:
        _, out, _ = weft("train", "--help")
        order = ["--steps", "--output", "--data.path", "--mesh.dp", "--optimizer.lr", "--model.vocab-size"]
        places = [out.index(f"{name} ", out.index("Exit status")) for name in order]
        assert places == sorted(places)

    def test_every_recipe_is_there_with_its_size(self, weft: Weft) -> None:
        _, out, _ = weft("train", "--help")
        for name in RECIPES:
            assert f"  {name}: " in out
        assert "  llama-tiny: Llama, 0.85 M parameters, 4 layers\n" in out
        assert "  llama3-8b: Llama, 8.03 B parameters, 32 layers\n" in out

    def test_the_defaults_are_those_of_the_recipe(self, weft: Weft) -> None:
        def tied(out: str) -> str:
            return out[out.index("--model.tie-embeddings") :].partition("(default: ")[2].partition(")")[0]

        assert tied(weft("train", "--help")[1]) == "False"
        assert tied(weft("train", "llama-tiny-tied", "--help")[1]) == "True"

    @pytest.mark.parametrize("command", WITH_OPTIONS)
    def test_the_examples_run(self, weft: Weft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
        monkeypatch.chdir(tmp_path)
        Path("book.txt").write_text("Call me by my layout. " * 20)
        Path("books").mkdir()
        Path("books/one.txt").write_text("Call me by my layout. " * 20)
        for name in ("web.jsonl", "a.jsonl"):
            Path(name).write_text('{"content": "There she blows!"}\n' * 20)
        if command in ("train", "data prepare", "data show"):
            save_chat_folder(Path("llama"))
            Path("chats.jsonl").write_text(f"{json.dumps({'messages': [QUESTION, ANSWER]})}\n" * 20)
            pair = {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}
            Path("pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 20)
        if command in ("data verify", "data show"):
            weft("data", "prepare", "books", "--output", "prepared")
            weft("data", "prepare", "books", "--output", "web")
        monkeypatch.setattr(train_command, "launch", lambda run, gpus: 0)
        monkeypatch.setattr(plan_report, "plan_and_print", lambda *_, **options: None)  # see test_plan_command.py
        monkeypatch.setattr(ExplainedStep, "print", lambda *arguments: None)  # see test_explain.py
        monkeypatch.setattr(measure_command, "measure", lambda measuring: load_chip("h100"))  # see test_measure.py
        _, out, _ = weft(*command.split(), "--help")
        shown = out[out.index("Examples\n") :].partition("\n\n")[0].replace("\\\n", "")
        examples = [shlex.split(line.partition(" < ")[0]) for line in shown.splitlines()[1:]]
        assert len(examples) >= 2
        for program, *arguments in examples:
            assert [program, *arguments][: len(command.split()) + 1] == ["weft", *command.split()]
            into = arguments.pop() if ">" in arguments else None  # as a shell has it
            status, printed, err = weft(*(each for each in arguments if each != ">"))
            if into is not None:
                Path(into).write_text(printed)
            if command in ("generate", "evaluate"):  # the folder does not exist here; otherwise the command is right
                assert "outputs/RUN is not a folder" in err
            elif command == "check" and "--hangs" not in arguments:  # nor do the files
                assert "golden.json cannot be read" in err
            elif command == "compare":
                assert "outputs/RUN is not the folder of a run" in err
            elif command == "convert":
                assert "is neither a checkpoint nor a folder for transformers" in err
            else:
                assert (status, err) == (0, "")

    def test_all_of_them_stand_in_the_help_of_weft(self, weft: Weft) -> None:
        assert weft() == weft("--help") == weft("-h") == weft("help")
        _, out, _ = weft("--help")
        assert re.findall(r"^  (\w+): ", out, re.MULTILINE) == list(COMMANDS)

    def test_the_version(self, weft: Weft) -> None:
        status, out, _ = weft("--version")
        assert status == 0
        assert re.fullmatch(r"weft \S.* \(torch \S+, triton .*, python 3\.\S+\)\n", out)

    def test_nothing_waits_for_torch(self) -> None:
        program = """
import sys
from weft.models.cli import main
HELP = (["--help"], ["train", "--help"], ["explain", "--help"], ["layout", "--help"])
for arguments in (*HELP, ["layout", "dp: S(0)", "--mesh", "dp=2"]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code
    assert not {"torch", "numpy"} & set(sys.modules), arguments
    assert arguments != ["--help"] or not {"tyro", "rich"} & set(sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class TestLayout:
    @pytest.mark.parametrize("shape", [None, (8, 6), (5, 3, 2), (0, 1)], ids=str)
    @pytest.mark.parametrize("text", ["dp: S(0), tp: S(1)", "tp: S(0), dp: S(0)", "tp: P(max)", ""])
    def test_a_layout_is_drawn(self, weft: Weft, text: str, shape: tuple[int, ...] | None) -> None:
        given = () if shape is None else ("--shape", ",".join(map(str, shape)))
        layout = Layout(ProcessMesh.grid(dp=2, tp=4), text)
        assert weft("layout", text, "--mesh", "dp=2,tp=4", *given) == (0, layout.explain(shape) + "\n", "")

    def test_a_scalar_has_an_empty_shape(self, weft: Weft) -> None:
        _, out, _ = weft("layout", "tp: P", "--mesh", "tp=2", "--shape", "")
        assert "| 0+1 |" in out

    def test_the_order_of_the_axes_is_the_one_written(self, weft: Weft) -> None:
        _, out, _ = weft("layout", "tp: S(0)", "--mesh", " tp = 2, dp = 4")
        assert out.splitlines()[0] == "tp: S(0), dp: R on ProcessMesh.grid(tp=2, dp=4)"

    @pytest.mark.parametrize("dtype", [None, "float64", "float32", "bfloat16", "float16"])
    def test_a_change_is_explained(self, weft: Weft, dtype: str | None) -> None:
        mesh = ProcessMesh.grid(dp=2, tp=2)
        src, dst = Layout(mesh, "dp: S(0), tp: P"), Layout(mesh, "tp: S(0)")
        given = () if dtype is None else ("--dtype", dtype)
        status, out, _ = weft("layout", str(src), str(dst), "--mesh", "dp=2,tp=2", "--shape", "5,3", *given)
        expected = plan(src, dst, (5, 3), getattr(torch, dtype or "float32"))
        assert (status, out) == (0, expected.explain(width=80) + "\n")
        assert f"received by the busiest rank: {expected.max_received_bytes} bytes" in out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param(
                "'dp: S(0)'", "the mesh is missing; give its axes and their sizes, as --mesh dp=2,tp=4", id="no-mesh"
            ),
            pytest.param("'pp: S(0)' --mesh dp=2", "the mesh has no axis 'pp'; its axes are dp", id="axis"),
            pytest.param("R 'pp: R' --mesh dp=2 --shape 4", "'R' in layout 'R' is not 'axis: placement'", id="no-axis"),
            pytest.param(
                "R --mesh dp", "'dp' in --mesh 'dp' is not 'axis=size'; write it like --mesh dp=2,tp=4", id="mesh"
            ),
            pytest.param("R --mesh dp=two", "'dp=two' in --mesh", id="size"),
            pytest.param("R --mesh dp=0", "axis 'dp' has size 0; a size is an int >= 1", id="no-rank"),
            pytest.param("R --mesh dp=2,dp=2", "axis 'dp' is given twice in --mesh", id="axis-twice"),
            pytest.param("R --mesh 2d=2", "axis name '2d' is not an identifier", id="name"),
            pytest.param("R --mesh dp=2000000", "2,000,000 ranks, but at most 1,048,576 can be drawn", id="many"),
            pytest.param("'dp: X' --mesh dp=2", "'X' is not a placement; write R, S(dim) or P(op)", id="placement"),
            pytest.param("'dp: P(mean)' --mesh dp=2", "Partial has no op 'mean'; use one of sum", id="reduction"),
            pytest.param("'dp: S(1)' --mesh dp=2 --shape 8", "shards dim 1 of a tensor of shape (8,)", id="dims"),
            pytest.param("'dp: R' --mesh dp=2 --shape 8x6", "--shape '8x6' is not a list of sizes", id="shape"),
            pytest.param("'dp: R' --mesh dp=2 --shape -8,6", "--shape '-8,6' is not a list of sizes", id="below-0"),
            pytest.param(
                "'dp: R' 'dp: S(0)' --mesh dp=2",
                "needs the shape of the whole tensor; give it, as --shape 8,6",
                id="no-shape",
            ),
            pytest.param("'dp: R' 'dp: S(1)' --mesh dp=2 --shape 8", "shards dim 1", id="dims-of-the-target"),
            pytest.param(
                "'dp: P' 'dp: P(max)' --mesh dp=2 --shape 8",
                "goes from P(sum) to P(max); reshard to Replicate() in between",
                id="reductions",
            ),
            pytest.param(
                "'dp: R' 'dp: S(0)' --mesh dp=2000 --shape 8",
                "2,000 ranks, but at most 1,024 can be planned for; give a smaller --mesh",
                id="many-to-ask",
            ),
        ],
    )  # fmt: skip
    def test_bad_input_is_one_line(self, weft: Weft, arguments: str, message: str) -> None:
        status, out, err = weft("layout", *shlex.split(arguments))
        assert (status, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("weft layout: ")
        assert message in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["trian"], "weft: unknown command 'trian'; did you mean 'train'? the commands are ", id="command"),
        pytest.param(
            ["x"],
            "weft: unknown command 'x'; the commands are train, data, generate, evaluate, convert, explain, plan, "
            "measure, check, compare, layout",
            id="no-such-command",
        ),
        pytest.param(["--versoin"], "weft: unknown command '--versoin'; the commands are ", id="option-of-weft"),
        pytest.param(["train", "--stpes", "3"], "options: --stpes, 3; perhaps you meant --steps", id="option"),
        pytest.param(
            ["train", "--mesh", "dp=2,tp=2"], "options: --mesh, dp=2,tp=2; write --mesh.dp 2 --mesh.tp 2", id="group"
        ),
        pytest.param(["train", "--mesh=dp=2"], "options: --mesh=dp=2; write --mesh.dp 2", id="group-of-one"),
        pytest.param(["train", "--mesh", "dp"], "options: --mesh, dp; perhaps you meant --mesh.tp, ", id="group-alone"),
        pytest.param(["layout", "R", "--mehs", "dp=2"], "dp=2; perhaps you meant --mesh", id="option-of-layout"),
    ],
)
def test_a_typing_error_gets_a_suggestion(weft: Weft, arguments: list[str], said: str) -> None:
    status, out, err = weft(*arguments)
    assert (status, out) == (2, "")
    assert said in re.sub(r"(\s|--{2,})+", " ", err)


def test_ctrl_c_that_was_put_off_is_heard() -> None:
    program = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)
from weft.models.cli import main
main(["layout", "R", "--mesh", "dp=2"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        130,
        "",
        "\nweft layout: interrupted; nothing was saved\n",
    )


@pytest.mark.parametrize(
    ("module", "interrupt", "said"),
    [
        pytest.param("weft.", "raise KeyboardInterrupt", "what was saved is whole", id="first"),
        pytest.param(
            "weft.models.cli.train", "exec('raise KeyboardInterrupt')", "what was saved is whole", id="in-an-exec"
        ),
        pytest.param(
            "weft.models.cli.train", "signal.raise_signal(signal.SIGINT)", "nothing was saved", id="by-signal"
        ),
        pytest.param("weft.models.cli.train", "Caught().__del__()", "nothing was saved", id="where-it-is-caught"),
    ],
)
def test_ctrl_c_is_answered_from_the_first_import_on(module: str, interrupt: str, said: str, tmp_path: Path) -> None:
    """Only Python's own startup imports, and the package, come before the handler."""
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whether or not these tests heed it
started = set(sys.modules)
from weft.models.cli import main
imported = set(sys.modules) - started
assert all(name in ("__future__", "weft", "weft.models", "weft.models.cli") for name in imported), imported
class Caught:
    def __del__(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
class Interrupted:
    def find_spec(self, name, *_):
        if name.startswith({module!r}):
            sys.meta_path.remove(self)
            {interrupt}
sys.meta_path.insert(0, Interrupted())
main(["train", "--steps", "0"])
"""
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "program"]  # as `python -m weft.models.cli`
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, f"\nweft train: interrupted; {said}\n")


def interrupted(arguments: list[str]) -> int:
    raise KeyboardInterrupt


def interrupted_in_the_making_of_a_class(arguments: list[str]) -> int:
    class Interrupted:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    class Owner:
        attribute = Interrupted()

    raise AssertionError


@pytest.mark.parametrize("run", [interrupted, interrupted_in_the_making_of_a_class])
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_one_line(
    weft: Weft, monkeypatch: pytest.MonkeyPatch, command: str, run: Callable[[list[str]], int]
) -> None:
    monkeypatch.setattr(import_module(f"weft.models.cli.{command}"), "run", run)
    assert weft(command) == (130, "", f"\nweft {command}: interrupted; what was saved is whole\n")


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        pytest.param(None, "nothing was saved", id="nothing"),
        pytest.param("notes", "nothing was saved", id="no-checkpoint"),
        pytest.param("checkpoint-3", "what was saved is whole", id="checkpoint"),
        pytest.param("checkpoint", "what was saved is whole", id="final-model"),
    ],
)
def test_ctrl_c_says_whether_a_run_was_saved(
    weft: Weft, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved: str | None, said: str
) -> None:
    def launch(run: Run, *, gpus: int) -> int:
        if saved is not None:
            (run.folder / saved).mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("Call me by my layout. " * 20)
    monkeypatch.setattr(train_command, "launch", launch)
    status, _, err = weft("train", "--output", "run", "--data.path", "book.txt")
    assert (status, err) == (130, f"\nweft train: interrupted; {said}\n")


def test_an_error_is_no_interrupt(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(arguments: list[str]) -> int:
        raise RuntimeError("no interrupt") from ValueError()

    monkeypatch.setattr(import_module("weft.models.cli.layout"), "run", failed)
    with pytest.raises(RuntimeError, match="no interrupt"):
        weft("layout")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("def f():\n\treturn 'ä…'", "def f():\n\treturn 'ä…'", id="text"),
        pytest.param("a\x1b[31mb", "a\ufffd[31mb", id="colour"),
        pytest.param("\x00\a\b\r\f\v\x7f\x9b", "\ufffd" * 8, id="controls"),
    ],
)
def test_control_characters_do_not_reach_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
