"""Colours, boxes and moving lines appear on a capable terminal only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from weft.mesh import Layout, ProcessMesh

from tests.models.metrics import some_metrics
from tests.support import preloaded
from tests.support.terminal import ESCAPE, environment, in_pipe, on_terminal

WEFT = (sys.executable, "-m", "weft.models.cli")
LAYOUT = (*WEFT, "layout", "dp: S(0), tp: S(1)", "--mesh", "dp=2,tp=2", "--shape", "8,6")
HELP = (*WEFT, "layout", "--help")
MISTAKE = (*WEFT, "train", "--stpes", "3")
DRAWN = Layout(ProcessMesh.grid(dp=2, tp=2), "dp: S(0), tp: S(1)").explain((8, 6)) + "\n"
PLAIN = [pytest.param({"NO_COLOR": "1"}, id="no-color"), pytest.param({"TERM": "dumb"}, id="dumb")]


class TestLayout:
    def test_a_drawing_is_coloured_on_a_terminal(self) -> None:
        status, sent = on_terminal(LAYOUT, start=subprocess.Popen)
        assert status == 0
        assert "|\x1b[36m 0   \x1b[0m|\x1b[33m 1   \x1b[0m|" in sent
        assert ESCAPE.sub("", sent) == DRAWN

    @pytest.mark.few(1)
    @pytest.mark.parametrize("settings", PLAIN)
    def test_a_drawing_is_plain_on_a_terminal_without_colour(self, settings: dict[str, str]) -> None:
        assert on_terminal(LAYOUT, **settings) == (0, DRAWN)

    def test_a_drawing_is_plain_in_a_pipe(self) -> None:
        done = subprocess.run(LAYOUT, env=environment(), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, DRAWN, "")

    def test_a_pipe_may_be_given_colours(self) -> None:
        status, written = in_pipe(LAYOUT, FORCE_COLOR="1")
        assert status == 0
        assert "\x1b[36m 0   \x1b[0m" in written
        assert ESCAPE.sub("", written) == DRAWN

    def test_a_drawing_fits_a_narrow_terminal(self) -> None:
        wide = (*WEFT, "layout", "dp: S(1)", "--mesh", "dp=16", "--shape", "4096,4096")
        for columns in (40, 80):
            status, sent = on_terminal(wide, columns=columns, NO_COLOR="1")
            assert status == 0
            assert 0.6 * min(columns, 72) < max(map(len, sent.splitlines()[1:])) <= columns


class TestHelp:
    def test_help_is_coloured_and_in_boxes_on_a_terminal(self) -> None:
        status, sent = on_terminal(HELP)
        assert status == 0
        assert ESCAPE.search(sent)
        assert "╭─" in ESCAPE.sub("", sent)

    def test_a_mistake_is_a_line_on_a_terminal(self) -> None:
        status, sent = on_terminal(MISTAKE)
        assert (status, len(sent.splitlines())) == (2, 1)
        assert sent.startswith("weft train: Unrecognized options: --stpes") and "--steps" in sent

    @pytest.mark.parametrize("command", [pytest.param(HELP, id="help"), pytest.param(MISTAKE, id="mistake")])
    @pytest.mark.parametrize("settings", PLAIN)
    def test_help_and_mistakes_have_no_colour_where_none_is_wanted(
        self, command: tuple[str, ...], settings: dict[str, str]
    ) -> None:
        _, sent = on_terminal(command, **settings)
        assert not ESCAPE.search(sent)

    @pytest.mark.parametrize(
        ("command", "ends"), [pytest.param(HELP, 0, id="help"), pytest.param(MISTAKE, 2, id="mistake")]
    )
    def test_help_and_mistakes_are_ascii_in_a_pipe(self, command: tuple[str, ...], ends: int) -> None:
        status, written = in_pipe(command)
        assert status == ends
        assert written.isascii()
        assert "\x1b" not in written

    @pytest.mark.few(1)
    @pytest.mark.parametrize(
        ("command", "ends"),
        [
            pytest.param((*WEFT, "train", "--help"), 0, id="train"),
            pytest.param(HELP, 141, id="help"),
            pytest.param(LAYOUT, 141, id="layout"),
        ],
    )
    def test_a_reader_that_has_enough_is_no_error(self, command: tuple[str, ...], ends: int) -> None:
        """141 is a shell's status for SIGPIPE, by which other programs end in this case."""
        with preloaded.Popen(command, stdout=preloaded.PIPE, stderr=preloaded.PIPE) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            said = process.stderr.read()
            assert (process.wait(), said) == (ends, "")

    @pytest.mark.exhaustive
    def test_help_names_the_program_as_the_user_called_it(self) -> None:
        command, named = (sys.executable, "-c", COMMANDS), environment(WEFT_PROGRAM="./run")
        done = subprocess.run(command, env=named, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        of_commands = done.stdout.split("\f\n")
        assert len(of_commands) == 5
        for written in of_commands:
            assert "./run" in written
            assert "weft layout" not in written
            assert "weft train" not in written


# Commands in turn, with a form feed between their outputs.
COMMANDS = """
import sys
from weft.models.cli import main

sys.stderr = sys.stdout
for arguments in (["--help"], ["train", "--help"], ["layout", "--help"], ["trian"], ["layout", "R"]):
    if arguments != ["--help"]:
        print("\\f")
    try:
        main(arguments)
    except SystemExit:
        pass
"""


STEPS = """
from dataclasses import replace
from weft.models.train.recipes import recipe
from weft.models.train.report import Report
from tests.models.metrics import some_metrics

report = Report(enabled=True)
config = replace(recipe("llama-tiny"), steps=3, log_every=2)
with report.show_steps(config) as shown:
    for step in (1, 2, 3):
        shown.show(some_metrics(step=step, done=step / 3))
        if step == 1:
            report.print_line("check")
report.print_line("after")
"""


class TestStepsOfTraining:
    """Steps as `weft train` shows them."""

    COMMAND = (sys.executable, "-c", STEPS)
    LINES = tuple(
        "check" if step is None else f"step {step}/3 {step / 3:4.0%}  {some_metrics()}" for step in (1, None, 2, 3)
    )

    @pytest.mark.few(1)
    @pytest.mark.parametrize("columns", [40, 80, 140])
    def test_a_terminal_has_one_place_for_them_where_nothing_is_cut_off(self, columns: int) -> None:
        status, sent = on_terminal(self.COMMAND, columns=columns)
        assert status == 0
        assert sent.count("\x1b[?25l") == sent.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back
        last = ESCAPE.sub("", sent[sent.rindex("\x1b[2K") :])
        shown, after = " ".join(last.replace("━", "").split()).rsplit(" ", 1)
        assert after == "after"
        assert "…" not in sent
        assert shown.startswith("step 3/3 100% ")
        assert shown.endswith(" ".join(str(some_metrics()).split()))
        assert max(map(len, ESCAPE.sub("", sent.replace("\r", "\n")).splitlines())) <= columns

    @pytest.mark.parametrize("settings", PLAIN[1:])
    def test_a_terminal_that_cannot_move_its_cursor_has_lines(self, settings: dict[str, str]) -> None:
        status, sent = on_terminal(self.COMMAND, **settings)
        assert (status, sent.splitlines()) == (0, [*self.LINES, "after"])

    @pytest.mark.few(1)
    @pytest.mark.parametrize("settings", [{}, {"FORCE_COLOR": "1"}], ids=["plain", "force-color"])
    def test_a_pipe_has_lines(self, settings: dict[str, str]) -> None:
        status, written = in_pipe(self.COMMAND, **settings)
        assert (status, written.splitlines()) == (0, [*self.LINES, "after"])

    def test_without_colour_the_line_is_still_in_one_place(self) -> None:
        _, sent = on_terminal(self.COMMAND, NO_COLOR="1")
        assert "\x1b[2K" in sent
        assert not [code for code in ESCAPE.findall(sent) if code.endswith("m")]


class TestPreparing:
    """The bar of `weft data prepare`."""

    @staticmethod
    def command(folder: Path) -> tuple[str, ...]:
        (folder / "text.txt").write_text("weft and warp " * 4096)  # 56 KiB
        options = ("--output", str(folder / "out"), "--workers", "1")
        return (*WEFT, "data", "prepare", str(folder / "text.txt"), *options)

    def test_a_terminal_has_a_bar_of_the_bytes_that_are_read(self, tmp_path: Path) -> None:
        status, sent = on_terminal(self.command(tmp_path))
        assert status == 0
        bar, result = ESCAPE.sub("", sent).replace("\r", "\n").split("prepared ", 1)
        assert "━━━" in bar and "56.0/56.0 KiB" in bar
        assert "━" not in result
        assert sent.count("\x1b[?25l") == sent.count("\x1b[?25h") == 1  # the cursor is hidden, and comes back

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("settings", [{}, {"FORCE_COLOR": "1"}], ids=["plain", "force-color"])
    def test_a_pipe_has_none(self, settings: dict[str, str], tmp_path: Path) -> None:
        status, written = in_pipe(self.command(tmp_path), **settings)
        assert status == 0
        assert written.startswith("prepared ")
        assert "━" not in written and "\x1b" not in written
