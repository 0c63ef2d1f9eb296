"""One rank of one program: ``torchrun -m tests.monitor.corpus.main NAME``."""

from __future__ import annotations

import sys

import torch.distributed as dist

from tests.monitor.corpus import idioms, libraries, pipelines, roles, sharded  # noqa: F401
from tests.monitor.corpus.base import PROGRAMS


def main() -> None:
    program = PROGRAMS[sys.argv[1]]
    if program.needs:  # the library makes the group
        program.main()
    else:
        dist.init_process_group("gloo")
        program.main()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
