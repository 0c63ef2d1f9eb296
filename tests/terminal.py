"""A real terminal: a program on a pseudo-terminal, and the screen that its output makes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

from tests.processes import PATIENCE_S

__all__ = ["Terminal"]


class Terminal:
    """A program on a terminal of its own, as somebody at a keyboard sees it.

    Parameters
    ----------
    command
        The program and its arguments.
    columns, lines
        Size of the terminal.
    env
        Variables besides those of this process and ``TERM``.
    echo
        Whether what is typed is shown.
    """

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 80,
        lines: int = 24,
        *,
        env: Mapping[str, str] | None = None,
        echo: bool = True,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        """All that the program has written."""
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        modes = termios.tcgetattr(slave)
        modes[3] &= -1 if echo else ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        dropped = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI"}
        given = {name: value for name, value in os.environ.items() if name not in dropped}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=given | {"TERM": "xterm-256color"} | dict(env or {}),
            start_new_session=True,
            preexec_fn=_own_it,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def resize(self, columns: int, lines: int) -> None:
        """Have the terminal's window another size; the program gets the signal."""
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self._master, keys.encode())

    def until(self, words: str) -> str:
        """Read on until the screen shows `words`, and return it."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.shown():
            if not self._read(end):
                raise AssertionError(f"wanted {words!r}, found\n{self.shown()}")
        return self.shown()

    def done(self) -> int:
        """Read to the end of the program; return its exit code."""
        end = time.monotonic() + PATIENCE_S
        while self._read(end):
            pass
        return self.process.wait(PATIENCE_S)

    def shown(self) -> str:
        """Return the screen as text, without what is blank at the ends of lines and below."""
        lines = [line.rstrip() for line in self.screen.display]
        return "\n".join(lines).rstrip() + "\n"

    def looks(self, words: str) -> set[str]:
        """Return the colours of `words`, of which the screen must have one line; see pyte."""
        (y,) = [y for y, line in enumerate(self.screen.display) if words in line]
        x = self.screen.display[y].index(words)
        return {self.screen.buffer[y][x + i].fg for i in range(len(words))}

    @property
    def cursor_hidden(self) -> bool:
        """Whether the program has left the cursor hidden."""
        return self.screen.cursor.hidden

    def _read(self, end: float) -> bool:
        """Take in what comes next; return whether there was something before second `end`."""
        if not select.select([self._master], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # nobody has the other end any more
            data = b""
        self.raw += data
        self._stream.feed(data)
        return bool(data)


def golden(path: Path, shown: str) -> None:
    """Compare a screen with a file, which ``WRITE_SCREENS=1`` writes, to be reviewed."""
    if os.environ.get("WRITE_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown)
    assert shown == path.read_text()


def _own_it() -> None:
    """Make the terminal that of the new session: Ctrl-C reaches the program."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
