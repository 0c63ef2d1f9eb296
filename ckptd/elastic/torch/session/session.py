"""`session`: calls the training function in each generation, in one process; ends or goes on.

In it: how long groups, copies and the next generation are waited for; when the process is ended
instead; how a broken collective is reported.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ckptd.base.runtime import launched
from ckptd.base.runtime.pauses import spare
from ckptd.base.torch.ranks import forget_boards
from ckptd.checkpoint.torch.saver import wait_for_copying
from ckptd.elastic.messages import (
    INTERRUPT_S,
    INTERRUPT_VARIABLE,
    LEASE_EXIT_CODE,
    FenceNow,
    Go,
    Quit,
    ToWorker,
)
from ckptd.elastic.nccl import apply_settings, too_old, wrong_settings
from ckptd.elastic.torch.session.elastichooks import abandon_all
from ckptd.elastic.torch.session.groups import destroy_groups, let_go
from ckptd.elastic.torch.session.health import FAILS, empty_caches, fault_of_devices
from ckptd.elastic.torch.session.interrupt import Interrupter
from ckptd.elastic.torch.session.leaseguard import BEFORE_STEP, end_if_over, guard_steps
from ckptd.elastic.torch.session.world import World
from ckptd.elastic.worker import WorkerLink
from ckptd.errors import StoreError, UsageError
from ckptd.events.bus import regroup

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("ckptd.elastic")
_LOOK_S = 0.1
"""How often an idle worker looks at its lease, in seconds."""
_SHARE = 0.8
"""Share of the time to leave a generation after which a process says why it cannot, and ends."""
_KILLED_S = 5.0
_GROUPS_S = 30.0
"""Seconds for threads of groups to finish their failed calls and the program's callbacks."""
_COPYING_S = 5.0
"""Seconds for saves that are still being copied; their work on devices is done."""
_UNFIT_EXIT_CODE = 1
_CAUSE_S = 1.5
"""So long after a failed call a lost rank is probably why; later, the error is shown to people."""
_BROKEN_S = 5.0
"""So long after a failed call an interrupt explains it; later, the program itself has failed."""


