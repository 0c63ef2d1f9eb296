"""The server of a rank, with a `Kill` that is armed in it: `python -m tests.publish.killserver FD`.

`CKPTD_TEST_KILL` is the folder of the life, and the rank.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from ckptd.publish.server import main
from tests.publish.killpoints import POINTS, put_pid

if __name__ == "__main__":
    where, _, number = os.environ["CKPTD_TEST_KILL"].rpartition(":")
    folder, rank = Path(where), int(number)
    put_pid(folder, f"server-{rank}", os.getpid())
    spec = pickle.loads((folder / "kill").read_bytes())
    if POINTS[spec.point][0] == "server" and spec.rank == rank:
        spec.arm(folder)
    main()
