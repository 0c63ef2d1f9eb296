"""Addresses: ``ckptd://host:port`` and ``ckptd+unix:///path``, to connect to and to listen at."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from ckptd.errors import StoreError, TransientStoreError, UsageError

__all__ = ["Address", "parse_address", "same_user"]

_MOST_PATH_BYTES = 107
_WAITING = 128
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def local(self) -> bool:
        """Whether it is a Unix socket."""
        return bool(self.path)

    @property
    def url(self) -> str:
        """The address as a URL."""
        if self.path:
            return f"ckptd+unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"ckptd://{host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """Return a connected socket.

        Raises
        ------
        TransientStoreError
            Kind ``link-lost``: nobody listens there. Kind ``link-late``: no answer in time.
        """
        try:
            if not self.path:
                return socket.create_connection((self.host, self.port), timeout=timeout_s)
            sock = socket.socket(socket.AF_UNIX)
            with _closed_on_error(sock):
                sock.settimeout(timeout_s)
                sock.connect(self.path)
            return sock
        except TimeoutError:
            raise TransientStoreError(
                "the store's server does not answer",
                kind="link-late",
                where=self.url,
                wanted=f"a connection within {timeout_s:g} s",
            ) from None
        except OSError as error:
            raise TransientStoreError(
                "the store's server cannot be reached",
                kind="link-lost",
                where=self.url,
                found=error.strerror or error,
                hint="see whether it runs, and under this address",
            ) from error

    def listen(self) -> tuple[socket.socket, Address]:
        """Return a listening socket and its address, with the port that it got.

        A Unix socket is open to its owner only, and replaces what a server that died left behind.

        Raises
        ------
        StoreError
            The address is taken, or cannot be had.
        """
        try:
            if self.path:
                return _listen_unix(self.path), self
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            sock = socket.create_server((self.host, self.port), family=family, backlog=_WAITING)
            return sock, Address(self.host, sock.getsockname()[1])
        except OSError as error:
            found = error.strerror or error
            raise StoreError("cannot listen here", where=self.url, found=found) from error


def parse_address(url: str) -> Address:
    """Return the address that `url` names; `UsageError` of kind ``bad-url`` when it names none."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "ckptd+unix":
        if not rest.startswith("/") or "\0" in rest or len(os.fsencode(rest)) > _MOST_PATH_BYTES:
            wanted = f"ckptd+unix:///path of at most {_MOST_PATH_BYTES} bytes"
            raise UsageError("not a Unix socket's URL", kind="bad-url", where=url, wanted=wanted)
        return Address(path=rest)
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        plain = not (parts.query or parts.fragment or parts.username or parts.path.strip("/"))
        if parts.hostname and parts.port is not None and plain:
            return Address(parts.hostname, parts.port)
    wanted = "ckptd://host:port or ckptd+unix:///path"
    raise UsageError("not a store server's URL", kind="bad-url", where=url, wanted=wanted)


def same_user(sock: socket.socket) -> bool:
    """Tell whether the process at the other end of a Unix socket runs as our user."""
    # Where the kernel does not tell (not Linux), nobody is let in.
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    with _closed_on_error(sock):
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left_over(path):
                raise
            os.unlink(path)
            sock.bind(path)
        os.chmod(path, 0o600)  # before anybody can connect
        sock.listen(_WAITING)
    return sock


def _is_left_over(path: str) -> bool:
    """Tell whether `path` is a socket at which nobody listens."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(path) == errno.ECONNREFUSED


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise
