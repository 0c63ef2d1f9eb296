"""Links are measured between agents that know one secret, and with nobody else."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import pytest

from ckptd.base.net.connection import Connection, greet_server
from ckptd.errors import StoreError
from ckptd.monitor.agent import probes
from ckptd.monitor.agent.probes import listen_for_probes, measure, shown_address
from ckptd.monitor.report import LinkProbe

SECRET = b"a secret of tests, long enough"


def probe(address: str, size: int = 1 << 17) -> LinkProbe:
    return LinkProbe(nonce=9, from_node="a", to_node="b", address=address, size=size)


def test_a_link_is_measured() -> None:
    with listen_for_probes(SECRET) as answerer:
        result = measure(probe(shown_address(answerer)), SECRET)
    assert (result.nonce, result.src, result.dst, result.error) == (9, "a", "b", "")
    assert 0 < result.seconds < math.inf


def test_where_an_end_waited_for_most_of_the_time_it_is_measured_again() -> None:
    spans = [(0.02, 0.019), (0.02, 0.011), (0.001, 0.0), (0.002, 0.0015), (0.004, 0.001)]
    told = iter([*spans, (0.002, 0.0), (0.0001, 0.0)])
    assert probes._least(lambda: next(told), 3) == (0.001, True)
    assert next(told) == (0.0001, 0.0)
    slow = iter([(0.9, 0.1), (0.0001, 0.0)])
    assert probes._least(lambda: next(slow), 3) == pytest.approx((0.8, True))
    assert probes._least(lambda: (0.02, 0.019), 3) == (0.01, False)


def test_a_node_that_is_too_busy_says_nothing_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_waited_s", time.perf_counter)  # for all of the time
    with listen_for_probes(SECRET) as answerer:
        result = measure(probe(shown_address(answerer)), SECRET)
    assert (result.error, result.shows) == ("", "node")
    assert result.seconds < math.inf


@pytest.mark.parametrize("who", [{"asks"}, {"answers"}, {"asks", "answers"}])
def test_what_an_end_waited_for_a_cpu_is_not_the_links(
    who: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that moves when bytes are read: by 5 s at either end, of which `who` waited 4."""
    asks, passed, waited = threading.current_thread(), [0.0], {"asks": 0.0, "answers": 0.0}

    def here() -> str:
        return "asks" if threading.current_thread() is asks else "answers"

    def drop(wire: Connection, count: int) -> None:
        dropped(wire, count)
        passed[0] += 5.0
        waited[here()] += 4.0 * (here() in who)

    dropped = probes._drop
    monkeypatch.setattr(probes, "_drop", drop)
    monkeypatch.setattr(probes, "_waited_s", lambda: waited[here()])
    monkeypatch.setattr(probes.time, "perf_counter", lambda: passed[0])
    with listen_for_probes(SECRET) as answerer:
        assert measure(probe(shown_address(answerer)), SECRET).seconds == 6.0


def test_a_thread_that_shares_a_cpu_knows_that_it_waited() -> None:
    mine = os.sched_getaffinity(0)
    spin = f"import os\nos.sched_setaffinity(0, {{{min(mine)}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as other:
        try:
            os.sched_setaffinity(0, {min(mine)})
            began, end = probes._waited_s(), time.monotonic() + 60
            while probes._waited_s() - began < 0.05:
                assert time.monotonic() < end
        finally:
            os.sched_setaffinity(0, mine)
            other.kill()


def test_another_secret_is_refused() -> None:
    with listen_for_probes(SECRET) as answerer:
        result = measure(probe(shown_address(answerer)), b"another secret of some length")
        assert result.seconds == math.inf
        assert result.error
        assert measure(probe(shown_address(answerer)), SECRET).error == ""


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    result = measure(probe(address), SECRET)
    assert result.seconds == math.inf
    assert "refused" in result.error
    assert result.shows == "node"


@pytest.mark.parametrize("address", ["", "nonsense", "host:port", "127.0.0.1:99999"])
def test_an_address_that_is_none(address: str) -> None:
    result = measure(probe(address), SECRET)
    assert (result.seconds, result.shows) == (math.inf, "nothing")
    assert result.error


def test_strangers_do_not_keep_others_out() -> None:
    with listen_for_probes(SECRET) as answerer:
        address = ("127.0.0.1", answerer.port)
        strangers = [socket.create_connection(address) for _ in range(20)]
        for stranger in strangers:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        end = time.monotonic() + 60
        while measure(probe(shown_address(answerer)), SECRET).error:
            assert time.monotonic() < end
        for stranger in strangers:
            stranger.close()


def test_silent_connections_do_not_either() -> None:
    with listen_for_probes(SECRET) as answerer, ExitStack() as crowd:
        for _ in range(20):
            crowd.enter_context(socket.create_connection(("127.0.0.1", answerer.port)))
        result = measure(probe(shown_address(answerer)), SECRET)  # at the first try
        assert (result.error, result.shows) == ("", "link")


def test_a_node_that_does_not_greet_says_nothing_of_the_link() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = measure(probe(f"127.0.0.1:{silent.getsockname()[1]}"), SECRET)
        assert (result.seconds, result.shows) == (math.inf, "node")
    with listen_for_probes(SECRET) as answerer, ExitStack() as others:
        for _ in range(8):
            sock = socket.create_connection(("127.0.0.1", answerer.port))
            wire = Connection(sock, "answerer", 60.0)
            others.callback(wire.release)
            greet_server(wire, SECRET, "probe", role="agent", wait_s=60.0)
        result = measure(probe(shown_address(answerer)), SECRET)
        assert result.shows == "node"
        assert "the server is full" in result.error


def test_an_address_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_BIND", "192.0.2.1")
    with pytest.raises(StoreError) as info:
        listen_for_probes(SECRET)
    assert info.value.kind == "listen"


def test_the_address_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_BIND", "127.0.0.2")
    with listen_for_probes(SECRET) as answerer:
        assert shown_address(answerer) == f"127.0.0.2:{answerer.port}"
        assert measure(probe(shown_address(answerer)), SECRET).error == ""
        monkeypatch.setenv("CKPTD_BIND", "::1")
        assert shown_address(answerer) == f"[::1]:{answerer.port}"


def test_it_is_the_one_by_which_the_daemon_is_reached() -> None:
    with listen_for_probes(SECRET, "127.0.0.3") as answerer:
        assert shown_address(answerer, "127.0.0.3").startswith("127.0.0.")
        assert measure(probe(shown_address(answerer, "127.0.0.3")), SECRET).error == ""
    assert shown_address(answerer, "no.such.host.invalid").startswith("127.0.0.1:")
