"""Interface of what watches beside ``ckptd run``: watcher and daemon, the part ``watch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ckptd.elastic.launchers.sidecars import ControllerSupervisor


class WatchSide(Protocol):
    """The daemon of a job and the watcher of a node, beside a launcher."""

    def turn(self, controller: ControllerSupervisor) -> None:
        """Start what can be started now."""

    def daemon_at(self, url: str) -> None:
        """Take the daemon's address from a controller."""

    def end(self, last_word_s: float) -> None:
        """End them, once the last incidents are reported."""


class Watch(Protocol):
    """Makes a watch."""

    def check_floors(self, floors: tuple[str, ...]) -> None:
        """Check the values of ``--floor``; raises `UsageError`."""

    def environment(self, folder: Path, base: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables that make ranks record themselves; raises `OSError`."""

    def start(
        self,
        job: str,
        daemon: str | None,
        daemon_arguments: Sequence[str],
        watcher_arguments: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        say: Callable[[str], None],
    ) -> WatchSide:
        """Return the watch of a launcher, which starts at its first turn.

        Parameters
        ----------
        daemon
            URL of a daemon that is there; None: one that a launcher of this job starts.
        daemon_arguments, watcher_arguments
            Besides the job and the daemon.
        env, folder, say
            As of `ControllerSupervisor`.
        """

    def forget(self, job: str) -> None:
        """Remove the files of a job whose name will not be used again."""
