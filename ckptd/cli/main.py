"""Entry point of the ``ckptd`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from ckptd import __version__

__all__ = ["app", "main"]

app = App(
    name="ckptd",
    help="Checkpoints for distributed training.",
    version=__version__,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; by default those of the process.
    """
    app(sys.argv[1:] if argv is None else list(argv))
