"""Probes between two nodes."""

from __future__ import annotations

import socket
import threading

import numpy as np

from ckptd.monitor.agent.probes import MOST_PROBE_BYTES, Answerer, probe_pair

SECRET = b"0123456789abcdef"


def test_both_ways_are_measured() -> None:
    with Answerer("127.0.0.1", SECRET) as answerer:
        found = probe_pair(3, 5, ("127.0.0.1", answerer.port), SECRET, 1 << 20)
        again = probe_pair(3, 5, ("127.0.0.1", answerer.port), SECRET, 1)
    assert (found.source, found.to, found.error, found.cut) == (3, 5, "", False)
    assert found.latency_s > 0
    assert 0 < found.out_s < np.inf
    assert 0 < found.in_s < np.inf
    assert not again.cut


def test_another_secret_is_told_and_learns_nothing() -> None:
    with Answerer("127.0.0.1", SECRET) as answerer:
        found = probe_pair(0, 1, ("127.0.0.1", answerer.port), b"another secret..", 1)
    assert found.cut
    assert "different secrets" in found.error


def test_nobody_listens() -> None:
    with Answerer("127.0.0.1", SECRET) as answerer:
        port = answerer.port
    found = probe_pair(0, 1, ("127.0.0.1", port), SECRET, 1)
    assert (found.cut, found.error) == (True, "Connection refused")


def test_one_that_listens_and_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = probe_pair(0, 1, silent.getsockname(), SECRET, 1)
    assert found.cut
    assert "does not answer" in found.error


def test_strangers_keep_nobody_from_probing() -> None:
    with Answerer("127.0.0.1", SECRET) as answerer:
        address = ("127.0.0.1", answerer.port)
        with socket.create_connection(address), socket.create_connection(address) as noisy:
            noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            assert not probe_pair(0, 1, address, SECRET, 1).cut


def test_more_than_the_largest_probe_is_not_sent() -> None:
    with Answerer("127.0.0.1", SECRET) as answerer:
        found = probe_pair(0, 1, ("127.0.0.1", answerer.port), SECRET, MOST_PROBE_BYTES + 1)
    assert found.cut


def test_close_ends_its_threads() -> None:
    before = threading.active_count()
    for _ in range(5):
        Answerer("127.0.0.1", SECRET).close()
    assert threading.active_count() <= before
