"""Cost of watching a node: real ring writers, the watcher's process, a daemon beside it.

    python bench/watcher.py [--ranks N] [--seconds N]

Ranks write 100, 300 and 1000 calls a second each, ten calls a step. Reported are the CPU time of
the watcher's process as a share of one core, and its memory, for as long as the case lasts. The
daemon answers as the real one does, and asks for a sheet each quarter of a second and each second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parents[1]))

from ckptd.monitor.report import AgentOrders
from tests.monitor.agent.daemons import SECRET, Daemon
from tests.monitor.agent.writers import writers

RATES = (0, 100, 300, 1000)
PERIODS = (0.25, 1.0)


class Steady(Daemon):
    """Asks for sheets at one period."""

    period_s = 0.25

    def take(self, path: str, body: bytes) -> bytes:
        self.orders = [AgentOrders(period_s=self.period_s)]
        self.sheets.clear()
        return super().take(path, body)


def used(pid: int) -> tuple[float, float]:
    """Return the CPU seconds and the MiB of a process."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    status = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1]
    return cpu, int(status.split()[0]) / 1024


def measure(ranks: int, rate: float, period_s: float, seconds: float) -> tuple[float, float]:
    """Return the share of a core in percent, and MiB."""
    daemon = Steady(SECRET)
    daemon.period_s = period_s
    folder = Path(tempfile.mkdtemp())
    env = os.environ | {"CKPTD_SECRET": SECRET.decode(), "CKPTD_RUN_DIR": tempfile.mkdtemp()}
    command = [
        sys.executable,
        "-m",
        "ckptd.monitor.agent.watched",
        "--job",
        "j",
        "--daemon",
        daemon.url,
    ]
    with writers(folder, ranks, rate=float(rate)):
        watcher = subprocess.Popen(
            [*command, "--rings", str(folder)], env=env, stdin=subprocess.PIPE
        )
        try:
            time.sleep(3.0)
            before, _ = used(watcher.pid)
            time.sleep(seconds)
            after, memory = used(watcher.pid)
        finally:
            watcher.terminate()
            watcher.wait(30)
            daemon.close()
    return (after - before) / seconds * 100, memory


def main() -> None:
    options = common.arguments(__doc__, ranks=8, seconds=20)
    rows = []
    for period_s in PERIODS:
        for rate in RATES:
            share, memory = measure(options.ranks, rate, period_s, options.seconds)
            rows.append([f"{rate}", f"{period_s:g} s", f"{share:.2f} %", f"{memory:.0f}"])
            print(rows[-1], flush=True)
    head = ["calls a second and rank", "sheet each", "share of a core", "MiB"]
    data = {"rows": rows, "ranks": options.ranks, "load": os.getloadavg()}
    common.publish("watcher", "python bench/watcher.py", common.table(head, rows), data)


if __name__ == "__main__":
    main()
