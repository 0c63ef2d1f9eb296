"""Supervisor of launchers under a scheduler: starts them, and again after pauses; requeues a job.

In it: how often the scheduler is asked; how long its calls may take; the first and the longest
pause before a launcher is started again; how long it has to stop.

It decides nothing about the job: it starts launchers, restarts those that the controller names
(level 2) or that ended by themselves, hands over what the scheduler says about nodes, and submits
the job again when the controller gives it up for that (level 3).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckptd.elastic.launchers.base import Launcher, Machine, MachineState
from ckptd.elastic.messages import Notice, Order, OrderKind, Status
from ckptd.elastic.operator import OperatorLink
from ckptd.errors import CkptdError, NotFoundError

_TURN_S = 0.05
_FOR_ANOTHER = ("requeue", "no-nodes")
"""Ends that another allocation may mend."""


@dataclass(frozen=True)
class SupervisorSettings:
    """Seconds.

    Attributes
    ----------
    poll_s
        From one question to the scheduler to the next.
    call_s
        For one request to the scheduler.
    again_s, most_again_s
        Before a launcher that ended by itself is started a second time; doubled each time up to
        the other. The first time it is started at once.
    stop_s
        For a job that was ordered to stop: to save, and to end.
    """

    poll_s: float = 2.0
    call_s: float = 30.0
    again_s: float = 1.0
    most_again_s: float = 60.0
    stop_s: float = 90.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes
    ----------
    kind
        That of `ckptd.elastic.messages.Shutdown`; ``lost`` if it did not end in
        `SupervisorSettings.stop_s` after the order.
    text
        For people.
    requeue
        Whether it is to be submitted again: it was stopped for that, gave up for that, or had too
        few nodes.
    """

    kind: str
    text: str
    requeue: bool