def session(
    train: Callable[Concatenate[World, P], T], *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """Call ``train(world, *args)`` in each generation of the job, in this process.

    When ranks come or go, the launcher interrupts `train` wherever it is: in a collective, a wait,
    a sleep. What it raised is dropped, process groups are destroyed, open checkpointers abandoned,
    and `train` is called again with the ranks there are then. So it makes everything again: process
    groups, model, optimizer, loaders, checkpointer, and loads the state. A process
    that has not left its generation in time (``ckptd run --interrupt``) is killed, and replaced.

    Without ``ckptd run`` it calls `train` once, with what the environment says.

    Parameters
    ----------
    train
        The program from its first collective to its last. It must not keep what belongs to a
        generation in variables of modules, nor go on after `BaseException`.

    Returns
    -------
    object
        What `train` returned in the last generation; None in a process that no rank was left for.

    Raises
    ------
    BaseException
        What `train` raised, if no change of ranks was the cause of it within five seconds.
    UsageError
        ``preemption`` or a session in another thread than the main one, which alone can handle
        signals;: a session runs in this process already.
    """
    link = WorkerLink.current()
    if link is None:
        return train(World.of(os.environ), *args, **kwargs)
    return _Session(link).run(lambda world: train(world, *args, **kwargs))


class _Session:
    def __init__(self, link: WorkerLink) -> None:
        if launched.current is not None:
            raise UsageError("a session runs in this process already")
        self._link = link
        self._changed = threading.Condition()
        self._go: Go | None = None
        self._interrupted = 0
        self._leave_by = 0.0
        self._training = False
        self._idle = False
        self._quit = False
        self._settled = False
        self._excepthook = sys.excepthook
        self._interrupter = launched.current = Interrupter()

    def run(self, train: Callable[[World], T]) -> T | None:
        _stay_small()
        if INTERRUPT_VARIABLE in os.environ:
            _prepare_nccl()
        elif self._link.rank == 0:
            _log.warning(
                "the launcher of this job restarts all processes when ranks join or leave; with "
                "ckptd run, a session continues in the same process"
            )
        guard_steps()
        BEFORE_STEP.append(self._interrupter.check)
        self._link.listen(self._hear)
        self._link.hold_session()
        try:
            while True:
                self._link.mark("imported")
                value = self._call(train)
                if not self._is_over():
                    self._link.done()
                    return value
                self._leave()
                if not self._wait_go():
                    return None
        finally:
            self._link.unlisten(self._hear)
            BEFORE_STEP.remove(self._interrupter.check)
            self._interrupter.close()
            launched.current = None

    # -- one generation ----------------------------------------------------------------------------

    def _call(self, train: Callable[[World], T]) -> T | None:
        """Call `train`; what it raised in a generation that is over is dropped."""
        with self._changed:
            if self._is_over():
                return None
            self._training = True
        try:
            try:
                self._interrupter.enter()
                return train(World.of(os.environ))
            finally:
                self._interrupter.leave()
        except BaseException as error:
            if not self._explained(error):
                raise
            _log.info("generation %d is left: %r", self._link.generation, error)
        return None

    def _explained(self, error: BaseException) -> bool:
        """Tell whether the end of the generation is why a call failed; wait for that if need be."""
        if self._is_over():
            return True
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            return False
        self._link.broken(repr(error))
        if self._over_within(_CAUSE_S):
            return True
        # The controller soon takes it for a fault by itself and ends the generation for it: the
        # place where the program failed would never be shown.
        who = self._link.rank, self._link.generation
        _log.warning("rank %d: generation %d failed here, for no known cause", *who, exc_info=error)
        return self._over_within(_BROKEN_S - _CAUSE_S)

    def _over_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        with self._changed:
            while not self._is_over() and not self._link.gone and time.monotonic() < end:
                self._changed.wait(_LOOK_S)
            return self._is_over()

    def _is_over(self) -> bool:
        return self._interrupted >= self._link.generation

    def _leave(self) -> None:
        """Release everything of the generation, and say so; ends a process that cannot."""
        with self._changed:
            self._training = False
            until = self._leave_by
        abandon_all()
        if hung := self._interrupter.settle(until):
            names = ", ".join(hung)
            self._end(f"collectives of {len(hung)} groups cannot be aborted in time: {names}")
        groups = destroy_groups()
        if fault := fault_of_devices(until):
            self._end(fault, device=fault.startswith(FAILS))
        forget_boards()
        sys.excepthook = self._excepthook  # each default group puts one of its own around it
        self._interrupter.again()
        with self._changed:
            self._idle = True
            self._link.out(self._interrupted)
        if not wait_for_copying(time.monotonic() + _COPYING_S):
            _log.warning("a save is still being copied: its memory is freed when that ends")
        # Models and optimizers are full of cycles, and the next generation needs their memory. So
        # are saves: what a thread still copied would stay until the next collection, locked pages
        # included.
        gc.collect()
        if not let_go(groups, time.monotonic() + _GROUPS_S):
            self._end("a process group cannot be destroyed: its threads wait for other ranks")
        empty_caches()
        if not self._settled:
            self._settled = True
            spare()  # what was imported within the first generation

    def _end(self, why: str, *, device: bool = False) -> NoReturn:
        """End this process, which can go on in no generation; the launcher starts another one."""
        _log.error("this process is not used again: %s", why)
        self._link.unfit(self._interrupted, why, device=device)
        time.sleep(_KILLED_S)
        os._exit(_UNFIT_EXIT_CODE)  # its launcher has not killed it, and must not seat it again

    def _wait_go(self) -> bool:
        """Wait for another generation and make it this process's own; False if none will be."""
        with self._changed:
            while (go := self._ready()) is None:
                if self._quit:
                    return False
                self._check_alive()
                self._changed.wait(_LOOK_S)
            self._go, self._idle = None, False
        os.environ.update(go.environ)
        world = World.of(os.environ)
        _record_anew(go.generation, world)
        self._link.goes_on(go.generation, world.rank)
        return True

    def _ready(self) -> Go | None:
        go = self._go
        return go if go is not None and go.generation > self._interrupted else None

    def _check_alive(self) -> None:
        """End with the launcher, or with the lease: no order to go on would ever come."""
        if self._link.lease is not None:
            end_if_over(self._link.lease)
        if self._link.gone:
            os.write(2, b"ckptd: the launcher of this node is gone: this rank ends\n")
            os._exit(LEASE_EXIT_CODE)

    # -- the thread that reads ---------------------------------------------------------------------

    def _hear(self, message: ToWorker | None) -> None:
        with self._changed:
            if isinstance(message, FenceNow):
                over = message.generation - 1
                if over > self._interrupted:
                    self._leave_by = time.monotonic() + _SHARE * _interrupt_s()
                self._interrupted = max(self._interrupted, over)
                if self._training and self._is_over():
                    self._interrupter.interrupt()
                elif self._idle and over > self._link.generation:
                    # It has a seat in that generation, and now will never begin there.
                    self._link.out(over)
            elif isinstance(message, Go):
                self._go = message
            elif isinstance(message, Quit):
                self._quit = True
            self._changed.notify_all()


def _prepare_nccl() -> None:
    """Have groups of NCCL made so that they can be left; log what keeps them from it, once."""
    if not dist.is_nccl_available():
        return
    for setting in wrong_settings(os.environ):
        found = os.environ[setting.name]
        _log.warning("%s=%s: %s; unset it", setting.name, found, setting.consequence)
    apply_settings(os.environ)
    if old := too_old(torch.cuda.nccl.version()):
        _log.warning("%s: this process may be killed and replaced where it could go on", old)


def _interrupt_s() -> float:
    """Return the seconds that the launcher gives a session to leave its generation."""
    try:
        return float(os.environ.get(INTERRUPT_VARIABLE, INTERRUPT_S))
    except ValueError:
        return INTERRUPT_S


def _stay_small() -> None:
    """Leave modules out of what is collected between generations, which is on the critical path.

    Optimizers and wrappers import the first two on first use: hundreds of thousands of objects.
    """
    core = (f"ckptd.checkpoint.torch.{name}" for name in ("checkpointer", "saver", "loader"))
    for name in ("torch._dynamo", "torch.distributed.tensor", *core):
        importlib.import_module(name)
    spare()


def _record_anew(generation: int, world: World) -> None:
    """Tell the recorder of this process its new generation and rank."""
    try:
        regroup(generation, world.rank, world.world_size)
    except StoreError as error:
        _log.warning("this rank is not watched any more: %s", error.message)
