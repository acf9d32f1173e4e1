"""`weft generate --chat` on a terminal: messages typed, answers streamed, Ctrl-C, /reset, /exit and Ctrl-D."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.models.chat_folder import LENGTH, save_chat_folder
from tests.support.terminal import ESCAPE, environment

SECONDS = 120.0  # for a start, and for an answer
PROMPT = "> "


class Terminal:
    """A command on a pty: types, and reads until a text appears."""

    def __init__(self, command: list[str]) -> None:
        self._controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (40, 200))
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment(), start_new_session=True,
            preexec_fn=_controlling_terminal,
        )  # fmt: skip
        os.close(terminal)
        self._sent = ""

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def read_until(self, pattern: str, press: str = "") -> str:
        """What was printed since the last call, up to the pattern and with it.

        press: typed after each quiet second. A Ctrl-C just before readline waits for keys has no effect until a key.
        """
        until = time.monotonic() + SECONDS
        while (found := re.search(pattern, self._sent)) is None:
            assert time.monotonic() < until, f"no {pattern!r} in {self._sent!r}"
            if not select.select([self._controller], [], [], 1.0)[0]:
                self.type(press)
            else:
                try:
                    part = os.read(self._controller, 65536)
                except OSError:  # the command has ended
                    part = b""
                assert part, f"ended without {pattern!r}: {self._sent!r}"
                self._sent += ESCAPE.sub("", part.decode(errors="replace")).replace("\r\n", "\n")
        text, self._sent = self._sent[: found.end()], self._sent[found.end() :]
        return text

    def close(self) -> int:
        """The exit status."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            os.close(self._controller)


def _controlling_terminal() -> None:
    """Make the pty the terminal whose Ctrl-C interrupts this process."""
    import fcntl

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    save_chat_folder(made)
    return made


@pytest.mark.exhaustive
def test_a_conversation(folder: Path) -> None:
    options = ["--chat", "--temperature", "0", "--tokens", "6"]
    chat = Terminal([sys.executable, "-m", "weft.models.cli", "generate", str(folder), *options])
    assert "/reset begins anew; /exit or Ctrl-D ends; Ctrl-C stops an answer" in chat.read_until(PROMPT)
    chat.type("warp\n")
    first = chat.read_until(f"warp\n(?s:.*)\n{PROMPT}")
    chat.type("warp\n")
    second = chat.read_until(f"warp\n(?s:.*)\n{PROMPT}")
    chat.type("/reset\n")
    chat.read_until(f"/reset\n{PROMPT}")
    chat.type("warp\n")
    assert chat.read_until(f"warp\n(?s:.*)\n{PROMPT}") == first != second
    chat.type("\x03")  # Ctrl-C with nothing to stop
    chat.read_until(rf"/exit or Ctrl-D ends\n{PROMPT}", press="\x03")
    chat.type("warp " * LENGTH + "\n")
    assert "give a shorter message" in chat.read_until(rf"weft generate: .*\n{PROMPT}")
    chat.type("/exit\n")
    assert chat.close() == 0


@pytest.mark.exhaustive
def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(folder: Path) -> None:
    options = ["--chat", "--tokens", "100000", "--temperature", "1", "--top-k", "1000"]
    chat = Terminal([sys.executable, "-m", "weft.models.cli", "generate", str(folder), *options])
    chat.read_until(PROMPT)
    chat.type("warp\n")
    chat.read_until("warp\n.")  # the answer has begun
    chat.type("\x03")
    chat.read_until(f"\n{PROMPT}")
    chat.type("\x04")
    assert chat.close() == 0
