"""Runs programs one after the other: ``python -m tests.monitor.corpus.main NAME[:FAULT:RANK] ...``.

Ranks are forks, so that PyTorch is imported once, and otherwise what torchrun makes of them. The
ranks of a program with a fault are killed when the watching process puts ``N.next`` into the
folder.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ckptd.elastic.torch.session.zygote_child import die_with
from ckptd.monitor.injection import attach_now
from tests.monitor.corpus.base import NEXT, PLANTED_VARIABLE, Plan, plant
from tests.monitor.corpus.programs import PROGRAMS
from tests.processes import free_port, until

_FAILED = 1
_LONGEST_S = 600.0


def main() -> None:
    for generation, text in enumerate(sys.argv[1:], 1):
        plan = Plan.of(text)
        print(f"begin {plan.name}", flush=True)
        print(f"end {plan.name} {_run(plan, generation)}", flush=True)


def _run(plan: Plan, generation: int) -> int:
    """Run one program on ranks of its own; return the first exit code that is not 0."""
    program = PROGRAMS[plan.name]
    port = free_port()
    ranks = [
        _fork(lambda r=rank: _rank(plan, r, program.ranks, port, generation))
        for rank in range(program.ranks)
    ]
    if plan.fault:
        place = Path(os.environ[PLANTED_VARIABLE]) / f"{generation}.{NEXT}"
        until(place.exists, f"the end of {plan}", _LONGEST_S)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)  # none was waited for: the number is still its own
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    return next((code for code in codes if code), 0)


def _fork(child: Callable[[], None]) -> int:
    mother, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = _FAILED
    try:
        die_with(mother, signal.SIGKILL)
        child()
        code = 0
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(plan: Plan, rank: int, world: int, port: int, generation: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CKPTD_GENERATION": str(generation),
    }
    attach_now()
    program = PROGRAMS[plan.name]
    plant(plan)
    if not program.needs:  # a library makes the group itself
        dist.init_process_group("gloo")
    program.main()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
