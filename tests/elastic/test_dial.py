"""Connections to addresses that no server can have."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckptd.base.net.tls import LEAF_S, Identity, _load, issue
from ckptd.base.net.tls import identity_at as identity
from ckptd.elastic.dial import await_greeting, dial
from ckptd.elastic.operator import OperatorLink
from ckptd.errors import CkptdError, NotFoundError, TransientStoreError
from tests.elastic.controlled import SECRET, controlled
from tests.processes import PATIENCE_S

NO_NAME = "a..b"


def test_a_name_that_cannot_be_is_an_address_where_nobody_answers() -> None:
    with pytest.raises(TransientStoreError, match=r"a\.\.b:9"):
        dial(
            f"{NO_NAME}:9",
            job="j",
            role="operator",
            name="o",
            secret=b"s" * 32,
            timeout_s=1.0,
        )
    with OperatorLink(lambda: f"{NO_NAME}:9", "j", b"s" * 32, timeout_s=0.0) as link:
        with pytest.raises(NotFoundError, match="no controller answers"):
            link.status()


STRANGERS = {
    "closes": b"",
    "says that it does not know us": bytes([21, 3, 3, 0, 2, 2, 48]),
    "turns away": bytes([21, 3, 3, 0, 2, 2, 120]),  # as web servers and proxies do
    "is no TLS": b"HTTP/1.1 200 OK\r\n\r\n",
}
"""What the first stranger at a controller's address says to all that come."""


@contextmanager
def stranger(says: str, job: str = "j") -> Iterator[str]:
    """A server that has not the job's secret, where a controller was; ``stalls`` says nothing."""
    end, role = threading.Event(), says.partition(" ")[2]
    context = None
    if says.startswith("shows"):
        # A certificate that anybody makes, or that a rank of the job has, and the job's own name.
        secret = b"s" * 32 if role == "controller" else SECRET.encode()
        one = Identity(secret, "rank" if role == "rank" else "controller", "n9", job)
        context = one.context(server=True)
        if role == "expired":
            leaf = issue(secret, "controller", "n9", time.time() - LEAF_S)[1]
            _load(context, leaf)
        if role == "another program":
            context.set_alpn_protocols([])
            _load(context, issue(b"s" * 32, "controller", "n9", time.time() + LEAF_S)[1])

    def meet(conn: socket.socket) -> None:
        with conn, suppress(OSError):
            if context is not None:
                with context.wrap_socket(conn, server_side=True) as tls:
                    tls.recv(1)
            elif says in STRANGERS:
                conn.recv(1 << 16)
                conn.sendall(STRANGERS[says])
            else:
                end.wait()

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=meet, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield "{}:{}".format(*listener.getsockname())
        finally:
            end.set()
            listener.shutdown(socket.SHUT_RDWR)


ALL = [*STRANGERS, "stalls", "shows controller", "shows rank", "shows expired"]


@pytest.mark.parametrize("says", ALL)
def test_who_cannot_prove_it_is_no_controller(says: str) -> None:
    own = identity("controller", SECRET.encode(), "agent", "n0", "j")
    with stranger(says) as address:
        with pytest.raises(CkptdError):
            await_greeting(address, 0.5, own)
        if says.startswith("shows"):
            await_greeting(address, PATIENCE_S)  # it may be any


def test_the_jobs_controller_proves_it(tmp_path: Path) -> None:
    with controlled(tmp_path) as controller:
        own = identity("controller", SECRET.encode(), "agent", "n0", "j")
        await_greeting(controller.address, PATIENCE_S, own)


def test_a_process_that_is_stopped_does_not_greet(tmp_path: Path) -> None:
    with controlled(tmp_path) as controller:
        await_greeting(controller.address, 30.0)
        assert controller.process is not None
        controller.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TransientStoreError) as caught:
            await_greeting(controller.address, 0.3)
        assert caught.value.kind == "link-late"
        controller.kill()
        with pytest.raises(TransientStoreError) as caught:
            await_greeting(controller.address, 0.3)
        assert caught.value.kind == "link-lost"
