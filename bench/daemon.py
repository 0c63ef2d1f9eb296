"""Cost of a daemon that takes real signed sheets over HTTP: 16 to 10,240 ranks, 8 a node.

    python bench/daemon.py [--seconds 10] [--most 10240]

A daemon runs as its own process. Four threads of this process post the sheets of a simulated job,
each source over a connection of its own, spread over time: from each node, and joined as forwarders
of 64 nodes send them. Every source posts each second, or where there are many, as often as the
daemon asks for (`every`). Sheets are packed beforehand. `cpu` is CPU time of the daemon's process,
all threads, per second; `round` is that of the last rounds of the diagnosis, of which there are
about four a second; `p50` and `p99` are the times from the begin of a POST to the end of its
answer, and `late` how much later than planned the clients began: where that is large, the machine
has too few cores for both.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import common
import numpy as np

from ckptd.base.net.signing import CHALLENGE_PATH, MAC_HEADER, SHEETS_PATH, sign_request
from ckptd.monitor.daemon.client import DaemonClient
from ckptd.monitor.report import NodeReport, merge, pack, unpack_report
from ckptd.monitor.settings import WatchSettings
from ckptd_simulated.feed import Simulation, mesh_for

RANKS = (16, 128, 1024, 4096, 10240)
SECRET = b"secret of the bench, long enough"
JOB = "bench"
THREADS = 4
PER_FORWARDER = 64
COMMAND = [sys.executable, "-c", "from ckptd.cli.main import main; main()", "serve", "--json"]
TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Daemon:
    """One daemon as a process of its own."""

    folder: Path
    process: subprocess.Popen[str] = field(init=False)
    login: str = field(init=False)

    def __enter__(self) -> Self:
        self.folder.mkdir(mode=0o700)
        environment = os.environ | {
            "CKPTD_RUN_DIR": str(self.folder),
            "CKPTD_SECRET": SECRET.decode(),
        }
        self.process = subprocess.Popen(
            [*COMMAND, "--job", JOB], stdout=subprocess.PIPE, text=True, env=environment
        )
        text = ""
        while not text.rstrip().endswith("}"):
            line = self.process.stdout.readline() if self.process.stdout else ""
            if not line:
                raise SystemExit("the daemon ended")
            text += line
        self.login = json.loads(text)["login"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def client(self) -> DaemonClient:
        return DaemonClient(self.login)

    @property
    def port(self) -> int:
        return int(self.client.url.rpartition(":")[2])

    def cpu_s(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / TICK

    def rss_mib(self) -> float:
        words = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE") / common.MIB


def packed(ranks: int, forwarded: bool, turns: int) -> list[list[bytes]]:
    """Sheets of each source, one a second."""
    simulation = Simulation(JOB, mesh_for(ranks))
    out: list[list[bytes]] = []
    for second in range(turns):
        each = [unpack_report(body) for _, body in simulation.sheets(float(second))]
        if forwarded:
            each = joined(each, second + 1)
        for place, sheet in enumerate(each):
            if place == len(out):
                out.append([])
            out[place].append(pack(sheet))
    return out


def joined(each: list[NodeReport], number: int) -> list[NodeReport]:
    parts = [each[i : i + PER_FORWARDER] for i in range(0, len(each), PER_FORWARDER)]
    return [
        merge(part, [0.0] * len(part), job=JOB, source=f"f{k}", number=number)
        for k, part in enumerate(parts)
    ]


class Poster(threading.Thread):
    """Posts the sheets of some sources, each second all of them."""

    def __init__(
        self, port: int, challenge: str, mine: list[list[bytes]], start: float, every_s: float
    ) -> None:
        super().__init__()
        self.took: list[float] = []
        self.late: list[float] = []
        self.refused = 0
        self._port, self._challenge, self._mine = port, challenge, mine
        self._start, self._every_s = start, every_s
        self._to: dict[int, http.client.HTTPConnection] = {}

    def run(self) -> None:
        for turn in range(len(self._mine[0])):
            for k, bodies in enumerate(self._mine):
                due = self._start + (turn + k / len(self._mine)) * self._every_s
                time.sleep(max(due - time.monotonic(), 0.0))
                self.late.append(max(time.monotonic() - due, 0.0))
                self._post(k, bodies[turn])
        for connection in self._to.values():
            connection.close()

    def _post(self, k: int, body: bytes) -> None:
        if k not in self._to:
            self._to[k] = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        mac = sign_request(SECRET, "POST", SHEETS_PATH, self._challenge, body)
        began = time.monotonic()
        self._to[k].request("POST", SHEETS_PATH, body, {MAC_HEADER: mac})
        answer = self._to[k].getresponse()
        answer.read()
        self.took.append(time.monotonic() - began)
        self.refused += answer.status != 200


def measure(folder: Path, ranks: int, forwarded: bool, seconds: int) -> dict[str, Any]:
    count = -(-mesh_for(ranks).nodes // (PER_FORWARDER if forwarded else 1))
    every_s = max(1.0, WatchSettings().per_source_s * count)
    sources = packed(ranks, forwarded, max(round(seconds / every_s), 2))
    sent = sum(len(body) for bodies in sources for body in bodies)
    with Daemon(folder) as daemon:
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
        connection.request("GET", CHALLENGE_PATH)
        challenge = json.loads(connection.getresponse().read())["challenge"]
        connection.close()
        start = time.monotonic() + 0.5
        count = min(THREADS, len(sources))
        posters = [
            Poster(daemon.port, challenge, sources[k::count], start, every_s) for k in range(count)
        ]
        before, began = daemon.cpu_s(), time.monotonic()
        for poster in posters:
            poster.start()
        rounds = []
        while any(p.is_alive() for p in posters):
            time.sleep(0.5)
            rounds.append(daemon.client.get("/job")["round"])
        spent, wall = daemon.cpu_s() - before, time.monotonic() - began - 0.5
        job = daemon.client.get("/job")
        memory = daemon.rss_mib()
    took = np.array([t for p in posters for t in p.took])
    late = np.array([t for p in posters for t in p.late])
    if job["ranks_reporting"] != ranks or job["open_incidents"] or any(p.refused for p in posters):
        raise SystemExit(f"not all went well: {job}")
    return {
        "by": "forwarders" if forwarded else "nodes",
        "ranks": ranks,
        "sources": len(sources),
        "KB/s": sent / wall / 1e3,
        "POSTs/s": len(took) / wall,
        "cpu ms/s": spent / wall * 1e3,
        "cpu ms/POST": spent / len(took) * 1e3,
        "round ms": float(np.median([r["cpu_ms"] for r in rounds])),
        "p50 ms": float(np.quantile(took, 0.5)) * 1e3,
        "p99 ms": float(np.quantile(took, 0.99)) * 1e3,
        "late p99 ms": float(np.quantile(late, 0.99)) * 1e3,
        "every s": every_s,
        "MiB": memory,
    }


def main() -> None:
    options = common.arguments(__doc__, seconds=10, most=RANKS[-1])
    cases = [(n, f) for f in (False, True) for n in RANKS if n <= options.most]
    cases = [(n, f) for n, f in cases if not f or n > 8 * PER_FORWARDER]
    rows = []
    for k, (ranks, forwarded) in enumerate(cases):
        rows.append(measure(Path(options.dir) / str(k), ranks, forwarded, options.seconds))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    head = list(rows[0])
    body = [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    text = (
        "A daemon with real signed sheets over HTTP on loopback; "
        f"clients on the same machine.\n\n{common.table(head, body)}"
    )
    common.publish("daemon", common.command(), text, {"rows": rows})


if __name__ == "__main__":
    main()
