"""Networks of namespaces: nodes behind a router or with a link a pair, shaped and cut.

Nothing of it touches the namespace that the tests run in, but names below ``/run/netns``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

__all__ = ["Network", "enter", "kernel_lacks", "needs_namespaces"]

_ROUTER = "169.254.1.1"
BURST = "64k"
"""Passes unshaped: answers to a shaped sender do not wait in its queue."""
_COMMAND_S = 60


class Network:
    """Some nodes, each with a network namespace; they are gone at the end.

    Parameters
    ----------
    count
        Nodes; see `address`.
    joined
        Whether a router joins all; otherwise there are only links of pairs.
    """

    def __init__(self, count: int, *, joined: bool = True) -> None:
        self.count = count
        tag = secrets.token_hex(3)
        self.spaces = [f"ckt{tag}n{k}" for k in range(count)]
        self._hub = f"ckt{tag}hub"
        self._processes: list[subprocess.Popen[str]] = []
        try:
            _batch([f"netns add {space}" for space in [*self.spaces, self._hub]])
            for space in self.spaces:
                _batch(["link set lo up"], space)
            if joined:
                self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Join all by a router: behind a bridge 64 nodes would need 4,032 neighbour entries, and
        the kernel keeps 1,024 for all namespaces together.
        """
        lines = []
        for k, space in enumerate(self.spaces):
            lines.append(f"link add p{k} type veth peer name eth0 netns {space}")
            lines += [f"addr add {_ROUTER}/32 dev p{k}", f"link set p{k} up"]
        _batch(lines, self._hub)
        enter = ["nsenter", f"--net=/run/netns/{self._hub}"]
        _run([*enter, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        for k, space in enumerate(self.spaces):
            gate = f"route add 10.77.0.0/16 via {_ROUTER} dev eth0 onlink"
            _batch([f"addr add {self.address(k)}/32 dev eth0", "link set eth0 up", gate], space)
        _batch([f"route add {self.address(k)}/32 dev p{k}" for k in range(self.count)], self._hub)

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"10.77.{node // 250}.{node % 250 + 1}"

    def link(self, a: int, b: int) -> None:
        """Give two nodes a link of their own, which what they send each other takes."""
        one, two = f"l{b}", f"l{a}"
        add = f"link add {one} type veth peer name {two} netns {self.spaces[b]}"
        _batch([add, f"link set {one} up"], self.spaces[a])
        _batch([f"link set {two} up"], self.spaces[b])
        for node, other, device in ((a, b, one), (b, a, two)):
            source = self.address(node)
            lines = []
            if not self._has_address(node):
                lines.append(f"addr add {source}/32 dev lo")
            lines.append(f"route add {self.address(other)}/32 dev {device} src {source}")
            _batch(lines, self.spaces[node])

    def _has_address(self, node: int) -> bool:
        shown = _run(["ip", "-n", self.spaces[node], "-o", "addr", "show"])
        return f" {self.address(node)}/" in shown

    def shape(self, node: int, mbit: float, to: int | None = None) -> None:
        """Slow down what a node sends: over the router, or over its own link with `to`."""
        self._tc(self.spaces[node], "eth0" if to is None else f"l{to}", mbit)

    def shape_received(self, node: int, mbit: float) -> None:
        """Slow down what a node receives over the router."""
        self._tc(self._hub, f"p{node}", mbit)

    def _tc(self, space: str, device: str, mbit: float) -> None:
        _run(["tc", "-n", space, "qdisc", "add", "dev", device, *_HTB])
        rate = ["htb", "rate", f"{mbit}mbit", "burst", BURST, "cburst", BURST, "quantum", "60000"]
        _run(["tc", "-n", space, "class", "add", "dev", device, *_CLASS, *rate])

    def cut(self, node: int, *, but: Sequence[int] = ()) -> None:
        """Let a node reach nobody any more but some; nothing tells those who wait for it."""
        keep = [f"route add {self.address(k)}/32 via {_ROUTER} dev eth0 onlink" for k in but]
        halves = ["route add blackhole 10.77.0.0/17", "route add blackhole 10.77.128.0/17"]
        _batch([*keep, *halves], self.spaces[node])

    def mend(self, node: int) -> None:
        """Undo `cut`."""
        halves = ["route del blackhole 10.77.0.0/17", "route del blackhole 10.77.128.0/17"]
        _batch(halves, self.spaces[node])

    def kill(self, node: int) -> None:
        """Kill all processes of a node."""
        for pid in _run(["ip", "netns", "pids", self.spaces[node]]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def enter_hub(self) -> None:
        """Put this thread, and those that it starts, on the router, which reaches all nodes."""
        for space in self.spaces:
            _batch([f"route add {_ROUTER}/32 dev eth0"], space)
        _batch(["link set lo up"], self._hub)
        enter(self._hub)

    def reject(self, a: int, b: int) -> None:
        """Cut two nodes from each other; whoever connects is told at once."""
        for node, other in ((a, b), (b, a)):
            _batch([f"route add unreachable {self.address(other)}/32"], self.spaces[node])

    def drop(self, a: int, b: int) -> None:
        """Let nothing pass between two nodes, and tell nobody."""
        for node, other in ((a, b), (b, a)):
            _batch([f"route replace blackhole {self.address(other)}/32"], self.spaces[node])

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on a node; it is ended with the network."""
        enter = ["nsenter", f"--net=/run/netns/{self.spaces[node]}", "--", *command]
        process = subprocess.Popen(enter, env={**os.environ, **env}, text=True, **options)
        self._processes.append(process)
        return process

    def redirect(self, port: int) -> None:
        """Have all TCP that passes the router end at this port of the router; needs nft."""
        enter = ["nsenter", f"--net=/run/netns/{self._hub}", "nft", "-f", "-"]
        rule = f"ip daddr 10.77.0.0/16 tcp dport 1-65535 redirect to :{port}"
        lines = ["table ip path {", "chain first {", "type nat hook prerouting priority -100;"]
        _run(enter, "\n".join([*lines, rule, "}", "}", ""]))
        for space in self.spaces:
            _batch([f"route add {_ROUTER}/32 dev eth0"], space)

    def at_hub(self, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
        """Start a process on the router; it is ended with the network."""
        enter = ["nsenter", f"--net=/run/netns/{self._hub}", "--", *command]
        with log.open("ab") as file:
            process = subprocess.Popen(enter, text=True, stdout=file, stderr=file)
        self._processes.append(process)
        return process

    def sent(self, node: int) -> int:
        """Return the bytes that a node has sent to the router, with all headers."""
        shown = _run(["ip", "-n", self.spaces[node], "-s", "-j", "link", "show", "eth0"])
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """End all processes and take the network away."""
        for process in self._processes:
            process.kill()
            process.communicate()
        for space in [*self.spaces, self._hub]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=_COMMAND_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def enter(space: str) -> None:
    """Put this thread, and those that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(f"/run/netns/{space}", os.O_RDONLY)
    try:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"no entry to {space}")
    finally:
        os.close(fd)


_HTB = ["root", "handle", "1:", "htb", "default", "1"]
_CLASS = ["parent", "1:", "classid", "1:1"]


def _batch(lines: Sequence[str], space: str = "") -> None:
    command = ["ip", *(["-n", space] if space else []), "-batch", "-"]
    _run(command, "\n".join(lines) + "\n")


def _run(command: Sequence[str], given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def kernel_lacks() -> str:
    """Return why there can be no such network here; empty where there can."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "namespaces need root"
    try:
        with Network(2) as network:
            network.link(0, 1)
            network.shape(0, 50)
            network.shape_received(1, 50)
            network.shape(0, 50, to=1)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernel has no namespaces with veth and htb: {error}"
    return ""


def needs_namespaces() -> None:
    """Skip, and say why, where the kernel or the rights lack."""
    if why := kernel_lacks():
        pytest.skip(f"NETWORK NAMESPACES ARE NOT TESTED: {why}")
