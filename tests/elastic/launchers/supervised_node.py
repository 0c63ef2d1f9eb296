"""A node of which only the launcher is real: ``NAME JOB LOG FOLDER``; ends with the job's code."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ckptd.elastic.places import open_places
from tests.elastic.controlled import PretendedNode

name, job, log, folder = sys.argv[1:]
places = open_places(job, log)
failing = os.path.exists(f"{folder}/failing")


def address() -> str:
    """Return where the controller is."""
    newest = places.leader.newest()
    return newest.address if newest is not None else ""


class Node(PretendedNode):
    """Trains until it is told to end, or fails before each first step."""

    def train(self, steps: int = 1) -> None:
        if failing:
            self.end(1)
        else:
            super().train(steps)


node = Node(name, address, job=job)
with open(f"{folder}/{name}.pids", "a") as file:
    file.write(f"{os.getpid()}\n")
while node.bye is None and os.getppid() != 1:
    if Path(folder, f"{name}.end").exists():
        os.remove(f"{folder}/{name}.end")
        os._exit(9)
    if node.running and not failing:
        node.train()
    time.sleep(0.05)
node.close()
sys.exit(node.bye.code if node.bye is not None else 1)
