"""`OperatorLink`: a person's or the daemon's connection to the controller; waits and silence.

In it: errors and hints where no controller answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ckptd.base.closing import Closing
from ckptd.base.net.connection import Connection
from ckptd.decoding import msgpack_decoder
from ckptd.elastic import messages
from ckptd.elastic.dial import PURPOSE, await_greeting, dial
from ckptd.errors import CkptdError, NotFoundError

_DIAL_S = 2.0
_TO_OPERATOR = msgpack_decoder(messages.ToOperator)
_PAUSE_S = 0.2
_SILENCE_S = 10.0


class OperatorLink(Closing):
    """Asks and orders; each call reconnects where the connection broke. Any thread may call it.

    Parameters
    ----------
    addresses
        Returns where the controller is now, ``HOST:PORT``; empty if that is not known. Called
        before each attempt to connect.
    job, secret
        Name of the job and its secret, see `ckptd.base.net.signing.job_secret`.
    name
        Name of the operator, for the controller's records.
    timeout_s
        For one call; within it attempts are repeated, since a controller may be on its way back.
    """

    def __init__(
        self,
        addresses: Callable[[], str],
        job: str,
        secret: bytes,
        *,
        name: str = "operator",
        timeout_s: float = 10.0,
    ) -> None:
        self._addresses, self._job, self._secret = addresses, job, secret
        self._name, self._timeout_s = name, timeout_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._number = 0

    def status(self) -> messages.Status:
        """Return what the controller knows now.

        Raises
        ------
        NotFoundError
            None answers in time.
        """
        answer = self._call(lambda number: messages.Ask(number=number))
        if not isinstance(answer, messages.Status):
            raise self._nobody(answer)
        return answer

    def order(self, event: messages.DoneEvent) -> messages.Answer:
        """Hand over an order, nodes that the monitor suspects, or one that will be taken away.

        Returned is what became of it. With ``ok`` the controller has taken it in; what follows from
        it shows in the status. If the connection breaks after it was sent, it is not sent again.

        Raises
        ------
        NotFoundError
            None answers in time; it may have arrived.
        """
        answer = self._call(
            lambda number: messages.OperatorCommand(number=number, event=event), once=True
        )
        if not isinstance(answer, messages.Answer):
            raise self._nobody(answer)
        return answer

    def statuses(self) -> Iterator[messages.Status]:
        """Yield the status, and again after changes, on a connection of its own.

        It outlives restarts of the controller.

        Raises
        ------
        NotFoundError
            None answered for `timeout_s`. The iterator has ended then.
        """
        received_at = time.monotonic()
        while True:
            problem: Exception | None = None
            try:
                for status in self.subscribed():
                    if status is not None:
                        received_at = time.monotonic()
                        yield status
                        received_at = time.monotonic()
            except (OSError, CkptdError) as error:
                problem = error
            if time.monotonic() - received_at > self._timeout_s:
                raise self._nobody(problem) from problem
            time.sleep(_PAUSE_S)

    def subscribed(
        self, url: str = "", turn_s: float = 1.0
    ) -> Generator[messages.Status | None, None, None]:
        """Yield what one connection brings until it is silent, and None after each `turn_s`.

        Parameters
        ----------
        url
            Announced to the controller as that of the job's daemon, unless it is empty.

        Raises
        ------
        OSError, CkptdError
            It cannot be made, or breaks.
        """
        connection = self._dial(_DIAL_S)
        try:
            if url:
                connection.send(messages.Announce(number=2, url=url))
            connection.send(messages.Subscribe(number=1))
            last = time.monotonic()
            while time.monotonic() - last < _SILENCE_S:
                for message in connection.take(_TO_OPERATOR, turn_s):
                    last = time.monotonic()
                    if isinstance(message, messages.Status):
                        yield message
                yield None
        finally:
            connection.release()

    def greet(self, address: str, timeout_s: float) -> None:
        """Return once what is at `address` has proved to be the job's controller.

        See `ckptd.elastic.dial.await_greeting`.
        """
        from ckptd.base.net.tls import identity_at

        own = identity_at(PURPOSE, self._secret, "operator", self._name, self._job)
        await_greeting(address, timeout_s, own)

    def close(self) -> None:
        """Close the connection. Idempotent; a later call connects again."""
        with self._lock:
            self._disconnect()

    # --- inside -----------------------------------------------------------------------------------

    def _call(
        self,
        request: Callable[[int], messages.Ask | messages.OperatorCommand],
        *,
        once: bool = False,
    ) -> Any:
        end = time.monotonic() + self._timeout_s
        with self._lock:
            while True:
                sent = False
                try:
                    connection = self._connected(end)
                    self._number += 1
                    message = request(self._number)
                    sent = True
                    connection.send(message)
                    return self._answer(connection, self._number, end)
                except (OSError, CkptdError) as error:
                    self._disconnect()
                    gone = time.monotonic() + _PAUSE_S >= end
                    if gone or (sent and once):
                        raise self._nobody(error) from error
                time.sleep(_PAUSE_S)

    def _connected(self, end: float) -> Connection:
        if self._connection is None:
            self._connection = self._dial(min(_DIAL_S, max(end - time.monotonic(), 0.1)))
        else:
            # What the controller has closed meanwhile must be noticed before an order is sent.
            self._connection.take(_TO_OPERATOR, 0.0)
        return self._connection

    def _dial(self, timeout_s: float) -> Connection:
        return dial(
            self._addresses(),
            job=self._job,
            role="operator",
            name=self._name,
            secret=self._secret,
            timeout_s=timeout_s,
        )[0]

    def _answer(
        self, connection: Connection, number: int, end: float
    ) -> messages.Status | messages.Answer:
        while (left := end - time.monotonic()) > 0:
            for message in connection.take(_TO_OPERATOR, left):
                if (
                    isinstance(message, messages.Status | messages.Answer)
                    and message.number == number
                ):
                    return message
        raise TimeoutError("the controller does not answer")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

    def _nobody(self, found: object) -> NotFoundError:
        address = ""
        with contextlib.suppress(OSError, CkptdError):
            address = self._addresses()
        return NotFoundError(
            "no controller answers",
            where=address or f"job {self._job}",
            found=str(found)[:300],
            hint="has the job ended? if it runs, set CKPTD_SECRET as in the job; "
            "--controller HOST:PORT names a controller, ckptd controller starts one",
        )
