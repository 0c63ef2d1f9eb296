"""Daemon's connection to the job's controller: statuses in, orders of the page out.

In it: times of connecting, silence and answers; how many nodes and which reason an order may have.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ckptd.decoding import converter
from ckptd.elastic.messages import Answer, Order, OrderKind, Status, Suspected
from ckptd.elastic.operator import OperatorLink
from ckptd.errors import CkptdError, UsageError

_TURN_S = 0.25
_PAUSE_S = 0.3
_ANSWER_S = 10.0
_END_S = 5.0
_MOST_NODES, _MOST_REASON = 4096, 500


class ControllerLink:
    """Follows the job's controller in a thread of its own, and reconnects until it is closed.

    Parameters
    ----------
    addresses
        Returns where the controller is now, ``HOST:PORT``; empty if that is not known. Called
        before each attempt to connect.
    job, secret
        Name of the job, and its secret.
    on_status
        Called in the link's thread with each status, and with None when the connection breaks.
    url
        Of this daemon, as nodes reach it, announced on each connection; empty: it is not announced.

    Attributes
    ----------
    status
        The newest; None before the first.
    connected
        Whether a controller is connected now.
    """

    def __init__(
        self,
        addresses: Callable[[], str],
        job: str,
        secret: bytes,
        on_status: Callable[[Status | None], None],
        url: str = "",
    ) -> None:
        self._job, self._on_status, self._url = job, on_status, url
        self._calls = OperatorLink(addresses, job, secret, name="daemon", timeout_s=_ANSWER_S)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self.status: Status | None = None
        self.connected = False

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self) -> None:
        """End; a connection at hand is closed."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_END_S)
        self._calls.close()

    # --- orders -----------------------------------------------------------------------------------

    def order(self, order: Order | Suspected) -> Answer:
        """Send an order, or suspected nodes; return the answer. Any thread may call it, and waits.

        Raises
        ------
        NotFoundError
            No answer came in time; the order may have arrived.
        """
        return self._calls.order(order)

    # --- statuses ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError, CkptdError):
                # The next attempt is the answer to whatever is wrong with this connection.
                self._follow()
            if self.connected:
                self.connected = False
                self._on_status(None)
            self._ended.wait(_PAUSE_S)

    def _follow(self) -> None:
        with contextlib.closing(self._calls.subscribed(self._url, _TURN_S)) as statuses:
            for status in statuses:
                if status is not None and status.job == self._job:
                    self.status, self.connected = status, True
                    self._on_status(status)
                if self._ended.is_set():
                    return


# --- orders of people -----------------------------------------------------------------------------


class OrderBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /elastic/orders.

    Attributes
    ----------
    kind
        ``restart``, ``exclude``, ``add``, ``drain``, ``pause``, ``resume`` or ``stop``.
    nodes
        Names; of ``exclude``, ``add`` and ``drain`` one at least.
    reason
        For the membership log, in a few words.
    """

    kind: str
    nodes: tuple[str, ...] = ()
    reason: str = ""


_order_body = converter(OrderBody)


_OF_NODES = frozenset({OrderKind.EXCLUDE, OrderKind.ADD, OrderKind.DRAIN})


def order_of(body: dict[str, Any]) -> Order:
    """Return the order in the body of a request.

    Raises
    ------
    UsageError
        It is not an order.
    """
    try:
        asked = _order_body(body)
        kind = OrderKind(asked.kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise _bad("kind, nodes and reason of an order", str(error)) from error
    if len(asked.nodes) > _MOST_NODES or not all(0 < len(n) <= 256 for n in asked.nodes):
        raise _bad(f"names of at most {_MOST_NODES} nodes", f"{len(asked.nodes)} of them")
    if (kind in _OF_NODES) != bool(asked.nodes):
        found = ", ".join(asked.nodes) or "no node"
        raise _bad(f"{kind} {'with' if kind in _OF_NODES else 'without'} nodes", found)
    if len(asked.reason) > _MOST_REASON:
        raise _bad(f"a reason of at most {_MOST_REASON} characters", str(len(asked.reason)))
    return Order(kind=kind, nodes=asked.nodes, reason=asked.reason)


def _bad(wanted: str, found: str) -> UsageError:
    return UsageError(
        "the body is not an order", where="the body", wanted=wanted, found=found[:200]
    )
