"""Addresses (``HOST:PORT``, Unix sockets, URLs): parse, connect, listen, and errors of connecting.

In it: hints when nothing listens, a name does not resolve or time runs out; which host is this
machine; the backlog; the longest path of a socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from ckptd.errors import StoreError, TransientStoreError, UsageError

LOCALHOST = ("127.0.0.1", "::1", "localhost")
"""The name localhost and its addresses; a server at another loopback address is not among them."""
_MOST_PATH_BYTES = 107
_BACKLOG = 2048
_CREDENTIALS = struct.Struct("3i")
_HOST_PORT = re.compile(r"(?:\[([^\s\[\]]+)\]|([^\s\[\]]+?))(?::([0-9]{1,5}))?")


class Address(NamedTuple):
    """A host and a port, as `socket.create_connection` takes them; its text is ``HOST:PORT``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether it is a Unix socket."""
        return False

    @property
    def url(self) -> str:
        """The address as the URL of a store's server."""
        return f"ckptd://{self}"

    def connect(self, timeout_s: float, where: str = "") -> socket.socket:
        """Return a connected socket.

        Parameters
        ----------
        where
            What errors name; the address if left out.

        Raises
        ------
        TransientStoreError
            Kind ``link-lost``: nothing listens there. Kind ``link-late``: no answer in time.
        """
        with _not_reached(where or str(self), timeout_s):
            sock = socket.create_connection(self, timeout=timeout_s)
            with _closed_on_error(sock):
                if sock.getsockname() == sock.getpeername():
                    # Of a free port on this machine, TCP can connect a socket to itself.
                    raise ConnectionRefusedError("nothing listens there")
            return sock

    def listen(self) -> tuple[socket.socket, Address]:
        """Return a listening socket and its address, with the port that it got.

        Raises
        ------
        StoreError
            kind ``listen``: the address is taken, or is not this machine's.
        """
        sock = listen_at(self.host, self.port, "the store's server")
        return sock, Address(self.host, sock.getsockname()[1])


class UnixAddress(NamedTuple):
    """The path of a Unix socket."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def local(self) -> bool:
        """Whether it is a Unix socket."""
        return True

    @property
    def url(self) -> str:
        """The address as the URL of a store's server."""
        return f"ckptd+unix://{self.path}"

    def connect(self, timeout_s: float, where: str = "") -> socket.socket:
        """Return a connected socket; errors as of `Address.connect`."""
        with _not_reached(where or self.path, timeout_s):
            sock = socket.socket(socket.AF_UNIX)
            with _closed_on_error(sock):
                sock.settimeout(timeout_s)
                sock.connect(self.path)
            return sock

    def listen(self) -> tuple[socket.socket, UnixAddress]:
        """Return a listening socket and this address; errors as of `Address.listen`.

        The socket is open to its owner only, and replaces what a server that died left behind.
        """
        with _not_had("the store's server", self.path):
            sock = socket.socket(socket.AF_UNIX)
            with _closed_on_error(sock):
                try:
                    sock.bind(self.path)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or not _is_left_over(self.path):
                        raise
                    os.unlink(self.path)
                    sock.bind(self.path)
                os.chmod(self.path, 0o600)  # before anything can connect
                sock.listen(_BACKLOG)
            return sock, self


# --- texts ----------------------------------------------------------------------------------------


def parse_address(
    text: str,
    what: str = "an address of a controller",
    *,
    where: str | None = None,
    default_port: int | None = None,
    any_port: bool = False,
) -> Address:
    """Return host and port of ``HOST:PORT``; a host of IPv6 stands in brackets.

    Parameters
    ----------
    what, where
        For the error: what it should be, and which option gave it.
    default_port
        Of a text without one; None: it must have one.
    any_port
        Whether port 0 is one: any that is free.

    Raises
    ------
    UsageError
        It is no address.
    """
    match = _HOST_PORT.fullmatch(text.strip())
    port, least = -1, 0 if any_port else 1
    if match is not None:
        given = match[3] or default_port
        port = -1 if given is None else int(given)
    if match is None or not least <= port < 1 << 16:
        raise UsageError(
            f"not {what}",
            where=where,
            wanted="HOST:PORT" if default_port is None else "HOST or HOST:PORT",
            found=text[:200],
        )
    return Address(match[1] or match[2], port)


