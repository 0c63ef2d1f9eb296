"""A launcher's connection to the controller: reconnects, repeats events, sends heartbeats.

In it: how long a connection attempt may take; pauses between them; hints when it is refused.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable

from ckptd.base.net.connection import Connection
from ckptd.base.net.signing import SECRET_VARIABLE, secret_path
from ckptd.base.runtime.agentlink import run_folder
from ckptd.decoding import msgpack_decoder
from ckptd.elastic import messages
from ckptd.elastic.dial import PURPOSE, await_greeting, dial
from ckptd.errors import CkptdError, RefusedError

_DIAL_S = 2.0
_SEND_S = 2.0
_TO_NODE = msgpack_decoder(messages.ToNode)
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 1.0
_NEEDED = {
    "not-the-controller": "the same job name and address of the controller (--job or --rdzv-id,"
    " --rdzv-endpoint), and two jobs never the same port",
    "name-taken": "different names (--node, CKPTD_NODE); this one waits until that one has ended",
}
"""By the kind of a refusal; of any other, a secret that all have."""


class NodeLink:
    """A node's connection to the controller, in a thread of its own.

    It beats, and reconnects when the connection breaks or beats are not echoed; the controller may
    have moved meanwhile. Events of the newest generation are sent again on each
    new connection, before the first beat: a controller that was restarted knows it then as well.

    Parameters
    ----------
    addresses
        Returns where the controller is now, ``HOST:PORT``; empty if that is not known. Called
        before each attempt to connect.
    job, secret
        Name of the job and its secret, see `ckptd.base.net.signing.job_secret`.
    up
        Returns what the node is now; called before each beat.
    orders
        Receives what the controller wants, except `LeaseRenewal` and `Taken`, in this order; it
        must return soon. An order may come twice. `Shutdown` is the last order: the link ends.
    beat_s
        Between two beats.
    lease_s
        How long workers may go on without a controller, until one sets it.
    leased
        Is given each new `lease_until`, at once.
    seated
        Returns whether the life of a controller, the last that was connected, is still the one that
        was seated last; asked while there is no connection. Where it is, no other controller can
        have begun a generation, and the lease is renewed without a controller: see
        `ckptd.elastic.leader.LeaderRecord.still`.
    """

    def __init__(
        self,
        addresses: Callable[[], str],
        job: str,
        secret: bytes,
        up: Callable[[], messages.NodeUp],
        orders: Callable[[messages.ToNode], None],
        *,
        beat_s: float = 0.5,
        lease_s: float = 120.0,
        leased: Callable[[float], None] | None = None,
        seated: Callable[[str], bool] | None = None,
    ) -> None:
        self._addresses, self._job, self._secret = addresses, job, secret
        self._up, self._orders = up, orders
        self._leased, self._seated = leased, seated
        self._given = bool(os.environ.get(SECRET_VARIABLE))
        self._life = self._spoken_to = ""
        self._beat_s, self._lease_s = beat_s, lease_s
        self._lock = threading.Lock()
        self._kept: dict[
            tuple[str, int], messages.Envelope | messages.Hosting | messages.Timed
        ] = {}
        """Messages that are sent again, by type and generation, in its order."""
        self._unsent: list[messages.Envelope | messages.Hosting | messages.Timed] = []
        self._numbers = self._acknowledged = self._beats = 0
        self._sent_at: dict[int, float] = {}
        self._lease_until = 0.0
        self._echoed_at = time.monotonic()
        self._connection: Connection | None = None
        self._here = ""
        self._answered = False
        self._error: Exception | None = None
        """Why no controller is connected."""
        self._reported = ""
        """The refusal that `new_refusal` returned last."""
        self._closing = False
        self._ended = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="ckptd-node-link", daemon=True)

    # --- of other threads -------------------------------------------------------------------------

    def start(self) -> NodeLink:
        """Begin to connect; return this link."""
        self._thread.start()
        return self

    def tell(self, event: messages.SaidEvent | messages.Hosting | messages.Timed) -> None:
        """Tell the controller; returns at once.

        It is repeated after each reconnect until a later generation is fenced or begun. Of one type
        and generation only the newest counts.
        """
        with self._lock:
            said: messages.Envelope | messages.Hosting | messages.Timed
            if isinstance(event, messages.Hosting | messages.Timed):
                said = event
            else:
                self._numbers += 1
                said = messages.Envelope(event=event, number=self._numbers)
            key = (type(event).__name__, getattr(event, "generation", -1))
            self._kept.pop(key, None)
            self._kept[key] = said
            self._unsent.append(said)
        self.hurry()

    def hurry(self) -> None:
        """Beat at once: what `up` returns has changed."""
        with contextlib.suppress(OSError):  # as full as it can be, or the link has ended
            self._wake_out.send(b"x")

    @property
    def lease_until(self) -> float:
        """Seconds of ``CLOCK_MONOTONIC`` until which workers may go on; 0.0 before any echo."""
        return self._lease_until

    @property
    def silent_s(self) -> float:
        """Seconds since a controller last answered, or since the link was made."""
        return time.monotonic() - self._echoed_at

    @property
    def absent_s(self) -> float:
        """Seconds for which the job may have no controller: `silent_s`, or 0.0 while one refuses.

        A node that is refused must not start a second controller beside that of the others.
        """
        return 0.0 if self._refuses else self.silent_s

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._connection is not None

    @property
    def here(self) -> str:
        """Address of this machine towards the controller's; empty before the first connection."""
        return self._here

    @property
    def answered(self) -> bool:
        """Whether a controller ever answered."""
        return self._answered

    @property
    def problem(self) -> str:
        """Why no controller is connected, for people; empty while one is."""
        return "" if self._error is None else str(self._error)

    def greet(self, address: str, timeout_s: float) -> None:
        """Return once the controller at `address` has answered, see `await_greeting`.

        Once one has answered this node, its secret is known to be right, and what does not prove
        itself by that is none. Before, anything counts: a node with another secret must not start
        one beside that of all others.
        """
        from ckptd.base.net.tls import identity_at

        node = self._up().node
        own = identity_at(PURPOSE, self._secret, "agent", node, self._job)
        await_greeting(address, timeout_s, own if self._answered else None)

    def new_refusal(self) -> str:
        """Return, for people, why a controller refuses this node; empty if it was returned."""
        error = self._error
        refusal = _refusal(error)
        if not refusal or str(error) == self._reported:
            return ""
        self._reported = str(error)
        text = f"the controller refuses node {self._up().node}, which tries again: {error}"
        if isinstance(error, CkptdError) and error.hint:
            return text
        need = _NEEDED.get(refusal)
        if need is None:
            used = f"not set, and that of {secret_path(self._job, run_folder())} is used"
            need = f"the same {SECRET_VARIABLE}; here it is "
            need += "set" if self._given else used
        return f"{text}\nall nodes of job {self._job} need {need}"

    @property
    def there(self) -> bool:
        """Whether the job has a controller: one that this node is connected to, or refused by."""
        return self.connected or self._refuses

    @property
    def _refuses(self) -> bool:
        # Until an echo: a node is connected for a moment each time before it is refused. Anybody
        # can refuse so, and a node that was answered before knows that its secret is right.
        by_any = ("", "not-the-controller", *(("permission",) if self._answered else ()))
        return _refusal(self._error) not in by_any

    @property
    def alive(self) -> bool:
        """Whether it still works: false after `Shutdown`, `close`, or a failure of a callback.

        A callback's exception ends the link and is reported through `threading.excepthook`.
        """
        return self._thread.is_alive()

    def close(self, wait_s: float = 1.0) -> None:
        """Stop; events have `wait_s` to be acknowledged. Idempotent."""
        end = time.monotonic() + wait_s
        while self._thread.is_alive() and time.monotonic() < end and not self._all_acknowledged():
            time.sleep(0.01)
        self._closing = True
        self.hurry()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_DIAL_S + _SEND_S + 1.0)

    def _all_acknowledged(self) -> bool:
        with self._lock:
            return not self._unsent and self._acknowledged >= self._numbers

    # --- of its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        try:
            while not self._over():
                began = time.monotonic()
                try:
                    self._once()
                except (OSError, CkptdError) as error:
                    # Whatever is wrong with this connection, another attempt is the answer: the
                    # lease ends what no controller can be reached for.
                    self._error = error
                if time.monotonic() - began > _LAST_PAUSE_S:
                    pause = _FIRST_PAUSE_S
                if not self._over():
                    self._sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LAST_PAUSE_S)
        finally:
            self._disconnect()
            self._wake_out.close()
            self._wake_in.close()

    def _over(self) -> bool:
        return self._closing or self._ended

    def _once(self) -> None:
        """Connect, and serve the connection until it breaks."""
        self._renew_alone()
        connection, life = dial(
            self._addresses(),
            job=self._job,
            role="agent",
            name=self._up().node,
            secret=self._secret,
            timeout_s=_DIAL_S,
        )
        self._connection, self._here = connection, connection.here
        try:
            self._serve(connection, life)
        finally:
            self._disconnect()

    def _renew_alone(self) -> None:
        """Renew the lease while there is no controller, if no other one can have begun anything."""
        asked = time.monotonic()
        if self._life and self._seated is not None and self._seated(self._life):
            self._renew(asked + self._lease_s)

    def _serve(self, connection: Connection, life: str) -> None:
        opened, self._spoken_to = time.monotonic(), life
        with self._lock:
            self._unsent = list(self._kept.values())
        self._sent_at.clear()
        beat_at = 0.0
        silence = max(4 * self._beat_s, 2.0)
        while not self._over():
            self._send_unsent(connection)
            now = time.monotonic()
            if now >= beat_at:
                self._beat(connection, now)
                beat_at = now + self._beat_s
            if now - max(opened, self._echoed_at) > silence:
                raise TimeoutError("the controller does not renew the lease")
            woken = self._wait(connection, beat_at - now)
            if woken:
                beat_at = 0.0

    def _wait(self, connection: Connection, timeout_s: float) -> bool:
        """Receive for up to `timeout_s`; return whether an event here waits to be sent."""
        come = connection.readable()
        ready, _, _ = select.select(
            [connection.fileno(), self._wake_in.fileno()],
            [],
            [],
            0.0 if come else max(timeout_s, 0.0),
        )
        if come or connection.fileno() in ready:
            for message in connection.take(_TO_NODE, 0.0):
                self._take(message)
        if self._wake_in.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
            return True
        return False

    def _take(self, message: messages.ToNode) -> None:
        if self._ended:
            return
        if isinstance(message, messages.LeaseRenewal):
            self._echo(message)
            return
        if isinstance(message, messages.Taken):
            raise RefusedError(
                "the name of this node is already in use", kind="name-taken", found=message.text
            )
        if isinstance(message, messages.FenceNow | messages.Begin):
            self._pass(message.generation)
        self._ended = isinstance(message, messages.Shutdown)
        self._orders(message)

    def _echo(self, echo: messages.LeaseRenewal) -> None:
        with self._lock:
            self._acknowledged = max(self._acknowledged, echo.heard)
        sent = self._sent_at.pop(echo.number, None)
        if sent is None:
            return
        self._echoed_at, self._answered = time.monotonic(), True
        self._error = None
        # From the sending: a node that was stopped in between must not think itself alive.
        if echo.lease_s > 0:
            self._lease_s = echo.lease_s
            self._life = self._spoken_to
            self._renew(sent + self._lease_s)

    def _renew(self, until: float) -> None:
        if until > self._lease_until:
            self._lease_until = until
            if self._leased is not None:
                self._leased(until)

    def _pass(self, generation: int) -> None:
        """Forget what belongs to generations before this one."""
        with self._lock:
            self._kept = {
                key: said for key, said in self._kept.items() if not 0 <= key[1] < generation
            }

    def _send_unsent(self, connection: Connection) -> None:
        with self._lock:
            unsent, self._unsent = self._unsent, []
        for said in unsent:
            connection.send(said)

    def _beat(self, connection: Connection, now: float) -> None:
        self._beats += 1
        self._sent_at[self._beats] = now
        # Beats that an older one's echo has overtaken are not waited for any more.
        self._sent_at = {n: at for n, at in self._sent_at.items() if now - at < self._lease_s}
        connection.send(messages.Beat(number=self._beats, up=self._up()))

    def _sleep(self, seconds: float) -> None:
        ready, _, _ = select.select([self._wake_in], [], [], seconds)
        if ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()


def _refusal(error: Exception | None) -> str:
    """Return the kind of a controller's refusal; empty if it is none."""
    kind = error.kind if isinstance(error, CkptdError) else ""
    return kind if isinstance(error, RefusedError) or kind == "permission" else ""
