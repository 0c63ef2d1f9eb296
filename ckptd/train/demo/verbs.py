"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from ckptd.errors import CkptdError, DeadlineError

__all__ = ["run_ckptd"]

_CLI = "import sys; from ckptd.cli.main import main; main(sys.argv[1:])"


def run_ckptd(
    arguments: list[str],
    deadline_s: float,
    fine: tuple[int, ...] = (0,),
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own, as a user would, with `env` besides its own.

    Raises
    ------
    CkptdError
        It ended with an exit code that is not in `fine`, or printed nothing.
    DeadlineError
        It took longer than `deadline_s` seconds.
    """
    command = [sys.executable, "-c", _CLI, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=deadline_s,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"ckptd {arguments[0]} did not end", wanted=f"{deadline_s:g} s"
        ) from None
    if done.returncode not in fine or not done.stdout:
        raise CkptdError(
            f"ckptd {arguments[0]} failed",
            kind="demo-run",
            where=" ".join(arguments[1:3]),
            found=done.stderr.decode(errors="replace"),
        )
    return done