def parse_server(url: str) -> Address | UnixAddress:
    """Return where a store's server listens, of ``ckptd://HOST:PORT`` or ``ckptd+unix:///path``.

    Raises
    ------
    UsageError
        It is no such URL.
    """
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "ckptd+unix":
        if not rest.startswith("/") or "\0" in rest or len(os.fsencode(rest)) > _MOST_PATH_BYTES:
            wanted = f"ckptd+unix:///path of at most {_MOST_PATH_BYTES} bytes"
            raise UsageError("invalid URL of a Unix socket", where=url, wanted=wanted)
        return UnixAddress(rest)
    parts = _split(url)
    plain = not (parts.query or parts.fragment or parts.username or parts.path.strip("/"))
    if plain and parts.hostname and parts.port is not None:
        return Address(parts.hostname, parts.port)
    wanted = "ckptd://host:port or ckptd+unix:///path"
    raise UsageError("invalid URL of a store server", where=url, wanted=wanted)


def parse_http(url: str, what: str, *, where: str | None = None, bare: bool = False) -> SplitResult:
    """Return the parts of an ``http://`` or ``https://`` URL, whose port can be read.

    Parameters
    ----------
    what, where
        For the error: what it should be the URL of, and which option gave it.
    bare
        Whether it must name a server and nothing on it.

    Raises
    ------
    UsageError
        It is no such URL.
    """
    parts = _split(url)
    good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    # What is not printable ASCII cannot be put into a request.
    good = good and url.isascii() and url.isprintable() and " " not in url
    if not good or (bare and (parts.path not in ("", "/") or parts.username)):
        raise UsageError(
            f"invalid URL of {what}",
            where=where,
            wanted="http://HOST:PORT or https://HOST:PORT",
            found=url,
        )
    return parts


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; those of an empty one where it cannot be read."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # it is read as late as this
    except ValueError:
        return urlsplit("")
    return parts


# --- this machine ---------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Whether a server that listens at `host` is reached from this machine alone.

    No name but localhost is looked up: what it resolves to here says nothing of other machines.
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's: a socket can be bound to one of its addresses.

    All addresses of a name are tried: the first may be of a protocol that this machine lacks.
    """
    for family, kind, protocol, _, address in _resolved(host):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
            return True
    return False


def any_address(host: str) -> str:
    """Return the address of all interfaces, of the protocol by which others reach `host`."""
    families = {family for family, *_ in _resolved(host)} if host else set()
    return "::" if families == {socket.AF_INET6} else "0.0.0.0"


def loopback_of(host: str) -> str:
    """Return the loopback address that a name other than localhost has here; empty if it has none.

    Debian's installer, say, gives it to a machine's own name, which is another address elsewhere.
    """
    if is_loopback(host):
        return ""
    return next((a for *_, (a, *_) in _resolved(host)[:1] if is_loopback(str(a))), "")


def _resolved(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # no name can look like that
        return []


# --- sockets --------------------------------------------------------------------------------------


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address of `host`; port 0 takes any that is free.

    Of several addresses the first that this machine has, see `is_here`.

    Raises
    ------
    OSError, UnicodeError
        The address is taken, is not this machine's, or cannot be one.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for entry in found[:-1]:
        try:
            return _bound(host, entry)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return _bound(host, found[-1])


def _bound(host: str, entry: Any) -> socket.socket:
    family, kind, protocol, _, address = entry
    sock = socket.socket(family, kind, protocol)
    with _closed_on_error(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":  # all addresses, those of IPv4 too
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    return sock


def listen_at(host: str, port: int, what: str) -> socket.socket:
    """Return a socket that listens; port 0 takes any that is free.

    Parameters
    ----------
    what
        Listens there, for the error: ``the daemon``.

    Raises
    ------
    StoreError
        kind ``listen``: the address cannot be had.
    """
    with _not_had(what, str(Address(host, port))):
        sock = bound(host, port)
        with _closed_on_error(sock):
            sock.listen(_BACKLOG)
        return sock


def same_user(sock: socket.socket) -> bool:
    """Tell whether the process at the other end of a Unix socket runs as our user."""
    # Where the kernel does not tell (not Linux), no process is let in.
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return False
    raw = sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.geteuid())


def _is_left_over(path: str) -> bool:
    """Tell whether `path` is a socket at which nothing listens."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1.0)
        return sock.connect_ex(path) == errno.ECONNREFUSED


@contextlib.contextmanager
def _not_reached(where: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise TransientStoreError(
            "the server does not answer",
            kind="link-late",
            where=where,
            wanted=f"a connection within {timeout_s:g} s",
            hint="check the address, and that no firewall drops what is sent there",
        ) from None
    except (OSError, UnicodeError) as error:  # no name can look like that
        raise TransientStoreError(
            "the server cannot be reached",
            kind="link-lost",
            where=where,
            found=getattr(error, "strerror", None) or error,
            hint="check that it runs at this address",
        ) from error


@contextlib.contextmanager
def _not_had(what: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise StoreError(
            f"{what} cannot listen there",
            kind="listen",
            where=where,
            found=getattr(error, "strerror", None) or error,
        ) from error


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise
