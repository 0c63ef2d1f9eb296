"""The controller: takes events one by one, has them decided, and carries the actions out.

In it: how often it looks at the clock; the part of a lease that it grants; how often operators get
a new status; which events operators and nodes may send, and their checks.

It drives a `StateMachine`. Every event goes through one queue; the actions that follow from it are
carried out before the next event is looked at, and a record is durable in the membership log before
any node hears of its generation. So a controller that is killed at any instant and started again
knows of everything that it may have let others do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from ckptd.base.net.address import is_loopback
from ckptd.elastic import messages
from ckptd.elastic.control.appending import Appender
from ckptd.elastic.control.history import RecoveryHistory
from ckptd.elastic.control.parts import Parts
from ckptd.elastic.control.statemachine import StateMachine
from ckptd.elastic.controller_server import PeerConnection
from ckptd.elastic.dial import MOST_FRAME_BYTES
from ckptd.elastic.launchers.workers import is_stopped
from ckptd.errors import CkptdError, RefusedError

_TICK_S = 0.1
_AWAY_S = 1.0
"""A controller that did not come to look at the time for so long was stopped, or kept from it."""
_LEASE_PART = 0.9
_BACK_S = 0.5
"""A connection that broke and is not back after so long is lost, even if nothing else failed."""
_MOST_AHEAD = 1 << 20
"""Generations that controllers before this one may have fenced or begun and not written down."""
_PUSH_S = 0.2
_PUSH_AT_LEAST_S = 2.0


class ControllerEnding(NamedTuple):
    """How a controller ended.

    Attributes
    ----------
    kind, text, code
        Of the job, as in `ckptd.elastic.messages.Shutdown`.
    """

    kind: str
    text: str
    code: int


class _Node:
    """Messages sent to a node on its present connection, so that none is sent twice."""

    def __init__(self, peer: PeerConnection, before: _Node | None = None) -> None:
        self.peer = peer
        self.before = before
        """The node on its earlier connection, until a beat tells if its launcher is the same."""
        self.up: messages.NodeUp | None = None
        self.queued: messages.NodeUp | None = None
        self.received = 0
        self.fenced: tuple[int, int] = (0, 0)
        self.begun = 0
        self.left = False


class Controller:
    """The decisions of one job, carried out; a `ckptd.elastic.controller_server.Listener`.

    Parameters
    ----------
    machine
        Decides; its moments are those of ``time.monotonic``.
    appender
        Writes records.
    history
        Keeps what people want to know.
    status
        Returns the status; see `ckptd.elastic.control.status.status_of`.
    reseat
        Takes the seat again; see `ckptd.elastic.messages.Reseat`.
    check
        Called before a generation is decided; ends this controller by an error if others are to
        decide. None: there are no others.

    Attributes
    ----------
    ending
        How the job ended; None while it goes on.
    relaunch
        The newest wish to have launchers restarted, and the generation at which it came.
    daemon
        URL of the daemon that was announced last; empty before any.
    """

    def __init__(
        self,
        machine: StateMachine,
        appender: Appender,
        history: RecoveryHistory,
        status: Callable[[], messages.Status],
        reseat: Callable[[], Awaitable[None]],
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._check_others = check
        self.machine = machine
        self.ending: ControllerEnding | None = None
        self.relaunch: tuple[int, messages.Relaunch] | None = None
        self.daemon = ""
        self._appender, self._history, self._status = appender, history, status
        self._reseat = reseat
        # A controller that another one has followed renews leases for a moment more, and the other
        # one counts from its own beginning.
        self._lease_s = _LEASE_PART * machine.settings.lease_s
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[messages.JobEvent, Callable[[], None] | None]] = deque()
        self._awake = asyncio.Event()
        self._nodes: dict[str, _Node] = {}
        self._broken: dict[str, asyncio.TimerHandle] = {}
        """Of nodes whose connection broke: when they are lost."""
        self._parts: Parts | None = None
        self._store: messages.StoreAt | None = None
        self._subscribers: set[PeerConnection] = set()
        self._dirty = True

    # --- what peers say ---------------------------------------------------------------------------

    def joined(self, peer: PeerConnection) -> None:
        """See `Listener`."""
        if peer.role != "agent":
            return
        before = self._nodes.get(peer.name)
        if before is not None and before.up is None and before.before is not None:
            before.peer.cut()
            before = before.before
        self._nodes[peer.name] = _Node(peer, before)
        if (timer := self._broken.pop(peer.name, None)) is not None:
            timer.cancel()
        if self.daemon and before is None:
            peer.send(messages.DaemonAt(self.daemon))
        if self.ending is not None:
            peer.send(_bye(self.ending))

    def gone(self, peer: PeerConnection) -> None:
        """See `Listener`."""
        self._subscribers.discard(peer)
        node = self._nodes.get(peer.name)
        if peer.role != "agent" or node is None:
            return
        if node.before is not None and node.before.peer is peer:
            node.before = None
        elif node.peer is peer and node.before is not None:
            self._nodes[peer.name] = node.before
        elif node.peer is peer:
            del self._nodes[peer.name]
            self._broken[peer.name] = self._loop.call_later(_BACK_S, self._lost, peer.name)
            self._believe()

    def _believe(self) -> None:
        """Take a broken connection for a lost node if something failed elsewhere just now.

        A launcher that reconnects breaks no collective: there is nothing to wait for.
        """
        for name in [name for name in self._broken if self.machine.explains(name)]:
            self._lost(name)

    def _lost(self, name: str) -> None:
        self._broken.pop(name).cancel()
        if name in self.machine.nodes and self.machine.nodes[name].up:
            self.put(messages.NodeLost(node=name))

    def received(self, peer: PeerConnection, message: Any) -> None:
        """See `Listener`."""
        if peer.role == "agent":
            node = self._nodes.get(peer.name)
            # Behind its goodbye a launcher beats once more: it would be waited for until silent.
            if node is not None and node.peer is peer and not node.left:
                self._of_node(node, message)
        else:
            self._of_operator(peer, message)

    def _of_node(
        self,
        node: _Node,
        message: messages.Beat | messages.Envelope | messages.Hosting | messages.Timed,
    ) -> None:
        name = node.peer.name
        self._check_generation(message)
        if isinstance(message, messages.Beat):
            if message.up.node != name:
                raise _not_its_own(name, message.up.node)
            self._beat(node, message)
        elif isinstance(message, messages.Envelope):
            if getattr(message.event, "node", name) != name:
                raise _not_its_own(name, getattr(message.event, "node", ""))
            node.left |= isinstance(message.event, messages.Left)
            self.put(message.event, lambda: self._acknowledge(node, message.number))
        elif isinstance(message, messages.Hosting):
            self._hosting(name, messages.StoreAt(message.generation, message.host, message.port))
        else:
            self._history.timed(message)

    def _check_generation(
        self, message: messages.Beat | messages.Envelope | messages.Hosting | messages.Timed
    ) -> None:
        """Refuse what would use up the numbers of generations."""
        if isinstance(message, messages.Beat):
            claimed = max(message.up.fenced, message.up.running)
        elif isinstance(message, messages.Envelope):
            claimed = getattr(message.event, "generation", 0)
        else:
            claimed = message.generation
        most = self.machine.generation + _MOST_AHEAD
        if claimed > most:
            raise RefusedError(
                "a node reported an impossible generation",
                wanted=f"at most {most}",
                found=str(claimed),
            )

    def _beat(self, node: _Node, beat: messages.Beat) -> None:
        # Before it is looked at: a lease must not end because the log is slow.
        name = node.peer.name
        if node.before is not None and not self._follows(node, beat.up, node.before):
            return
        nodes = self.machine.nodes
        known = nodes[name] if name in nodes else None  # noqa: SIM401 - a roster is no dict
        lease_s = self._lease_s if self.machine.may_renew(name) else 0.0
        node.peer.send(
            messages.LeaseRenewal(number=beat.number, heard=node.received, lease_s=lease_s)
        )
        if known is not None and node.up == beat.up and known.up and known.life == beat.up.life:
            # Nothing is new but the moment, and this is what a large job sends most of.
            known.seen = max(known.seen, time.monotonic())
            return
        if node.queued == beat.up:
            # While the log is slow, nothing is decided, and beats must not pile up.
            return
        if node.up is None:
            self._tell_store(node, beat.up.running)
        node.up = node.queued = beat.up
        self.put(beat.up, lambda: self._has_taken(node, beat.up))

    def _follows(self, node: _Node, up: messages.NodeUp, before: _Node) -> bool:
        """Return whether a launcher takes over a name; it is refused while another one has it.

        If each cut the other one off, neither could train. One that has just been started may wait;
        one that knows of a generation was taken for gone, and another one has its place.
        """
        name, node.before = node.peer.name, None
        theirs = before.up.life if before.up is not None else up.life
        known = self.machine.nodes[name]
        if theirs in (up.life, known.dismissed) or before.left or not known.up:
            before.peer.cut()
            if self.daemon:
                node.peer.send(messages.DaemonAt(self.daemon))
            return True
        text = f"another launcher, at {before.peer.where}, is node {name} of this job"
        self._nodes[name] = before
        ends = bool(up.running or up.fenced)
        node.peer.send(
            _bye(ControllerEnding("name-taken", text, 1)) if ends else messages.Taken(text=text)
        )
        node.peer.close()
        self._history.refused(f"{node.peer.where}: {text}")
        return False

    @staticmethod
    def _has_taken(node: _Node, up: messages.NodeUp) -> None:
        if node.queued is up:
            node.queued = None

    @staticmethod
    def _acknowledge(node: _Node, number: int) -> None:
        node.received = max(node.received, number)
        if node.left:  # its beats are not echoed any more, and it waits for this before it ends
            node.peer.send(messages.LeaseRenewal(number=0, heard=node.received))

    def _hosting(self, name: str, store: messages.StoreAt) -> None:
        """Tell all members where the job store is; nodes that begin later hear it then."""
        record = self.machine.record
        if record is None or (record.generation, record.members[0].node) != (
            store.generation,
            name,
        ):
            return  # it is of an older generation, or of a node that was not asked for one
        self._store = store
        for member in record.nodes:
            node = self._nodes.get(member)
            if node is not None:
                self._tell_store(node, node.begun or (node.up.running if node.up else 0))

    def _tell_store(self, node: _Node, generation: int) -> None:
        """Tell a node of a generation's job store; its last connection may have broken before."""
        if self._store is not None and self._store.generation == generation:
            node.peer.send(self._store)

    def _of_operator(
        self,
        peer: PeerConnection,
        message: messages.Ask | messages.Subscribe | messages.OperatorCommand | messages.Announce,
    ) -> None:
        if isinstance(message, messages.OperatorCommand):
            self._do(peer, message)
            return
        if isinstance(message, messages.Announce):
            self._announce(peer, message)
            return
        if isinstance(message, messages.Subscribe):
            self._subscribers.add(peer)
        peer.send(msgspec.structs.replace(self._status(), number=message.number))

    def _announce(self, peer: PeerConnection, said: messages.Announce) -> None:
        """Tell nodes where the daemon is, unless they could not reach it."""
        if _is_local(said.url) and not _is_local(f"//{self._status().address}"):
            text = f"{said.url} is reached from its own machine alone: nodes do not get its address"
            peer.send(messages.Answer(number=said.number, ok=False, kind="refused", text=text))
            return
        if said.url != self.daemon:
            self.daemon, self._dirty = said.url, True
            self._history.tell(f"the daemon is at {said.url}")
            for node in self._nodes.values():
                node.peer.send(messages.DaemonAt(said.url))
        peer.send(messages.Answer(number=said.number, ok=True))

    def _do(self, peer: PeerConnection, do: messages.OperatorCommand) -> None:
        number = do.number
        try:
            if self.ending is not None:
                raise RefusedError("the job has ended", found=self.ending.text)
            self._check(do.event)
        except CkptdError as error:
            peer.send(
                messages.Answer(number=number, ok=False, kind=error.kind, text=str(error)[:4000])
            )
            return
        self._history.tell(f"{peer.name}: {_words(do.event)}")
        self.put(do.event, lambda: peer.send(messages.Answer(number=number, ok=True)))

    def _check(self, event: messages.JobEvent) -> None:
        named: tuple[str, ...] = getattr(event, "nodes", None) or ()
        kinds = (messages.OrderKind.EXCLUDE, messages.OrderKind.DRAIN, messages.OrderKind.ADD)
        if isinstance(event, messages.Order) and event.kind in kinds and not named:
            raise RefusedError(f"no nodes given to {event.kind}", wanted="names of nodes")
        known = {node.name for node in self.machine.nodes if node.life}
        if (record := self.machine.record) is not None:
            known |= record.nodes | {*record.out, *(name for name, _ in record.resting)}
        strangers = sorted({*named, *([event.node] if hasattr(event, "node") else [])} - known)
        if strangers:
            raise RefusedError(
                f"unknown node: {', '.join(strangers)}",
                wanted=", ".join(sorted(known)[:20]) or "a node; none has come yet",
                found=", ".join(strangers[:20]),
            )

    # --- the one order ----------------------------------------------------------------------------

    def put(self, event: messages.JobEvent, after: Callable[[], None] | None = None) -> None:
        """Queue an event; `after` is called once it was handled and all was carried out."""
        self._events.append((event, after))
        self._awake.set()

    async def run(self) -> ControllerEnding:
        """Handle events until the job, or the rule of this controller, has ended.

        Raises
        ------
        ConflictError
            Another controller has decided; this one has said nothing since.
        StoreError
            The log, or the seat, could not be written for too long.
        RefusedError
            The machine refuses to decide anything; see `ckptd.elastic.messages.Refuse`.
        """
        pusher = self._loop.create_task(self._push())
        ticked = -1.0
        try:
            while self.ending is None:
                now = self._loop.time()
                if now - ticked >= _TICK_S or not self._events:
                    away = now - ticked if 0 <= ticked < now - _AWAY_S else 0.0
                    ticked = now
                    await self._handle(messages.Tick(away=away, stopped=self._stopped()))
                while self._events and self.ending is None:
                    event, after = self._events.popleft()
                    await self._handle(event)
                    if after is not None:
                        after()
                    if self._loop.time() - ticked >= _TICK_S:
                        break
                await self._pause(_TICK_S)
            return self.ending
        finally:
            pusher.cancel()

    def _stopped(self) -> frozenset[str]:
        """Return the nodes whose launcher is on this machine, and stopped."""
        ups = (node.up for node in self._nodes.values() if node.peer.here)
        return frozenset(up.node for up in ups if up and up.pid and is_stopped(up.pid))

    async def _pause(self, seconds: float) -> None:
        """Wait for an event, and let peers be heard in any case."""
        if self._events:
            await asyncio.sleep(0)
            return
        self._awake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._awake.wait()
        except TimeoutError:
            return

    async def _handle(self, event: messages.JobEvent) -> None:
        if isinstance(event, messages.NodeLost) and event.node in self._nodes:
            return  # it was back before this was looked at
        before = (self.machine.state, self.machine.generation, self.machine.step)
        actions = self.machine.handle(event, time.monotonic())
        if self.machine.step > before[2]:
            self._history.committed(self.machine.step, time.monotonic())
        self._history.moved(self.machine.moves())
        self._believe()
        if not isinstance(event, messages.Tick) or actions:
            self._dirty = True
        for action in actions:
            await self._carry(action)
        if before != (self.machine.state, self.machine.generation, self.machine.step):
            self._dirty = True
        if isinstance(event, messages.Left):
            # Its name may be on another connection already, of a launcher that was restarted.
            node = self._nodes.get(event.node)
            if node is not None and node.left:
                del self._nodes[event.node]

    async def _carry(self, action: messages.Action) -> None:
        if isinstance(action, messages.Append):
            if self._check_others is not None:
                await self._check_others()
            await self._appender.append(action.record)
        elif isinstance(action, messages.Fence):
            self._fence(action)
        elif isinstance(action, messages.Reseat):
            await self._reseat()
            self.put(messages.Reseated(generation=action.generation))
        elif isinstance(action, messages.Start):
            self._start(action)
        elif isinstance(action, messages.SaveNow):
            self._save(action)
        elif isinstance(action, messages.Relaunch):
            # Operators that start launchers, a plug-in's supervisor, see it in the status.
            self.relaunch = (self.machine.generation, action)
            self._history.tell(f"restarting launchers: {', '.join(action.nodes)}")
            self._send_status()
        elif isinstance(action, messages.Tell):
            self._history.tell(action.text)
            for name in (action.nodes or tuple(self._nodes)) if action.aloud else ():
                if (node := self._nodes.get(name)) is not None:
                    node.peer.send(action)
        elif isinstance(action, messages.Finish | messages.Abort):
            # A controller that another one has followed must not end the job.
            await self._appender.check()
            self._end(_ending(action))
        elif isinstance(action, messages.Refuse):
            raise RefusedError(
                "the membership log lacks generations that nodes have reported",
                found=action.text,
                hint="start the controller with the job's log: --log",
            )

    # --- messages to nodes ------------------------------------------------------------------------

    def _fence(self, fence: messages.Fence) -> None:
        for name in fence.nodes:
            node = self._nodes.get(name)
            if node is not None and node.fenced < (fence.generation, fence.level):
                node.fenced = (fence.generation, fence.level)
                node.peer.send(messages.FenceNow(generation=fence.generation, level=fence.level))

    def _start(self, start: messages.Start) -> None:
        if self._parts is None or self._parts.generation != start.record.generation:
            self._parts = Parts(start.record)
        mttr, mtbf = self._history.mttr_s, self._history.mtbf_s(time.monotonic())
        for name in start.nodes or self._parts.nodes:
            node = self._nodes.get(name)
            if node is None or node.begun >= start.record.generation:
                continue
            begin = self._parts.begin(name, start.level, mttr, mtbf)
            if begin is not None:
                node.begun = begin.generation
                self._tell_begin(node, begin)

    def _tell_begin(self, node: _Node, begin: messages.Begin) -> None:
        node.peer.send(begin)
        self._tell_store(node, begin.generation)

    def _save(self, save: messages.SaveNow) -> None:
        record = self.machine.record
        for name in record.nodes if record is not None else ():
            node = self._nodes.get(name)
            if node is not None:
                node.peer.send(messages.SaveNow(generation=save.generation))

    def _end(self, ending: ControllerEnding) -> None:
        self.ending = ending
        self._history.tell(ending.text)
        for node in self._nodes.values():
            node.peer.send(_bye(ending))
            if node.before is not None:
                node.before.peer.send(_bye(ending))
        self._send_status()

    # --- messages to operators --------------------------------------------------------------------

    async def _push(self) -> None:
        """Tell subscribers of changes, and once in a while that nothing has changed."""
        pushed = self._loop.time()
        while True:
            await asyncio.sleep(_PUSH_S)
            now = self._loop.time()
            if self._subscribers and (self._dirty or now - pushed >= _PUSH_AT_LEAST_S):
                pushed, self._dirty = now, False
                self._send_status()

    def _send_status(self) -> None:
        if not self._subscribers:
            return
        body = msgspec.msgpack.encode(self._status())
        if len(body) > MOST_FRAME_BYTES:
            # Of more nodes than a person can look at; only an operator's view loses something.
            self._history.tell("the status is too large to be sent to operators")
            for peer in list(self._subscribers):
                peer.cut()
            self._subscribers.clear()
            return
        for peer in list(self._subscribers):
            peer.send_body(body)


def _ending(action: messages.Finish | messages.Abort) -> ControllerEnding:
    if isinstance(action, messages.Abort):
        return ControllerEnding(
            action.kind, action.text, messages.exit_code(action.kind, action.code)
        )
    return ControllerEnding("done", "all workers have finished successfully", 0)


def _bye(ending: ControllerEnding) -> messages.Shutdown:
    return messages.Shutdown(kind=ending.kind, text=ending.text[:2000], code=ending.code)


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return True  # no address at all


def _not_its_own(name: str, said: str) -> RefusedError:
    return RefusedError(
        "a node sent a message in the name of another node", wanted=name, found=said[:256]
    )


def _words(event: messages.JobEvent) -> str:
    if isinstance(event, messages.Order):
        return " ".join([str(event.kind), *event.nodes, event.reason]).strip()
    reason: str = getattr(event, "reason", "")
    return f"{type(event).__name__}: {reason}"