class Supervisor:
    """Drives a plug-in until the job has ended; `run` belongs to one thread.

    Parameters
    ----------
    launcher
        The plug-in.
    link
        To the controller.
    say
        Shows people a sentence.
    turn
        Called about twenty times a second; keeps a controller alive, say.
    settings
        Deadlines.
    """

    def __init__(
        self,
        launcher: Launcher,
        link: OperatorLink,
        say: Callable[[str], None],
        *,
        turn: Callable[[], None] = lambda: None,
        settings: SupervisorSettings | None = None,
    ) -> None:
        self._launcher, self._link, self._say, self._turn = launcher, link, say, turn
        self.settings = settings or SupervisorSettings()
        self._status: Status | None = None
        self._relaunched = 0
        self._stop: Order | None = None
        self._ordered = self._requeue = False
        self._closed = threading.Event()
        self._stop_at = 0.0
        self._tries: dict[str, tuple[float, float]] = {}
        """When the launcher of a node was restarted, and the pause before the next time."""
        self._notices: list[Notice] = []
        self._problems: dict[str, str] = {}
        self._leaving: set[str] = set()
        """Nodes that were to be taken away."""
        self._owed: set[str] = set()
        """Nodes on which a launcher was to be started and could not be."""
        self._gone: set[str] = set()
        """Nodes for which others are wanted, and the scheduler could not be asked yet."""

    def stop(self, reason: str, *, requeue: bool) -> None:
        """Have the job save and end, to be submitted again if `requeue`."""
        if self._stop is None:
            self._stop_at = time.monotonic()
            self._requeue = requeue
            self._stop = Order(kind=OrderKind.STOP, reason=reason)

    def run(self) -> Outcome:
        """Start a launcher on each node that is up, and return once the job has ended.

        Launchers may still be there then: they end by themselves. Nothing has been submitted again.

        Raises
        ------
        StoreError, DeadlineError
            The scheduler refused the first start.
        """
        listener = threading.Thread(target=self._listen, name="ckptd-supervisor", daemon=True)
        first = self._launcher.machines(self.settings.call_s)
        self._launcher.start(_up(first), self.settings.call_s)
        listener.start()
        try:
            return self._until_ended()
        finally:
            self._closed.set()

    # --- inside -----------------------------------------------------------------------------------

    def _until_ended(self) -> Outcome:
        polled = time.monotonic()
        while True:
            self._turn()
            status = self._status
            if status is not None and status.ended:
                again = self._requeue or status.ended in _FOR_ANOTHER
                done = status.ended == "done"
                return Outcome(status.ended, status.reason, again and not done)
            if self._stop is not None and self._tell_stop(self._stop):
                return Outcome("lost", "the job did not end in time", self._requeue)
            if status is not None and status.relaunch_generation > self._relaunched:
                self._relaunched = status.relaunch_generation
                self._try("restart launchers", partial(self._relaunch, status))
            if time.monotonic() - polled >= self.settings.poll_s:
                self._try("ask the scheduler", self._poll)
                polled = time.monotonic()
            time.sleep(_TURN_S)

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                for status in self._link.statuses():
                    self._status = status
                    if status.ended or self._closed.is_set():
                        return
            except NotFoundError:
                continue  # it may be on its way back, and nothing else can be done here

    def _tell_stop(self, order: Order) -> bool:
        """Hand over the order, once; return whether it is too late for the job to end well."""
        if not self._ordered:
            self._say(f"stopping the job: {order.reason}")
            self._try("tell the controller", partial(self._order, order))
        return time.monotonic() - self._stop_at >= self.settings.stop_s

    def _order(self, order: Order) -> None:
        answer = self._link.order(order)
        self._ordered = True
        if not answer.ok:
            self._say(f"the controller does not stop the job: {answer.text}")

    def _relaunch(self, status: Status) -> None:
        """Start the launchers of these nodes again, or others for nodes that are gone."""
        by_name = {m.name: m for m in self._launcher.machines(self.settings.call_s)}
        known = [by_name[node] for node in status.relaunch if node in by_name]
        again = [m.name for m in known if m.state is MachineState.UP]
        self._gone.update(m.name for m in known if m.state is not MachineState.UP)
        if again:
            self._say(f"restarting launchers on {', '.join(again)}: {status.reason}")
            self._launcher.stop(again, self.settings.call_s)
            self._begin(again)
        self._replace()

    def _replace(self) -> None:
        for node in sorted(self._gone):
            new = ""
            with suppress(NotFoundError):
                new = self._launcher.replace(node, self.settings.call_s)
            self._gone.discard(node)
            if new:
                self._say(f"{new} takes the place of {node}")
                self._begin([new])
            else:
                self._say(f"{node} is gone, and no replacement node is available")

    def _begin(self, nodes: list[str]) -> None:
        """Start launchers where none are now; `_revive` does where that fails."""
        self._owed.update(nodes)
        self._launcher.start(nodes, self.settings.call_s)
        self._owed.difference_update(nodes)

    def _poll(self) -> None:
        for hint in self._launcher.hints(self.settings.call_s):
            self._say(f"{hint.node} will be taken away: {hint.reason}")
            self._leaving.add(hint.node)
            self._notices.append(
                Notice(node=hint.node, seconds=hint.seconds, reason=hint.reason[:200])
            )
        while self._notices:
            self._link.order(self._notices[0])
            del self._notices[0]
        if self._stop is None:
            self._revive()
            self._replace()

    def _revive(self) -> None:
        """Start launchers that ended by themselves, where the job still goes on."""
        machines = self._launcher.machines(self.settings.call_s)
        self._gone.difference_update(m.name for m in machines if m.state is MachineState.UP)
        for machine in machines:
            if machine.name in self._leaving and machine.state is MachineState.UP:
                # The controller uses a node that was to go once another launcher speaks for it.
                self._say(f"{machine.name} was not taken away: starting another launcher there")
                self._launcher.stop([machine.name], self.settings.call_s)
                self._launcher.start([machine.name], self.settings.call_s)
                self._leaving.discard(machine.name)
        ended = [m for m in machines if self._is_due(m)]
        # Asked after the launchers: they end when the job has, and then this says so.
        if not ended or self._link.status().ended:
            return
        for machine in ended:
            if machine.code is None:
                self._say(f"the launcher on {machine.name} is started now")
            else:
                self._say(
                    f"the launcher on {machine.name} ended with {machine.code}: another is started"
                )
            _, pause = self._tries.get(machine.name, (0.0, self.settings.again_s / 2))
            self._tries[machine.name] = (
                time.monotonic(),
                min(2 * pause, self.settings.most_again_s),
            )
        self._begin([m.name for m in ended])

    def _is_due(self, machine: Machine) -> bool:
        now = time.monotonic()
        at, pause = self._tries.get(machine.name, (0.0, 0.0))
        if machine.running:
            self._owed.discard(machine.name)
            if at and now - at > self.settings.most_again_s:
                del self._tries[machine.name]
            return False
        ended = machine.code is not None or machine.name in self._owed
        here = machine.state is MachineState.UP and ended
        return here and (not at or now - at >= pause)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """Do something that fails while a scheduler or a controller is away; say why, once."""
        try:
            act()
        except CkptdError as error:
            if self._problems.get(what) != error.message:
                self._say(f"cannot {what}: {error}")
            self._problems[what] = error.message
        else:
            self._problems.pop(what, None)


def _up(machines: tuple[Machine, ...]) -> list[str]:
    return [m.name for m in machines if m.state is MachineState.UP]
