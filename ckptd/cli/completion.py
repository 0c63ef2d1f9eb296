"""``ckptd --install-completion``: tab completion for bash, zsh and fish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ckptd.cli.output import flag
from ckptd.errors import UsageError

__all__ = ["install_completion"]

Shell = Literal["bash", "zsh", "fish"]


def install_completion(
    *,
    shell: Annotated[
        Shell | None, Parameter(help="Which shell; found out when left out.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="Where to write the script.", show_default=False)
    ] = None,
    no_startup: Annotated[bool, flag("Leave the shell's start-up file alone.")] = False,
) -> int:
    """Install tab completion for the shell in use, and say where."""
    from cyclopts.completion.detect import ShellDetectionError

    from ckptd.cli.main import app

    try:
        path = app.install_completion(shell=shell, output=output, add_to_startup=not no_startup)
    except ShellDetectionError as error:
        raise UsageError(
            "cannot tell which shell this is",
            found=str(error),
            hint="ckptd --install-completion --shell bash",
        ) from None
    print(f"wrote {path}; it works in the next shell that starts")
    return 0
