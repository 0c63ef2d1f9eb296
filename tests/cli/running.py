"""Running the command line: in this process, and as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ckptd.cli.main import run
from tests.processes import PATIENCE_S

COMMAND = [sys.executable, "-c", "from ckptd.cli.main import main; main()"]


@dataclass(frozen=True)
class Result:
    """Result of a command: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error document of a command with ``--json``."""
        return json.loads(self.err)["error"]


class Cli:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> Result:
        self._capsys.readouterr()
        code = run(args)
        captured = self._capsys.readouterr()
        return Result(code, captured.out, captured.err)

    def good(self, *args: str) -> Result:
        """Run a command that must succeed and say nothing on standard error."""
        result = self(*args)
        assert (result.code, result.err) == (0, ""), result
        return result

    def json(self, *args: str, code: int = 0) -> Any:
        """Run with ``--json`` and return the document."""
        result = self(*args, "--json")
        assert result.code == code, result
        return result.document


def process(*args: str, **options: Any) -> Result:
    """Run a command as a process of its own."""
    done = subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=PATIENCE_S, **options
    )
    return Result(done.returncode, done.stdout, done.stderr)
