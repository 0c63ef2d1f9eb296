"""Runs a whole controller: opens the log, takes the seat of the leader, sees its nodes off.

In it: how long it tries the store at its start; how often it looks whether another leads, or
whether most nodes do not reach it; how long it lingers after the end; signs of life for launchers
that do not hear it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptd.elastic.control.appending import Appender
from ckptd.elastic.control.controller import Controller, ControllerEnding
from ckptd.elastic.control.history import RecoveryHistory
from ckptd.elastic.control.statemachine import StateMachine
from ckptd.elastic.control.states import ControllerSettings
from ckptd.elastic.control.status import Setting, status_of
from ckptd.elastic.controller_server import ListeningSocket, PeerConnection
from ckptd.elastic.leader import LOOK_S, LeaderView, seat_taken
from ckptd.elastic.membership import Record
from ckptd.elastic.messages import Status
from ckptd.elastic.places import JobPlaces
from ckptd.elastic.policy import JobSpec
from ckptd.errors import CkptdError, ConflictError, StoreError

_FIRST_S = 60.0
_PAUSE_S = 0.5
_SEAT_S = 1.0
_LINGER_S = 5.0
_FLUSH_S = 2.0
_HEARD_S = 2.0
"""A node of which something was heard for so long, four beats, is heard."""
_OTHERS_S = 3.0
"""For so long a controller that has lost most of its nodes looks whether they live."""


async def leave_signs(outlook: LeaderView, machine: StateMachine) -> None:
    """Show launchers that hear no controller that there is one, and how many nodes it hears.

    What a node said while this process did not run, on a busy machine, is read after this: the time
    for which it slept too long makes nobody silent. Else one node that is cut off took its place.
    """
    late = 0.0
    while True:
        hears, knows = machine.hears(time.monotonic(), _HEARD_S + late)
        # Where the place cannot be written its sign grows old, as it should: it can decide
        # nothing either.
        with suppress(StoreError):
            await asyncio.to_thread(outlook.leave, hears, knows)
        began = time.monotonic()
        await asyncio.sleep(LOOK_S)
        late = max(0.0, time.monotonic() - began - LOOK_S)


@dataclass(frozen=True)
class Setup:
    """The settings with which a controller starts.

    Attributes
    ----------
    name, secret
        Of the job.
    job, settings
        See `StateMachine`.
    places
        Of its log and its seat.
    sock
        Bound; closed at the end.
    address
        Under which nodes reach it, ``HOST:PORT``.
    after
        The number of the seat that it is to follow, -1 for the first one; None: the newest.
    several
        Whether other nodes may start a controller: this one leaves signs for them then.
    events
        File for changes of state.
    say
        Is given sentences for people.
    """

    name: str
    secret: bytes
    job: JobSpec
    settings: ControllerSettings
    places: JobPlaces
    sock: socket.socket
    address: str
    after: int | None = None
    several: bool = False
    events: Path | None = None
    say: Callable[[str], None] | None = None
    life: str = field(default_factory=lambda: f"c-{secrets.token_hex(6)}")


def run_controller(setup: Setup, announce: Callable[[], None]) -> ControllerEnding | None:
    """Control a job until it has ended, or TERM or INT comes; return how it ended, None if not.

    Parameters
    ----------
    announce
        Called once it has the seat and nodes may come.

    Raises
    ------
    ConflictError
        Another controller is there.
    CorruptError
        A record of a membership log is none, or the log goes backwards; or what says where a job's
        controller is cannot be read.
    RefusedError
        Nodes know of generations that the log does not.
    StoreError
        The log can be neither read nor written.
    """
    return asyncio.run(_Run(setup, announce).run())


class _Run:
    def __init__(self, setup: Setup, announce: Callable[[], None]) -> None:
        self._setup, self._announce = setup, announce
        self._lives = [setup.life]
        """Under which this controller took the seat, the newest last."""

    async def run(self) -> ControllerEnding | None:
        setup = self._setup
        loop = asyncio.get_running_loop()
        stopped = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _settle, stopped)
        history = RecoveryHistory(setup.events, say=setup.say)
        try:
            # The seat first: its former holder appends nothing that is not read after.
            await self._patiently(self._take_seat)
            records = await self._patiently(setup.places.log.read)
            return await self._control(history, records, stopped)
        finally:
            history.close()
            setup.sock.close()

    async def _control(
        self, history: RecoveryHistory, records: list[Record], stopped: asyncio.Future[None]
    ) -> ControllerEnding | None:
        setup = self._setup
        epoch = time.time() - time.monotonic()
        machine = StateMachine(
            setup.job, setup.settings, records, time.monotonic(), by=setup.life, epoch=epoch
        )
        setting = Setting(setup.name, setup.places.url, setup.address, setup.life)
        appender = Appender(setup.places.log, len(records), history.tell, self._check_seat)

        def status() -> Status:
            ended = controller.ending.kind if controller.ending is not None else ""
            return status_of(
                setting, machine, history, controller.relaunch, ended, controller.daemon
            )

        outlook = LeaderView(setup.places.leader) if setup.several else None
        controller = Controller(
            machine,
            appender,
            history,
            status,
            lambda: self._reseat(door),
            (lambda: self._check_others(outlook, machine)) if outlook is not None else None,
        )

        def refused(peer: PeerConnection, error: CkptdError) -> None:
            history.refused(f"{peer.where}: {error.message}")

        door = ListeningSocket(setup.name, setup.secret, setup.life, controller, refused)
        await door.open(setup.sock)
        self._announce()
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(controller.run()),
            asyncio.ensure_future(self._watch_seat(history)),
            stopped,
        ]
        if outlook is not None:
            tasks.append(asyncio.ensure_future(leave_signs(outlook, machine)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if controller.ending is not None:
                await self._see_off(door)
            return controller.ending
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await door.close(_FLUSH_S)
            appender.close()

    async def _see_off(self, door: ListeningSocket) -> None:
        """Announce the end to every node, those that are just reconnecting as well."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _LINGER_S
        quiet = loop.time() + 2 * _PAUSE_S
        while loop.time() < end:
            if any(peer.role == "agent" for peer in door.peers):
                quiet = loop.time() + 2 * _PAUSE_S
            elif loop.time() > quiet:
                return
            await asyncio.sleep(0.05)

    # --- the seat ---------------------------------------------------------------------------------

    def _take_seat(self) -> None:
        setup, seat = self._setup, self._setup.places.leader
        newest = seat.newest()
        if newest is not None and newest.by == self._lives[-1]:
            return  # an attempt before this one had succeeded
        number = newest.number if newest is not None else -1
        first = len(self._lives) == 1
        if first and setup.after is not None and number != setup.after:
            raise seat_taken(setup.places.url)
        if not first and (newest is None or newest.by not in self._lives):
            raise seat_taken(setup.places.url)
        seat.take(number + 1, setup.address, self._lives[-1])

    async def _reseat(self, door: ListeningSocket) -> None:
        """Take the seat once more, under another name: nodes are to see that much has changed."""
        self._lives.append(f"{self._setup.life}-{len(self._lives)}")
        await self._patiently(self._take_seat)
        door.life = self._lives[-1]

    async def _watch_seat(self, history: RecoveryHistory) -> None:
        """End once another controller has the seat: this one's echoes must renew no lease then."""
        failing = False
        while True:
            await asyncio.sleep(_SEAT_S)
            try:
                await asyncio.to_thread(self._check_seat)
            except StoreError as error:
                if not failing:
                    history.tell(f"the controller's seat cannot be read: {error.message}")
                failing = True
                continue
            failing = False

    def _check_seat(self) -> None:
        newest = self._setup.places.leader.newest()
        if newest is not None and newest.by not in self._lives:
            raise seat_taken(self._setup.places.url)

    # --- signs ------------------------------------------------------------------------------------

    async def _check_others(self, outlook: LeaderView, machine: StateMachine) -> None:
        """End this controller if more launchers that it does not hear live than it hears.

        Else a node that is cut off with its controller would go on alone, and the others had to
        wait for the end of its lease.

        Raises
        ------
        ConflictError
            Another controller of this job was faster, or has taken over.
        """

        def counted() -> tuple[int, int]:
            return machine.hears(time.monotonic(), _HEARD_S, linked=True)

        hears, knows = counted()
        end = time.monotonic() + _OTHERS_S
        while knows - hears > hears and time.monotonic() < end:
            with suppress(StoreError):
                await asyncio.to_thread(outlook.look)
            hears, knows = counted()  # nodes may have reported meanwhile
            if outlook.silent() > hears:
                raise ConflictError(
                    "most live nodes cannot reach this controller: it ends, and one of them starts "
                    "the next one",
                    where=self._setup.places.url,
                    wanted=f"{knows} nodes",
                    found=f"{hears} that it hears, {outlook.silent()} that hear none",
                )
            await asyncio.sleep(LOOK_S)

    async def _patiently(self, call: Callable[[], Any]) -> Any:
        end = time.monotonic() + _FIRST_S
        while True:
            try:
                return await asyncio.to_thread(call)
            except StoreError:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(_PAUSE_S)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
