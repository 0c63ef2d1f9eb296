"""Finds a node's agent or starts it: run folder (``CKPTD_RUN_DIR``), lock, socket, user check.

In it: how long the lock is awaited; the longest path of a socket; the number of the agent's
protocol.

The first process that needs it starts it. The socket lies in a folder that only this user can
enter. A process that looks for the agent holds a lock meanwhile, and so does an agent that is about
to end: no client connects to one that is leaving.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptd.base.digest import digest_hex
from ckptd.errors import DeadlineError, ProcessError, RefusedError, StoreError

_BACKLOG = 128
_LOCK_S = 30.0
_POLL_S = 0.02
_MOST_PATH_BYTES = 107 if sys.platform == "linux" else 103
_CREDENTIALS = struct.Struct("3i")
_PROTOCOL = 2
"""Rises with messages that agents of before do not know: trainers then start another agent."""


class AgentPlace:
    """Where the agent of a job and a node is found.

    Parameters
    ----------
    job
        The root's URL, or what ``CKPTD_JOB`` says.
    node
        Tells this node from all others.
    folder
        Overrides ``CKPTD_RUN_DIR``, ``$XDG_RUNTIME_DIR/ckptd`` and the folder for temporary files.

    Raises
    ------
    RefusedError
        See `run_folder`.
    ProcessError
        The folder's path is too long for a socket in it.
    """

    def __init__(self, job: str, node: str, folder: str | None = None) -> None:
        self.job = job
        self.node = node
        name = digest_hex(f"{job}\n{node}\n{_PROTOCOL}".encode())[:20]
        self.socket = _short(run_folder(folder) / f"{name}.sock")
        self.lock = self.socket.with_suffix(".lock")
        self.log = self.socket.with_suffix(".log")


def _short(path: Path) -> Path:
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise _no_socket(path, wanted=f"a path of at most {_MOST_PATH_BYTES} bytes")
    return path


def _no_socket(path: Path, **said: str) -> ProcessError:
    return ProcessError(
        "the node's agent cannot create its socket",
        where=str(path),
        hint="set CKPTD_RUN_DIR to a folder with a short path",
        **said,
    )


def run_folder(folder: str | None = None) -> Path:
    """Return the folder of this user's sockets; made if need be, mode 0700.

    Raises
    ------
    RefusedError
        Another user made it, or others may enter it.
    StoreError
        There is no folder, and none can be made.
    """
    chosen = folder or os.environ.get("CKPTD_RUN_DIR")
    if chosen is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        good = runtime is not None and os.access(runtime, os.W_OK)
        chosen = f"{runtime}/ckptd" if good else f"{tempfile.gettempdir()}/ckptd-{os.geteuid()}"
    path = Path(chosen)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            "the folder for sockets cannot be created",
            where=str(path),
            found=error.strerror or error,
            hint="set CKPTD_RUN_DIR to a folder of this user",
        ) from error
    info = path.stat(follow_symlinks=False)
    private = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o077
    if info.st_uid != os.geteuid() or not private:
        raise RefusedError(
            "the folder for sockets is accessible to others",
            where=str(path),
            wanted=f"a folder of user {os.geteuid()} with mode 0700",
            found=f"user {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o}",
            hint="remove it, or chmod 700 it if only you wrote there, or set CKPTD_RUN_DIR",
        )
    return path


@contextmanager
def locked(place: AgentPlace, timeout_s: float = _LOCK_S) -> Iterator[None]:
    """Hold the lock under which an agent comes and goes.

    Raises
    ------
    DeadlineError
        Another process holds it for `timeout_s`.
    """
    fd = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    end = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineError(
                        "another process holds the agent's lock",
                        where=str(place.lock),
                        wanted=f"within {timeout_s:.0f} s",
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def connect_agent(place: AgentPlace) -> socket.socket:
    """Return a connection to the agent; starts one where none listens.

    It is not ready yet: its first answer says so. Its log lies beside its socket.

    Raises
    ------
    ProcessError
        It cannot be started.
    """
    with locked(place):
        found = reach(place.socket)
        if found is not None:
            return found
        with listen(place) as listener, open(place.log, "ab") as log:
            command = [
                sys.executable,
                "-m",
                "ckptd.checkpoint.agent",
                "--fd",
                str(listener.fileno()),
            ]
            command += ["--job", place.job, "--node", place.node]
            command += ["--folder", str(place.socket.parent)]
            # A session of its own: what ends the trainers, by signal or terminal, must not end
            # what keeps their snapshots.
            process = subprocess.Popen(
                command,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            # Its end changes nothing here, but a child that ended must be waited for.
            threading.Thread(target=process.wait, name="ckptd-agent-wait", daemon=True).start()
        found = reach(place.socket)
        if found is None:
            raise ProcessError(
                "the node's agent cannot be reached",
                where=str(place.socket),
                hint=f"see {place.log}",
            )
        return found


def reach(path: Path) -> socket.socket | None:
    """Return a connection to the agent that listens at `path`; None where none does."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError:
        sock.close()
        raise
    return sock


def listen(place: AgentPlace) -> socket.socket:
    """Return the listening socket of an agent; call it under the lock.

    Raises
    ------
    ProcessError
        It cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        place.socket.unlink(missing_ok=True)
        listener.bind(str(place.socket))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _no_socket(place.socket, found=str(error)) from error
    return listener


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a Unix socket; (-1, -1) where that is unknown."""
    if not hasattr(socket, "SO_PEERCRED"):
        return -1, -1
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid
