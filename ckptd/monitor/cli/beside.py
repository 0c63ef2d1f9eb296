"""The watch beside ``ckptd run``: the part ``watch``."""

from __future__ import annotations

from ckptd.elastic.cli.beside import Watch
from ckptd.monitor.cli.watch import check_floors
from ckptd.monitor.cli.watch_parts import DaemonSupervisor
from ckptd.monitor.daemon.place import DaemonPlace
from ckptd.monitor.injection import environment


class _Watch:
    check_floors = staticmethod(check_floors)
    environment = staticmethod(environment)
    start = DaemonSupervisor

    def forget(self, job: str) -> None:
        DaemonPlace(job).lock.unlink(missing_ok=True)


WATCH: Watch = _Watch()
"""The part ``watch``."""
