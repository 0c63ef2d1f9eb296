"""A kubelet for `FakeKube`: runs pods as processes here, and kills all that they were."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Kubelet"]

_MARK = "CKPTD_FAKE_POD"
_WAIT_S = 10.0


class Kubelet:
    """Runs one process a pod.

    Parameters
    ----------
    ended
        Called with a pod's uid and the exit code when its process has ended by itself.
    """

    def __init__(self, ended: Callable[[str, int], None]) -> None:
        self._ended = ended
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, pod: Mapping[str, Any]) -> None:
        """Start the first container of a pod."""
        uid = pod["metadata"]["uid"]
        container = pod["spec"]["containers"][0]
        given = {e["name"]: e.get("value", "") for e in container.get("env") or ()}
        process = subprocess.Popen(
            container["command"],
            env={**os.environ, **given, _MARK: uid},
            start_new_session=True,
        )
        with self._lock:
            self._running[uid] = process
        threading.Thread(target=self._wait, args=(uid, process), daemon=True).start()

    def _wait(self, uid: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            known = self._running.pop(uid, None)
        if known is not None:
            self._kill_all(uid)
            self._ended(uid, code if code >= 0 else 128 - code)

    def ask(self, uid: str) -> None:
        """Ask a pod's process to end."""
        with self._lock:
            process = self._running.get(uid)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def kill(self, uid: str) -> None:
        """Kill a pod's processes, also those that have left its session; they are gone then."""
        with self._lock:
            process = self._running.pop(uid, None)
        self._kill_all(uid)
        if process is not None:
            process.wait(_WAIT_S)

    def close(self) -> None:
        """Kill everything."""
        with self._lock:
            uids = list(self._running)
        for uid in uids:
            self.kill(uid)

    def _kill_all(self, uid: str) -> None:
        mark = f"{_MARK}={uid}".encode()
        while found := [p for p in _processes() if mark in _environ(p)]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    """Return the environment of a process; nothing of one that has ended, waited for or not."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(1 << 20).split(b"\0")
    except OSError:
        return []
