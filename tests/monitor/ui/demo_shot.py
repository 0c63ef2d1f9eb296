"""Makes the picture of the page while ``ckptd demo`` watches a job of which one rank is stopped.

    python -m tests.monitor.ui.demo_shot [FILE] [VIEW]

Needs what `tests.monitor.ui.test_page` needs, and ``ckptd[train,monitor]``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptd_demo.watched import watch_a_job
from tests.monitor.ui.test_page import report, script

PICTURE = Path(__file__).parents[3] / "docs/guide/images/page-demo.png"
STOPPED = "non-communication hang"
DEADLINE_S = 120.0


def photographer(path: Path, view: str, home: Path) -> Callable[[str], None]:
    """Return what the demo tells of its steps: while it speaks of the stopped rank, that stands."""
    login = ""

    def say(text: str) -> None:
        nonlocal login
        print(text, flush=True)
        _, found, address = text.partition("; open ")
        login = address if found else login
        if text.startswith(STOPPED):
            with script("shot.cjs", login, view, str(path), home=home) as process:
                report(process)

    return say


def main(path: str = str(PICTURE), view: str = "overview") -> None:
    """Run that part of the demo alone, and take the picture."""
    os.environ["CKPTD_NODE"] = "node-1"  # and not what this machine is called
    with TemporaryDirectory() as folder:
        home = Path(folder)
        watch_a_job(home / "job", DEADLINE_S, photographer(Path(path).resolve(), view, home))


if __name__ == "__main__":
    main(*sys.argv[1:])
