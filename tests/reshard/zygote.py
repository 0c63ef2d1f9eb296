"""A process that has everything imported, and forks a reshard for each line it reads.

Lines are JSON lists of arguments of ``ckptd``. It answers ``started PID``, and ``ended CODE`` when
the child has ended (negative: by a signal) and was reaped.
"""

from __future__ import annotations

import json
import os
import sys

from ckptd.cli.main import run
from ckptd.reshard.cli import (  # noqa: F401 - so that a child begins to work at once
    reshard as _reshard,
)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os._exit(run(json.loads(line)))
        print(f"started {child}", flush=True)
        print(f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}", flush=True)


if __name__ == "__main__":
    main()
