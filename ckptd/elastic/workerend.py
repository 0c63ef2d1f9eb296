"""Launcher's server for its workers: one Unix socket, a thread each, proofs handed out.

In it: how long a first word may take; what is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ckptd.base.net.handed import AskProof, HandedProof
from ckptd.base.runtime.agentlink import peer_of
from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.ownership import OfOneProcess
from ckptd.decoding import msgpack_decoder
from ckptd.elastic.messages import MOST_BYTES, Attach, FromWorker, ToWorker
from ckptd.errors import CkptdError, ProcessError

_log = logging.getLogger("ckptd.elastic")
_Heard = FromWorker | AskProof
msgpack_decoder(_Heard)  # now, and not in whichever thread hears the first one
_BACKLOG = 256
_HELLO_S = 30.0
_POLL_S = 1.0


class WorkerEnd:
    """One worker, as its launcher sees it.

    Attributes
    ----------
    pid
        Its process, by the kernel; by its own `Attach` where the kernel does not know.
    attach
        Its newest one.
    """

    def __init__(self, channel: SocketChannel, pid: int, attach: Attach) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self.pid = pid
        self.attach = attach

    def __repr__(self) -> str:
        return f"<WorkerEnd rank {self.attach.rank}, process {self.pid}>"

    def send(self, message: ToWorker) -> bool:
        """Send, and return whether that worked: if not, the worker has ended or is to end."""
        try:
            with self._sending:
                self._channel.send(message)
        except ProcessError:
            return False
        return True


class LauncherEnd(OfOneProcess):
    """Listens for workers, with a thread for each.

    Parameters
    ----------
    path
        Of the socket, of at most 107 bytes; made again, mode 0600, in a folder of this user alone.
    received
        Called with a worker and its message, `Attach` first, and once with None when it is gone.
        Never by two threads for the same worker; by several for different ones.
    known
        Whether a process may be a worker: one that this launcher started, or a child of one.
    hand
        Answers any process of this user that asks what it can prove itself by.

    Raises
    ------
    ProcessError
        It cannot listen there.
    """

    def __init__(
        self,
        path: Path,
        received: Callable[[WorkerEnd, FromWorker | None], None],
        known: Callable[[int], bool] = lambda _: True,
        hand: Callable[[AskProof], HandedProof] = lambda _: HandedProof(),
    ) -> None:
        self.path, self._hand = path, hand
        self._received = received
        self._known = known
        self._closing = False
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise ProcessError(
                "the launcher cannot create its socket",
                where=str(path),
                found=str(error),
                hint="set CKPTD_RUN_DIR to a folder with a short path",
            ) from error
        threading.Thread(target=self._accept, name="ckptd-workers", daemon=True).start()

    def close(self) -> None:
        """Release all workers, and close the socket. Idempotent."""
        self._closing = True
        with self._lock:
            for sock in (self._listener, *self._open):
                with contextlib.suppress(OSError):  # it may have none any more
                    sock.shutdown(socket.SHUT_RDWR)
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with self._listener:
            while not self._closing:
                try:
                    sock, _ = self._listener.accept()
                except OSError as error:
                    self._refused(error)
                    continue
                pid, uid = peer_of(sock)
                if uid not in (-1, os.geteuid()):
                    _reject(pid, uid)
                    sock.close()
                    continue
                threading.Thread(
                    target=self._serve, args=(sock, pid), name=f"ckptd-worker-{pid}", daemon=True
                ).start()

    def _refused(self, error: OSError) -> None:
        if not self._closing:  # of descriptors there may be enough again in a moment
            _log.warning("no worker can connect: %s", error)
            time.sleep(_POLL_S)

    def _serve(self, sock: socket.socket, pid: int) -> None:
        with self._lock:
            self._open.add(sock)
        channel = SocketChannel(sock, _Heard, MOST_BYTES)
        try:
            self._follow(channel, pid)
        finally:
            with self._lock:
                self._open.discard(sock)
            channel.close()

    def _follow(self, channel: SocketChannel, pid: int) -> None:
        item = _receive(channel, _HELLO_S)
        if isinstance(item, AskProof):
            try:
                channel.send(self._hand(item))
            except CkptdError as error:
                _log.warning("process %d is handed no certificate: %s", pid, error.message)
            return
        if pid > 0 and not self._known(pid):
            _reject(pid, os.geteuid())
            return
        if item is None or not isinstance(item, Attach):
            _log.warning("process %d did not identify itself as a worker", pid)
            return
        worker = WorkerEnd(channel, pid if pid > 0 else item.pid, item)
        message: FromWorker | None = item
        while message is not None:
            if isinstance(message, Attach):
                worker.attach = message
            self._received(worker, message)
            message = None if self._closing else self._next(channel)
        self._received(worker, None)

    def _next(self, channel: SocketChannel) -> FromWorker | None:
        while not self._closing:
            try:
                item = channel.receive(_POLL_S)
            except (EOFError, msgspec.MsgspecError):
                return None
            if item is not None:
                message: _Heard = item[0]
                return None if isinstance(message, AskProof) else message  # asked by itself only
        return None


def _reject(pid: int, uid: int) -> None:
    _log.warning("rejected process %d of user %d: not a worker of this node", pid, uid)


def _receive(channel: SocketChannel, timeout_s: float) -> _Heard | None:
    try:
        item = channel.receive(timeout_s)
    except (EOFError, msgspec.MsgspecError):
        return None
    return None if item is None else item[0]
