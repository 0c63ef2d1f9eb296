"""A mesh of nodes with a link of its own for each pair, probed as agents do."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from ckptd.monitor.links import LinkLimits, slow_links
from ckptd.monitor.report import LinkProbe, ProbeResult
from tests.monitor.cluster.namespaces import Network

__all__ = ["LIMITS", "PLANTS", "SIZE", "Mesh", "plant"]

SIZE = 256 << 10
"""Bytes of a probe."""
LIMITS = LinkLimits(noise_s=5e-4)
PLANTS = ("point", "row", "column", "node", "partition")


class Mesh:
    """Nodes that probe each other, one source at a time."""

    def __init__(self, nodes: int) -> None:
        self.names = [f"n{k}" for k in range(nodes)]
        self.network = Network(nodes, joined=False)
        self._nonces = itertools.count()
        try:
            for a, b in itertools.combinations(range(nodes), 2):
                self.network.link(a, b)
            self._processes = [self._start(k) for k in range(nodes)]
            self._addresses = [self._line(k) for k in range(nodes)]
        except BaseException:
            self.network.close()
            raise

    def _start(self, node: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.monitor.cluster.prober", self.network.address(node)]
        pipe = subprocess.PIPE
        return self.network.start(node, command, {}, stdin=pipe, stdout=pipe, bufsize=1)

    def _line(self, node: int) -> str:
        out = self._processes[node].stdout
        assert out is not None
        line = out.readline().strip()
        assert line, f"the process of node {node} has ended"
        return line

    def probe(self, source: int, to: int) -> float:
        """Return the seconds of one probe; infinite if it did not come."""
        probe = LinkProbe(
            nonce=next(self._nonces),
            from_node=self.names[source],
            to_node=self.names[to],
            address=self._addresses[to],
            size=SIZE,
        )
        given = self._processes[source].stdin
        assert given is not None
        given.write(msgspec.msgpack.encode(probe).hex() + "\n")
        given.flush()
        result = msgspec.msgpack.decode(bytes.fromhex(self._line(source)), type=ProbeResult)
        assert result.nonce == probe.nonce
        return result.seconds

    def delays(self) -> np.ndarray:
        """Probe all pairs, one source at a time; return seconds in the order of `edges`."""
        return np.array([self.probe(a, b) for a, b in self.edges])

    @property
    def edges(self) -> list[tuple[int, int]]:
        return list(itertools.permutations(range(len(self.names)), 2))

    def named(self, rounds: int) -> list[str]:
        """Return what the least delays of some rounds of probes name, likeliest first."""
        edges = np.array(self.edges)
        least = np.min([self.delays() for _ in range(rounds)], axis=0)
        verdicts = slow_links(self.names, edges[:, 0], edges[:, 1], least, LIMITS)
        return [f"{s.target} {s.name}" for verdict in verdicts for s in verdict.suspects]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.network.close()


def plant(mesh: Mesh, what: str, node: int = 1, mbit: float = 60) -> str:
    """Plant a fault at a node and return how it is named."""
    network, count = mesh.network, len(mesh.names)
    others = [k for k in range(count) if k != node]
    far = (node + 1) % count
    if what == "point":
        network.shape(node, mbit, to=far)
        return f"link n{node}>n{far}"
    if what == "partition":
        network.drop(node, far)
        return f"link n{node}>n{far}"
    for other in others:
        if what in ("row", "node"):
            network.shape(node, mbit, to=other)
        if what in ("column", "node"):
            network.shape(other, mbit, to=node)
    return {"row": "sender", "column": "receiver", "node": "node"}[what] + f" n{node}"
