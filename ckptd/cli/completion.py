"""``ckptd --install-completion``: tab completion for bash, zsh and fish."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from ckptd.cli.output import flag, option
from ckptd.errors import RefusedError, UsageError

Shell = Literal["bash", "zsh", "fish"]


def install_completion(
    *,
    shell: Annotated[Shell | None, option("Name of the shell; detected by default.")] = None,
    output: Annotated[Path | None, option("Where to write the script.")] = None,
    no_startup: Annotated[bool, flag("Do not change the shell's start-up file.")] = False,
    yes: Annotated[bool, flag("Do not ask before the shell's start-up file is changed.")] = False,
) -> int:
    """Install tab completion for the shell in use, and say where.

    It asks before it changes the shell's start-up file.
    """
    from cyclopts.completion.detect import ShellDetectionError

    from ckptd.cli.help import Rare
    from ckptd.cli.main import app, installed_verbs

    if not no_startup and not yes:
        _confirm(shell)
    installed_verbs()
    Rare.shown = True  # what a help leaves out is completed
    try:
        path = app.install_completion(shell=shell, output=output, add_to_startup=not no_startup)
    except ShellDetectionError as error:
        raise UsageError(
            "the shell could not be detected",
            found=str(error),
            hint="ckptd --install-completion --shell bash",
        ) from None
    print(f"wrote {path}; it works in the next shell that starts")
    return 0


def _confirm(shell: Shell | None) -> None:
    """Ask a person; refuse where there is no terminal to ask."""
    whose = f"{shell}'s start-up file" if shell else "the shell's start-up file"
    if not sys.stdin.isatty():
        raise RefusedError(
            f"{whose} would be changed, and there is no terminal to confirm it",
            hint="--yes changes it without asking; --no-startup only writes the script",
        )
    print(f"write a script for tab completion, and load it in {whose}? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RefusedError("nothing was changed", hint="--no-startup only writes the script")
