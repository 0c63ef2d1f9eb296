"""Server of the controller: accepts nodes and operators, handshake, limits of a connection.

In it: how long a handshake and half a frame may take, silence, unproved connections at once, bytes
not yet sent, lengths of names and texts.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from ckptd.base.net.certificates import given_files, read_files
from ckptd.base.net.connection import HELLO, Codec, Refusal, answer_hello, tune
from ckptd.base.net.door import Strangers
from ckptd.base.net.roles import Certified
from ckptd.base.net.tls import TlsSession, identity_at
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.dial import MOST_FRAME_BYTES, PURPOSE
from ckptd.elastic.messages import FromNode, FromOperator
from ckptd.errors import CkptdError, RefusedError

_HANDSHAKE_S = 5.0
_HALF_FRAME_S = 10.0
_SILENCE_S = 60.0
_MOST_STRANGERS = 2048
_MOST_UNSENT_BYTES = 16 << 20
_MOST_TEXT = 400
_FROM_NODE = msgpack_decoder(FromNode)
_FROM_OPERATOR = msgpack_decoder(FromOperator)
_MOST_NAME = 256


class Listener(Protocol):
    """Receives what peers send; called in the event loop, in the order of each connection."""

    def joined(self, peer: PeerConnection) -> None:
        """Note that a peer has proved what it is."""

    def received(self, peer: PeerConnection, message: Any) -> None:
        """Take a message of a peer that has joined."""

    def gone(self, peer: PeerConnection) -> None:
        """Note that the connection of a peer that had joined is closed."""


class PeerConnection(asyncio.Protocol):
    """One connection.

    Attributes
    ----------
    role, name
        From the handshake.
    where
        The other end's address.
    here
        Whether that is on this machine.
    """

    def __init__(self, door: ListeningSocket) -> None:
        self.role, self.name, self.where, self.here = "", "", "", False
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._tls: TlsSession | None = None
        self._codec = Codec("", MOST_FRAME_BYTES)
        self._kind: Any = None
        """Decoder of its messages, once it has proved what it is."""
        self._timer: asyncio.TimerHandle | None = None
        self._received_at = 0.0

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; a peer that takes nothing for long is cut off."""
        self.send_body(msgspec.msgpack.encode(message))

    def send_body(self, body: bytes) -> None:
        """Send a message that is encoded already."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._tls is None:
            return
        self._tls.write(memoryview(self._codec.pack(body)))
        transport.write(self._tls.to_send())
        if transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self.cut()

    def close(self) -> None:
        """Close the connection when what was sent has gone out."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.where = self._codec.peer = _where(transport.get_extra_info("peername"))
        ends = (transport.get_extra_info(end) for end in ("peername", "sockname"))
        self.here = len({end[0] if isinstance(end, tuple) else end for end in ends}) == 1
        self._transport = tcp = cast("asyncio.Transport", transport)
        tune(tcp.get_extra_info("socket"))
        self._door.enter(self)
        self._timer = self._door.loop.call_later(_HANDSHAKE_S, self.cut)
        own = identity_at(PURPOSE, self._door.secret, "controller", scope=self._door.job)
        self._tls = TlsSession(own, server=True, where=self.where)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            self._codec.feed(self._plain(data))
            if self._kind is None and not self._shake():
                return
            while (message := self._codec.take(self._kind)) is not None:
                self._received_at = self._door.loop.time()
                self._door.listener.received(self, message)
        except CkptdError as error:
            self._door.refused(self, error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._timer is not None:
            self._timer.cancel()
        self._door.leave(self)

    # --- inside -----------------------------------------------------------------------------------

    def _plain(self, data: bytes) -> bytes:
        tls, transport = self._tls, self._transport
        if tls is None or transport is None:
            return b""
        tls.feed(data)
        try:
            return tls.read() if tls.shake() else b""
        finally:
            if out := tls.to_send():
                transport.write(out)

    def _shake(self) -> bool:
        """Take the client's first message if it is there; return whether it was, and is good."""
        peer = None if self._tls is None else self._tls.peer
        if peer is None or (hello := self._codec.take(HELLO)) is None:
            return False
        about: dict[str, str | int | bool] = {"life": self._door.life}
        answer = answer_hello(hello, PURPOSE, peer, about, self._refusal(hello.about, peer))
        self.send(answer)
        if isinstance(answer, Refusal):
            raise RefusedError(answer.text, kind=answer.kind)
        self._codec.let_in()
        self.role, self.name = peer.role, peer.node
        self._received_at = self._door.loop.time()
        self._kind = _FROM_NODE if self.role == "agent" else _FROM_OPERATOR
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._door.loop.call_later(_HALF_FRAME_S, self._look)
        self._door.join(self)
        return True

    def _refusal(self, about: dict[str, Any], peer: Certified) -> Refusal | None:
        if about.get("job") == self._door.job:
            known = 0 < len(peer.node) <= _MOST_NAME
            return (
                None if known else Refusal("permission", "a certificate has no name, or a long one")
            )
        text = f"this is the controller of job {self._door.job!r}"
        return Refusal("not-the-controller", text[:_MOST_TEXT])

    def _look(self) -> None:
        """Cut off a peer that sends half a frame and no more, or as a node nothing at all."""
        silent = self._door.loop.time() - self._received_at
        if (self._codec.half and silent > _HALF_FRAME_S) or (
            self.role == "agent" and silent > _SILENCE_S
        ):
            self.cut()
        else:
            self._timer = self._door.loop.call_later(_HALF_FRAME_S, self._look)


class ListeningSocket:
    """Where connections come in.

    Parameters
    ----------
    job, secret, life
        Of the controller.
    listener
        Receives what peers send.
    refused
        Receives what was refused, for people.
    """

    def __init__(
        self,
        job: str,
        secret: bytes,
        life: str,
        listener: Listener,
        refused: Callable[[PeerConnection, CkptdError], None],
    ) -> None:
        self.job, self.secret, self.life, self.listener = job, secret, life, listener
        self.refused = refused
        self.loop = asyncio.get_running_loop()
        self._strangers = Strangers(_MOST_STRANGERS, PeerConnection.cut)
        self._peers: set[PeerConnection] = set()
        self._server: asyncio.Server | None = None

    async def open(self, sock: socket.socket) -> None:
        """Take connections of a bound socket from now on."""
        if given_files():
            read_files("controller")  # what cannot be read is an error now
        self._server = await self.loop.create_server(
            lambda: PeerConnection(self), sock=sock, backlog=1024, start_serving=True
        )

    async def close(self, wait_s: float) -> None:
        """Close all connections, once what was sent has gone out or `wait_s` are over."""
        if self._server is not None:
            self._server.close()
        for peer in [*self._strangers.held(), *self._peers]:
            peer.close()
        end = self.loop.time() + wait_s
        while (self._strangers.held() or self._peers) and self.loop.time() < end:
            await asyncio.sleep(0.01)
        for peer in [*self._strangers.held(), *self._peers]:
            peer.cut()
        await asyncio.sleep(0)

    @property
    def peers(self) -> frozenset[PeerConnection]:
        """All that have joined."""
        return frozenset(self._peers)

    def enter(self, peer: PeerConnection) -> None:
        """Note a new connection; of too many that have not joined, the oldest is cut off."""
        self._strangers.enter(peer)

    def join(self, peer: PeerConnection) -> None:
        """Note that a peer has proved what it is."""
        self._strangers.leave(peer)
        self._peers.add(peer)
        self.listener.joined(peer)

    def leave(self, peer: PeerConnection) -> None:
        """Note that a connection is closed."""
        self._strangers.leave(peer)
        if peer in self._peers:
            self._peers.discard(peer)
            self.listener.gone(peer)


def _where(name: object) -> str:
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) and len(name) >= 2 else str(name)
